//! AdamW (1711.05101) with clipping: a pass over the gradients for their norm, and one over values, gradients
//! and moments, shared out between threads. Between the two other ranks' norms may come in.

use rayon::prelude::*;

use super::rows::{Rows, expect, expect_shape};
use super::simd::{multiply_add, vectorised};
use super::statistics;
use crate::ops::{AdamWParameter, AdamWStep, MEASURED, PARTS, Updated};
use crate::{Result, Tensor};

/// Elements of one piece of work.
const PIECE: usize = 64 * 1024;

/// What every element of a step has in common.
#[derive(Clone, Copy)]
struct Factors {
    gradient_scale: f32,
    decay: f32,
    beta1: f32,
    beta2: f32,
    step_size: f32,
    root_correction: f32,
    epsilon: f32,
}

impl Factors {
    /// `m̂ = m / (1 − β₁ᵗ)` and `v̂ = v / (1 − β₂ᵗ)` become factors of the step and of the root.
    fn of(step: AdamWStep, gradient_scale: f32) -> Self {
        let exponent = f64::from(step.step);
        let first_correction = 1.0 - f64::from(step.beta1).powf(exponent);
        let second_correction = 1.0 - f64::from(step.beta2).powf(exponent);
        Self {
            gradient_scale,
            decay: (1.0 - f64::from(step.learning_rate) * f64::from(step.weight_decay)) as f32,
            beta1: step.beta1,
            beta2: step.beta2,
            step_size: (f64::from(step.learning_rate) / first_correction) as f32,
            root_correction: (1.0 / second_correction.sqrt()) as f32,
            epsilon: step.epsilon,
        }
    }
}

vectorised! {
    /// One step of every element; the gradient is left at zero.
    fn update_piece(
        value: &mut [f32],
        gradient: &mut [f32],
        first_moment: &mut [f32],
        second_moment: &mut [f32],
        factors: Factors,
    ) {
        let moments = first_moment.iter_mut().zip(second_moment);
        for ((value, gradient), (first, second)) in value.iter_mut().zip(gradient).zip(moments) {
            let scaled = *gradient * factors.gradient_scale;
            *gradient = 0.0;
            *first = multiply_add::<FMA>(1.0 - factors.beta1, scaled - *first, *first);
            *second = multiply_add::<FMA>(1.0 - factors.beta2, scaled * scaled, factors.beta2 * *second);
            let root = multiply_add::<FMA>(second.sqrt(), factors.root_correction, factors.epsilon);
            *value = multiply_add::<FMA>(*value, factors.decay, -(factors.step_size * *first / root));
        }
    }
}

/// The sums of all losses and of the squares of all gradients.
pub(super) fn measure(gradients: &[&Tensor], losses: &[Tensor]) -> Result<Tensor> {
    let (mut loss, mut squares) = (0.0, 0.0);
    for losses in losses {
        loss += statistics::sum(losses)?;
    }
    for gradient in gradients {
        squares += statistics::sum_of_squares(gradient)?;
    }
    Tensor::from_vec([split(loss), split(squares)].concat(), 1, MEASURED)
}

/// A sum as f32 parts, the largest first: each holds 24 of an f64's 53 bits.
fn split(sum: f64) -> [f32; PARTS] {
    let mut rest = sum;
    [(); PARTS].map(|()| {
        let part = rest as f32;
        rest -= f64::from(part);
        part
    })
}

/// The step's loss and norm from every rank's measure.
fn judge(measured: &Tensor) -> Result<Updated> {
    expect_shape("update", "measured", measured, measured.rows(), MEASURED)?;
    let rows = Rows::of(measured)?;
    let (mut loss, mut squares) = (0.0, 0.0);
    for index in 0..measured.rows() {
        let (losses, gradients) = rows.row(index).split_at(PARTS);
        let sum = |parts: &[f32]| parts.iter().rev().map(|part| f64::from(*part)).sum::<f64>();
        loss += sum(losses);
        squares += sum(gradients);
    }
    Ok(Updated {
        loss,
        gradient_norm: squares.sqrt(),
    })
}

/// One step where what was measured is finite.
pub(super) fn update(
    parameters: &mut [AdamWParameter<'_>],
    step: AdamWStep,
    measured: &Tensor,
) -> Result<Updated> {
    check(parameters, step)?;
    let updated = judge(measured)?;
    if !updated.is_applied() {
        for parameter in parameters {
            parameter.gradient.host_mut()?.fill(0.0);
        }
        return Ok(updated);
    }
    let scale = (step.clip / (updated.gradient_norm + 1e-6)).min(1.0);
    apply(parameters, Factors::of(step, scale as f32))?;
    for parameter in parameters.iter_mut() {
        let AdamWParameter { value, working, .. } = parameter;
        if let Some(working) = working {
            working.host_mut()?.copy_from_slice(value.host()?);
        }
    }
    Ok(updated)
}

fn check(parameters: &[AdamWParameter<'_>], step: AdamWStep) -> Result<()> {
    const OPERATION: &str = "update";
    expect(
        OPERATION,
        step.step >= 1,
        || "a step of at least 1".to_owned(),
        || step.step.to_string(),
    )?;
    for parameter in parameters {
        let (rows, columns) = (parameter.value.rows(), parameter.value.columns());
        let tensors = [
            ("value", Some(&*parameter.value)),
            ("gradient", Some(&*parameter.gradient)),
            ("first_moment", Some(&*parameter.first_moment)),
            ("second_moment", Some(&*parameter.second_moment)),
            ("working", parameter.working.as_deref()),
        ];
        for (name, tensor) in tensors {
            let Some(tensor) = tensor else { continue };
            expect_shape(OPERATION, name, tensor, rows, columns)?;
            expect(
                OPERATION,
                tensor.is_contiguous(),
                || "contiguous tensors".to_owned(),
                || format!("{} elements from row to row", tensor.leading_dimension()),
            )?;
        }
    }
    Ok(())
}

fn apply(parameters: &mut [AdamWParameter<'_>], factors: Factors) -> Result<()> {
    let mut pieces = Vec::new();
    for parameter in parameters {
        let values = parameter.value.host_mut()?.chunks_mut(PIECE);
        let gradients = parameter.gradient.host_mut()?.chunks_mut(PIECE);
        let first_moments = parameter.first_moment.host_mut()?.chunks_mut(PIECE);
        let second_moments = parameter.second_moment.host_mut()?.chunks_mut(PIECE);
        pieces.extend(values.zip(gradients).zip(first_moments.zip(second_moments)));
    }
    pieces
        .into_par_iter()
        .for_each(|((value, gradient), (first, second))| {
            update_piece(value, gradient, first, second, factors);
        });
    Ok(())
}
