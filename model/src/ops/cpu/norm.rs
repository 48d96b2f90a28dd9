//! RMS norm of whole rows or of each head in a row.

use rayon::prelude::*;

use super::rows::{Rows, expect, expect_shape, for_each_row_pair};
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
    fn add_pulled_row(grad_x: &mut [f32], scaled: &[f32], x: &[f32], reciprocal: f32, pull: f32) {
        for ((grad, scaled), x) in grad_x.iter_mut().zip(scaled).zip(x) {
            *grad += multiply_add::<FMA>(reciprocal, *scaled, -(x * pull));
        }
    }

    /// `grad_x = reciprocal · scaled − x · pull`.
    fn pulled_row(grad_x: &mut [f32], scaled: &[f32], x: &[f32], reciprocal: f32, pull: f32) {
        for ((grad, scaled), x) in grad_x.iter_mut().zip(scaled).zip(x) {
            *grad = multiply_add::<FMA>(reciprocal, *scaled, -(x * pull));
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
    let (x, weight) = (Rows::of(x)?, weight.host()?);
    for_each_row_pair(&mut output, &mut reciprocals, |index, output, reciprocals| {
        let x = x.row(index);
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

/// With `g = grad · weight` and `n` the width: `grad_x = r g − x r³ (g · x) / n + residual`,
/// `grad_weight += Σ grad x r`.
pub(super) fn backward(
    grad_output: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    reciprocal: &Tensor,
    residual: Option<Tensor>,
    grad_weight: &mut Tensor,
) -> Result<Tensor> {
    const OPERATION: &str = "rms_norm_backward";
    let groups = groups_of(OPERATION, x, weight)?;
    let width = weight.columns();
    expect_shape(OPERATION, "grad_output", grad_output, x.rows(), x.columns())?;
    expect_shape(OPERATION, "reciprocal", reciprocal, x.rows(), groups)?;
    expect_shape(OPERATION, "grad_weight", grad_weight, 1, width)?;
    let carry = if residual.is_some() {
        add_pulled_row
    } else {
        pulled_row
    };
    let mut grad_x = match residual {
        Some(residual) => residual,
        None => Tensor::unspecified(x.rows(), x.columns())?,
    };
    expect_shape(OPERATION, "residual", &grad_x, x.rows(), x.columns())?;
    if x.is_empty() {
        return Ok(grad_x);
    }
    let weights = weight.host()?;
    let (gradients, inputs, reciprocals) = (Rows::of(grad_output)?, Rows::of(x)?, Rows::of(reciprocal)?);
    let mut partial = vec![0.0f32; x.rows().div_ceil(BLOCK_ROWS) * width];
    let (leading, rows, columns) = (grad_x.leading_dimension(), x.rows(), x.columns());
    let run = |((block, grad_rows), sums): ((usize, &mut [f32]), &mut [f32])| {
        let mut scaled = vec![0.0f32; width];
        let first = block * BLOCK_ROWS;
        for (index, grad_row) in (first..rows.min(first + BLOCK_ROWS)).zip(grad_rows.chunks_mut(leading)) {
            let groups = grad_row[..columns]
                .chunks_mut(width)
                .zip(gradients.row(index).chunks(width))
                .zip(inputs.row(index).chunks(width));
            for (((grad_x, grad), x), r) in groups.zip(reciprocals.row(index)) {
                product_into(&mut scaled, grad, weights);
                let pull = r * r * r * simd::dot(&scaled, x) / width as f32;
                carry(grad_x, &scaled, x, *r, pull);
                weigh_row(sums, grad, x, *r);
            }
        }
    };
    grad_x
        .host_mut()?
        .par_chunks_mut(leading * BLOCK_ROWS)
        .enumerate()
        .zip(partial.par_chunks_mut(width))
        .for_each(run);
    for (column, grad) in grad_weight.host_mut()?.iter_mut().enumerate() {
        let sums = partial.iter().skip(column).step_by(width);
        *grad += sums.map(|value| f64::from(*value)).sum::<f64>() as f32;
    }
    Ok(grad_x)
}
