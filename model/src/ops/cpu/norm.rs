//! RMS norm of whole rows or of each head in a row.

use rayon::prelude::*;

use super::rows::{Shared, expect, expect_shape, for_each_row_pair, row};
use super::simd::{self, multiply_add, vectorised};
use crate::{Result, Tensor};

/// Rows whose contributions to the weight's gradient are added up before they meet the others': fixed, so
/// that the sum does not depend on threads.
const BLOCK_ROWS: usize = 32;

vectorised! {
    /// `out = x · reciprocal · weight`.
    fn scale_row(out: &mut [f32], x: &[f32], weight: &[f32], reciprocal: f32) {
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * reciprocal * weight;
        }
    }

    /// `out = a b`.
    fn product_into(out: &mut [f32], a: &[f32], b: &[f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a * b;
        }
    }

    /// `grad_x += reciprocal · scaled − x · pull`.
    fn pull_row(grad_x: &mut [f32], scaled: &[f32], x: &[f32], reciprocal: f32, pull: f32) {
        for ((grad, scaled), x) in grad_x.iter_mut().zip(scaled).zip(x) {
            *grad += multiply_add::<FMA>(reciprocal, *scaled, -(x * pull));
        }
    }

    /// `sum += grad · x · reciprocal`.
    fn weigh_row(sum: &mut [f32], grad: &[f32], x: &[f32], reciprocal: f32) {
        for ((sum, grad), x) in sum.iter_mut().zip(grad).zip(x) {
            *sum = multiply_add::<FMA>(grad * reciprocal, *x, *sum);
        }
    }
}

/// Groups of a row; an error when the weight's width does not divide it.
fn groups_of(operation: &'static str, x: &Tensor, weight: &Tensor) -> Result<usize> {
    let width = weight.columns();
    expect(
        operation,
        weight.rows() == 1 && width > 0 && x.columns().is_multiple_of(width),
        || format!("a weight of 1 x a divisor of {}", x.columns()),
        || format!("{} x {width}", weight.rows()),
    )?;
    Ok(x.columns() / width)
}

pub(super) fn forward(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)> {
    let groups = groups_of("rms_norm", x, weight)?;
    let width = weight.columns();
    let mut output = Tensor::unspecified(x.rows(), x.columns())?;
    let mut reciprocals = Tensor::unspecified(x.rows(), groups)?;
    let weight = weight.host();
    for_each_row_pair(&mut output, &mut reciprocals, |index, output, reciprocals| {
        let x = row(x, index);
        for ((output, x), reciprocal) in output
            .chunks_mut(width)
            .zip(x.chunks(width))
            .zip(reciprocals.iter_mut())
        {
            let mean = simd::sum_of_squares(x) / width as f64;
            *reciprocal = (1.0 / (mean + epsilon).sqrt()) as f32;
            scale_row(output, x, weight, *reciprocal);
        }
    })?;
    Ok((output, reciprocals))
}

/// With `g = grad · weight` and `n` the width: `grad_x += r g − x r³ (g · x) / n`, `grad_weight += Σ grad x r`.
pub(super) fn backward(
    grad_output: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    reciprocal: &Tensor,
    grad_x: &mut Tensor,
    grad_weight: Option<&mut Tensor>,
) -> Result<()> {
    const OPERATION: &str = "rms_norm_backward";
    let groups = groups_of(OPERATION, x, weight)?;
    let width = weight.columns();
    expect_shape(OPERATION, "grad_output", grad_output, x.rows(), x.columns())?;
    expect_shape(OPERATION, "grad_x", grad_x, x.rows(), x.columns())?;
    expect_shape(OPERATION, "reciprocal", reciprocal, x.rows(), groups)?;
    if let Some(grad_weight) = &grad_weight {
        expect_shape(OPERATION, "grad_weight", grad_weight, 1, width)?;
    }
    if x.is_empty() {
        return Ok(());
    }
    let weights = weight.host();
    let wanted = grad_weight.is_some();
    let blocks = x.rows().div_ceil(BLOCK_ROWS);
    let mut partial = vec![0.0f32; if wanted { blocks * width } else { 0 }];
    let partial_width = if wanted { width } else { 0 };
    let partials = Shared::new(&mut partial);
    let (leading, rows, columns) = (grad_x.leading_dimension(), x.rows(), x.columns());
    let run = |(block, grad_rows): (usize, &mut [f32])| {
        // SAFETY: each block has its own part.
        let sums = unsafe { partials.slice(block * partial_width, partial_width) };
        let mut scaled = vec![0.0f32; width];
        let first = block * BLOCK_ROWS;
        for (index, grad_row) in (first..rows.min(first + BLOCK_ROWS)).zip(grad_rows.chunks_mut(leading)) {
            let (grad, x) = (row(grad_output, index), row(x, index));
            let groups = grad_row[..columns]
                .chunks_mut(width)
                .zip(grad.chunks(width))
                .zip(x.chunks(width));
            for (((grad_x, grad), x), r) in groups.zip(row(reciprocal, index)) {
                product_into(&mut scaled, grad, weights);
                let pull = r * r * r * simd::dot(&scaled, x) / width as f32;
                pull_row(grad_x, &scaled, x, *r, pull);
                weigh_row(sums, grad, x, *r);
            }
        }
    };
    let gradients = grad_x
        .host_mut()?
        .par_chunks_mut(leading * BLOCK_ROWS)
        .enumerate();
    gradients.for_each(run);
    let Some(grad_weight) = grad_weight else {
        return Ok(());
    };
    for (column, grad) in grad_weight.host_mut()?.iter_mut().enumerate() {
        let sum: f64 = partial
            .iter()
            .skip(column)
            .step_by(width)
            .map(|value| f64::from(*value))
            .sum();
        *grad += sum as f32;
    }
    Ok(())
}
