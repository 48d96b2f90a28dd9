//! AdamW (1711.05101): one pass over values, gradients and moments, shared out between threads.

use rayon::prelude::*;

use super::rows::{expect, expect_shape};
use super::simd::{multiply_add, vectorised};
use crate::Result;
use crate::ops::{AdamWParameter, AdamWStep};

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
    fn of(step: AdamWStep) -> Self {
        let exponent = f64::from(step.step);
        let first_correction = 1.0 - f64::from(step.beta1).powf(exponent);
        let second_correction = 1.0 - f64::from(step.beta2).powf(exponent);
        Self {
            gradient_scale: step.gradient_scale,
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
    fn update(
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

pub(super) fn step(parameters: &mut [AdamWParameter<'_>], step: AdamWStep) -> Result<()> {
    const OPERATION: &str = "adamw";
    expect(
        OPERATION,
        step.step >= 1,
        || "a step of at least 1".to_owned(),
        || step.step.to_string(),
    )?;
    let factors = Factors::of(step);
    for parameter in parameters.iter() {
        let (rows, columns) = (parameter.value.rows(), parameter.value.columns());
        let others = [
            ("gradient", &*parameter.gradient),
            ("first_moment", &*parameter.first_moment),
            ("second_moment", &*parameter.second_moment),
        ];
        for (name, tensor) in others {
            expect_shape(OPERATION, name, tensor, rows, columns)?;
        }
        let tensors = others
            .iter()
            .map(|(_, tensor)| *tensor)
            .chain([&*parameter.value]);
        for tensor in tensors {
            let found = || format!("{} elements from row to row", tensor.leading_dimension());
            expect(
                OPERATION,
                tensor.is_contiguous(),
                || "contiguous tensors".to_owned(),
                found,
            )?;
        }
    }
    let mut pieces = Vec::new();
    for parameter in parameters.iter_mut() {
        let values = parameter.value.host_mut()?.chunks_mut(PIECE);
        let gradients = parameter.gradient.host_mut()?.chunks_mut(PIECE);
        let first_moments = parameter.first_moment.host_mut()?.chunks_mut(PIECE);
        let second_moments = parameter.second_moment.host_mut()?.chunks_mut(PIECE);
        pieces.extend(values.zip(gradients).zip(first_moments.zip(second_moments)));
    }
    pieces
        .into_par_iter()
        .for_each(|((value, gradient), (first, second))| {
            update(value, gradient, first, second, factors);
        });
    Ok(())
}
