//! AdamW.

use espalier_model::ops::cuda::{CudaParameter, CudaStep, Element, Matrix, Optimiser, Result};

use crate::harness::{Harness, Operand, Output};

pub(crate) fn check(harness: &mut Harness) -> Result<()> {
    let sizes = [576 * 96, 577, 1, 8192, 8193, 999, 200_003];
    let step = CudaStep {
        rate: 3e-4,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        step: 7,
        gradient_scale: 0.5,
        clip: 1.0,
    };
    let mut hosts = Vec::new();
    let mut parameters = Vec::new();
    for (index, size) in sizes.into_iter().enumerate() {
        // One that does not begin at a multiple of 16 bytes.
        let skip = usize::from(index == 5);
        let mut make = |scale: f64| -> Result<Operand> {
            let whole = harness.row(size + skip, scale)?;
            Ok(Operand {
                device: whole.device.narrow_columns(skip, size)?,
                host: whole.host[skip..].to_vec(),
            })
        };
        let (value, gradient, first) = (make(1.0)?, make(0.01)?, make(0.01)?);
        let squared: Vec<f32> = make(0.01)?.host.iter().map(|x| (x * x) as f32).collect();
        let second = harness.device.upload_f32(&squared, 1, size)?;
        let working = if index == 1 {
            None
        } else {
            Some(harness.device.matrix(Element::Bf16, 1, size)?)
        };
        parameters.push(CudaParameter {
            value: value.device,
            gradient: gradient.device,
            first_moment: first.device,
            second_moment: second,
            working,
            decay: if index % 2 == 1 { 0.1 } else { 0.0 },
        });
        let second: Vec<f64> = squared.into_iter().map(f64::from).collect();
        hosts.push([value.host, gradient.host, first.host, second]);
    }
    let optimiser = harness.device.optimiser(parameters)?;
    harness.device.set_step(&optimiser, step)?;
    measured_update(harness, &optimiser, &[])?;
    let squares: f64 = hosts.iter().flat_map(|host| &host[1]).map(|g| g * g).sum();
    let norm = 0.5 * squares.sqrt();
    let factor = 0.5 * (1.0 / (norm + 1e-6)).min(1.0);
    let output = |matrix: &Matrix| Output::of(matrix.clone());
    harness.compare("adamw norm", "", &output(optimiser.norm()), 1e-6, || {
        vec![norm, factor]
    })?;
    let (rate, b1, b2) = (f64::from(step.rate), f64::from(step.beta1), f64::from(step.beta2));
    for (parameter, [value, gradient, first, second]) in optimiser.parameters().iter().zip(&hosts) {
        let shape = value.len().to_string();
        let m = |i: usize| b1 * first[i] + (1.0 - b1) * factor * gradient[i];
        let v = |i: usize| b2 * second[i] + (1.0 - b2) * (factor * gradient[i]).powi(2);
        let change = |i: usize| {
            let step =
                (m(i) / (1.0 - b1.powi(7))) / ((v(i) / (1.0 - b2.powi(7))).sqrt() + f64::from(step.epsilon));
            -rate * (f64::from(parameter.decay) * value[i] + step)
        };
        let all = 0..value.len();
        let new = || all.clone().map(|i| value[i] + change(i)).collect();
        harness.compare("adamw value", &shape, &output(&parameter.value), 1e-7, new)?;
        harness.compare(
            "adamw first moment",
            &shape,
            &output(&parameter.first_moment),
            1e-6,
            || all.clone().map(m).collect(),
        )?;
        harness.compare(
            "adamw second moment",
            &shape,
            &output(&parameter.second_moment),
            1e-6,
            || all.clone().map(v).collect(),
        )?;
        let left = harness.device.download(&parameter.gradient)?;
        harness.record(
            "adamw gradient",
            &shape,
            left.iter().all(|&g| g == 0.0),
            "is not left at zero",
        );
        let Some(working) = &parameter.working else {
            continue;
        };
        let (working, master) = (
            harness.device.download(working)?,
            harness.device.download(&parameter.value)?,
        );
        let same = working
            .iter()
            .zip(&master)
            .all(|(&w, &m)| w == half::bf16::from_f32(m).to_f32());
        harness.record("adamw working copy", &shape, same, "is not the rounded value");
    }
    not_finite(harness, &optimiser)
}

fn measured_update(harness: &Harness, optimiser: &Optimiser, losses: &[Matrix]) -> Result<()> {
    let parameters = optimiser.parameters().iter();
    let gradients: Vec<Matrix> = parameters.map(|parameter| parameter.gradient.clone()).collect();
    let measured = harness.device.measure(&gradients, losses)?;
    harness.device.update(optimiser, &measured)
}

/// A gradient that is not finite changes nothing but the gradients.
fn not_finite(harness: &mut Harness, optimiser: &Optimiser) -> Result<()> {
    let Some(parameter) = optimiser.parameters().get(3) else {
        return Ok(());
    };
    let before = harness.device.download(&parameter.value)?;
    let infinite = harness.device.upload_f32(&[f32::INFINITY], 1, 1)?;
    harness
        .device
        .cast(&parameter.gradient.narrow_columns(5, 1)?, &infinite)?;
    measured_update(harness, optimiser, &[])?;
    let unchanged = harness.device.download(&parameter.value)? == before;
    harness.record("adamw", "not finite", unchanged, "was updated all the same");
    let left = harness.device.download(&parameter.gradient)?;
    harness.record(
        "adamw gradient",
        "not finite",
        left.iter().all(|&g| g == 0.0),
        "is not left at zero",
    );
    let norm = harness.device.download(optimiser.norm())?;
    harness.record(
        "adamw norm",
        "not finite",
        norm.first().is_some_and(|n| !n.is_finite()),
        "does not say so",
    );
    // Nor does a loss that is not, though the gradient is.
    let gradient = harness
        .device
        .upload_f32(&vec![0.5; parameter.value.len()], 1, parameter.value.len())?;
    let losses = [[1.0, 2.0], [f32::NAN, 3.0]].map(|losses| harness.device.upload_f32(&losses, 2, 1));
    let [sound, unsound] = losses;
    harness.device.cast(&parameter.gradient, &gradient)?;
    measured_update(harness, optimiser, &[sound?, unsound?])?;
    let unchanged = harness.device.download(&parameter.value)? == before;
    harness.record("adamw", "loss not finite", unchanged, "was updated all the same");
    Ok(())
}
