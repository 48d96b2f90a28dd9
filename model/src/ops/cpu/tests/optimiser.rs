//! The update against float64.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::ops::{AdamWParameter, AdamWStep, Updated};

const STEP: AdamWStep = AdamWStep {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 1,
    clip: 2.0,
};

/// One parameter's value, gradient, moments and working copy.
struct Parameter([Tensor; 5]);

impl Parameter {
    fn new(rows: usize, columns: usize, seed: u64) -> Self {
        let zeros = || zeros(rows, columns);
        Self([tensor(rows, columns, seed), zeros(), zeros(), zeros(), zeros()])
    }

    fn handles(&mut self) -> AdamWParameter<'_> {
        let [value, gradient, first_moment, second_moment, working] = &mut self.0;
        AdamWParameter {
            value,
            gradient,
            first_moment,
            second_moment,
            working: Some(working),
        }
    }
}

fn update(parameters: &mut [Parameter], step: AdamWStep, losses: &[Tensor]) -> Updated {
    let gradients: Vec<&Tensor> = parameters.iter().map(|parameter| &parameter.0[1]).collect();
    let measured = OPS.measure(&gradients, losses).unwrap();
    let mut handles: Vec<AdamWParameter<'_>> = parameters.iter_mut().map(Parameter::handles).collect();
    let pending = OPS.update(&mut handles, step, &measured).unwrap();
    assert!(pending.is_ready());
    pending.read().unwrap()
}

#[test]
fn three_clipped_steps_match_float64_and_leave_gradients_at_zero() {
    let mut parameters = [Parameter::new(3, 41, 1), Parameter::new(1, 7, 2)];
    let mut value = [&parameters[0], &parameters[1]].map(|parameter| values(&parameter.0[0]));
    let (mut first, mut second) = ([vec![0.0; 123], vec![0.0; 7]], [vec![0.0; 123], vec![0.0; 7]]);
    for step in 1..=3u32 {
        let seed = 10 + 2 * u64::from(step);
        parameters[0].0[1] = tensor(3, 41, seed);
        parameters[1].0[1] = tensor(1, 7, seed + 1);
        let gradients = [&parameters[0], &parameters[1]].map(|parameter| values(&parameter.0[1]));
        let norm = gradients.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
        assert!(norm > 2.0, "nothing to clip");
        for (which, gradients) in gradients.iter().enumerate() {
            for (index, gradient) in gradients.iter().map(|gradient| gradient * 2.0 / norm).enumerate() {
                let (first, second) = (&mut first[which][index], &mut second[which][index]);
                *first = 0.9 * *first + 0.1 * gradient;
                *second = 0.95 * *second + 0.05 * gradient * gradient;
                let mean = *first / (1.0 - 0.9f64.powf(f64::from(step)));
                let variance = *second / (1.0 - 0.95f64.powf(f64::from(step)));
                let value = &mut value[which][index];
                *value -= 0.01 * (0.1 * *value + mean / (variance.sqrt() + 1e-8));
            }
        }
        let losses = [tensor(5, 1, 1), tensor(3, 1, 2)];
        let updated = update(&mut parameters, AdamWStep { step, ..STEP }, &losses);
        assert!((updated.gradient_norm / norm - 1.0).abs() < 1e-6);
        let sum: f64 = losses.iter().flat_map(values).sum();
        assert!((updated.loss - sum).abs() < 1e-12);
        for parameter in &parameters {
            assert!(values(&parameter.0[1]).iter().all(|gradient| *gradient == 0.0));
        }
    }
    for (which, parameter) in parameters.iter().enumerate() {
        assert_close("value", &values(&parameter.0[0]), &value[which], 1e-6);
        assert_close("first moment", &values(&parameter.0[2]), &first[which], 1e-6);
        assert_close("second moment", &values(&parameter.0[3]), &second[which], 1e-6);
        assert_eq!(values(&parameter.0[4]), values(&parameter.0[0]), "working copy");
    }
}

#[test]
fn a_small_gradient_is_not_stretched_to_the_clip() {
    let step = |clip| {
        let mut parameters = [Parameter::new(2, 3, 1)];
        parameters[0].0[1] = tensor(2, 3, 5);
        update(&mut parameters, AdamWStep { clip, ..STEP }, &[]);
        values(&parameters[0].0[2])
    };
    assert_eq!(step(100.0), step(1e6));
    assert_ne!(step(100.0), step(0.01));
}

#[test]
fn an_update_that_is_not_finite_changes_nothing_but_the_gradients() {
    let nan = Tensor::from_vec(vec![1.0, f32::NAN], 2, 1).unwrap();
    let infinite = Tensor::from_vec(vec![f32::INFINITY; 6], 2, 3).unwrap();
    for (gradient, losses) in [(tensor(2, 3, 5), vec![nan]), (infinite, vec![])] {
        let mut parameters = [Parameter::new(2, 3, 1)];
        parameters[0].0[1] = gradient;
        let before = values(&parameters[0].0[0]);
        let updated = update(&mut parameters, STEP, &losses);
        assert!(!updated.is_applied());
        let [value, others @ ..] = &parameters[0].0;
        assert_eq!(values(value), before);
        for tensor in others {
            assert!(values(tensor).iter().all(|entry| *entry == 0.0));
        }
    }
}

#[test]
fn two_ranks_measures_make_the_step_of_one_that_has_both_their_shares() {
    let gradients = [tensor(3, 41, 5), tensor(1, 7, 6)];
    let losses = [tensor(5, 1, 1), tensor(3, 1, 2)];
    let measure = |gradients: &[&Tensor], losses: &[Tensor]| OPS.measure(gradients, losses).unwrap();
    let alone = measure(&[&gradients[0], &gradients[1]], &losses);
    let first = measure(&[&gradients[0]], &losses[..1]);
    let second = measure(&[&gradients[1]], &losses[1..]);
    let both = OPS.concatenate(&[&first, &second]).unwrap();
    let step = |measured: &Tensor| {
        let mut parameter = Parameter::new(3, 41, 1);
        parameter.0[1] = OPS.contiguous(&gradients[0]).unwrap();
        let pending = OPS.update(&mut [parameter.handles()], STEP, measured).unwrap();
        (pending.read().unwrap(), values(&parameter.0[0]))
    };
    assert_eq!(step(&alone), step(&both));
    assert_ne!(step(&alone).1, step(&first).1);
    // To the last bit of an f64, which three f32 hold.
    let sum: f64 = losses.iter().flat_map(values).sum();
    assert_eq!(step(&alone).0.loss, sum);
    let unsound = OPS
        .concatenate(&[&first, &measure(&[], &[tensor_of(f32::NAN)])])
        .unwrap();
    assert!(!step(&unsound).0.is_applied());
}

fn tensor_of(value: f32) -> Tensor {
    Tensor::from_vec(vec![value], 1, 1).unwrap()
}

#[test]
fn a_shared_parameter_is_refused_before_anything_is_written() {
    let mut parameter = Parameter::new(2, 2, 1);
    parameter.0[1] = tensor(2, 2, 2);
    let other = parameter.0[0].clone();
    let before = values(&parameter.0[1]);
    let measured = OPS.measure(&[&parameter.0[1]], &[]).unwrap();
    assert!(OPS.update(&mut [parameter.handles()], STEP, &measured).is_err());
    assert_eq!(values(&parameter.0[1]), before);
    drop(other);
}
