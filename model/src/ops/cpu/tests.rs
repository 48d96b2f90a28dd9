//! Every operation against the same formula in f64, at odd sizes and over views; every gradient against
//! central differences of that formula. New buffers hold NaN in tests, so a forgotten element shows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod elementwise;
mod flat;
mod linear;
mod loss;
mod optimiser;

use super::CpuOperations;
use crate::ops::{Linear, Operations};
use crate::{ElementType, Tensor};

const OPS: CpuOperations = CpuOperations;

/// Numbers in −1..1, the same for the same seed.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    for _ in 0..16 {
        next();
    }
    (0..count).map(|_| next()).collect()
}

fn tensor(rows: usize, columns: usize, seed: u64) -> Tensor {
    Tensor::from_vec(numbers(rows * columns, seed), rows, columns).unwrap()
}

/// A prefix view with a gap after each row.
fn view(rows: usize, columns: usize, seed: u64) -> Tensor {
    tensor(rows + 2, columns + 3, seed)
        .first_rows(rows)
        .unwrap()
        .first_columns(columns)
        .unwrap()
}

fn zeros(rows: usize, columns: usize) -> Tensor {
    OPS.zeros(rows, columns, ElementType::F32).unwrap()
}

/// A layer without a bias.
fn plain(weight: &Tensor) -> Linear<'_> {
    Linear { weight, bias: None }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    OPS.download(tensor).unwrap().into_iter().map(f64::from).collect()
}

/// Within `tolerance` of the largest expected value. Where all of them are zero only rounding may be left of
/// terms that cancel.
fn assert_close(name: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    const ROUNDING: f64 = 1e-6;
    assert_eq!(actual.len(), expected.len(), "{name}: length");
    let largest = expected.iter().fold(0f64, |size, value| size.max(value.abs()));
    let allowed = if largest == 0.0 {
        ROUNDING
    } else {
        tolerance * largest.max(1e-3)
    };
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert!(
            (actual - expected).abs() <= allowed,
            "{name}[{index}]: {actual} instead of {expected}"
        );
    }
}

/// `Σ weights · formula(inputs)`.
fn weighted(formula: &impl Fn(&[Vec<f64>]) -> Vec<f64>, inputs: &[Vec<f64>], weights: &[f64]) -> f64 {
    formula(inputs)
        .iter()
        .zip(weights)
        .map(|(value, weight)| value * weight)
        .sum()
}

/// Derivatives of `Σ weights · formula(inputs)` to every element of `inputs[which]`, by central differences.
fn derivatives(
    formula: impl Fn(&[Vec<f64>]) -> Vec<f64>,
    inputs: &[Vec<f64>],
    which: usize,
    weights: &[f64],
) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut inputs = inputs.to_vec();
    let mut slopes = Vec::new();
    for index in 0..inputs[which].len() {
        let before = inputs[which][index];
        inputs[which][index] = before + STEP;
        let above = weighted(&formula, &inputs, weights);
        inputs[which][index] = before - STEP;
        let below = weighted(&formula, &inputs, weights);
        inputs[which][index] = before;
        slopes.push((above - below) / (2.0 * STEP));
    }
    slopes
}

/// Checks `gradient` along one random direction of `inputs[which]`: for sizes where every element is too many.
fn assert_slope(
    name: &str,
    formula: impl Fn(&[Vec<f64>]) -> Vec<f64>,
    inputs: &[Vec<f64>],
    which: usize,
    weights: &[f64],
    gradient: &[f64],
) {
    const STEP: f64 = 1e-5;
    let direction: Vec<f64> = numbers(gradient.len(), 77).into_iter().map(f64::from).collect();
    let moved = |step: f64| {
        let mut inputs = inputs.to_vec();
        inputs[which]
            .iter_mut()
            .zip(&direction)
            .for_each(|(value, along)| *value += step * along);
        weighted(&formula, &inputs, weights)
    };
    let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
    let actual: f64 = gradient
        .iter()
        .zip(&direction)
        .map(|(slope, along)| slope * along)
        .sum();
    let size: f64 = gradient.iter().map(|slope| slope * slope).sum::<f64>().sqrt();
    assert!(
        (actual - expected).abs() <= 2e-5 * size,
        "{name}: slope {actual} instead of {expected}"
    );
}

/// Runs `work` on one thread and on three, and asserts that the bits agree.
fn assert_same_on_any_threads(work: impl Fn() -> Vec<f32> + Sync) {
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(&work)
            .into_iter()
            .map(f32::to_bits)
            .collect::<Vec<u32>>()
    };
    let alone = on(1);
    assert!(!alone.is_empty());
    assert!(alone == on(3), "one thread and three give different bits");
}
