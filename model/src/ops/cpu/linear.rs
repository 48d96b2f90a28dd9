//! Linear layers: what is checked and added around a product, forward and backward.

use super::matmul::{Threads, View, ViewMut, linear_into, multiply};
use super::rows::{expect, expect_shape, for_each_row, row};
use super::simd;
use crate::{Result, Tensor};

/// Rows whose bias gradients are added up in f32 before they are added in f64.
const BLOCK_ROWS: usize = 32;

pub(super) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let operation = if residual.is_some() {
        "linear_residual"
    } else {
        "linear"
    };
    expect(
        operation,
        x.columns() == weight.columns(),
        || format!("x with {} columns, as the weight", weight.columns()),
        || format!("{} x {}", x.rows(), x.columns()),
    )?;
    if let Some(bias) = bias {
        expect_shape(operation, "bias", bias, 1, weight.rows())?;
    }
    if let Some(residual) = residual {
        expect_shape(operation, "residual", residual, x.rows(), weight.rows())?;
    }
    let mut out = Tensor::unspecified(x.rows(), weight.rows())?;
    // What is to be added goes in first, and the product is added to it.
    match (residual, bias) {
        (Some(residual), Some(bias)) => for_each_row(&mut out, |index, out| {
            simd::sum_into(out, row(residual, index), bias.host());
        })?,
        (Some(residual), None) => {
            for_each_row(&mut out, |index, out| out.copy_from_slice(row(residual, index)))?
        }
        (None, Some(bias)) => for_each_row(&mut out, |_, out| out.copy_from_slice(bias.host()))?,
        (None, None) => {}
    }
    linear_into(&mut out, x, weight, residual.is_some() || bias.is_some())?;
    Ok(out)
}

pub(super) fn backward_input(
    grad_output: &Tensor,
    weight: &Tensor,
    grad_x: &mut Tensor,
    accumulate: bool,
) -> Result<()> {
    const OPERATION: &str = "linear_backward_input";
    expect_shape(
        OPERATION,
        "grad_output",
        grad_output,
        grad_output.rows(),
        weight.rows(),
    )?;
    expect_shape(OPERATION, "grad_x", grad_x, grad_output.rows(), weight.columns())?;
    multiply(
        ViewMut::of(grad_x)?,
        View::of(grad_output),
        View::of(weight),
        accumulate,
        Threads::All,
    )
}

pub(super) fn backward_weight(
    grad_output: &Tensor,
    x: &Tensor,
    grad_weight: &mut Tensor,
    grad_bias: Option<&mut Tensor>,
) -> Result<()> {
    const OPERATION: &str = "linear_backward_weight";
    expect_shape(
        OPERATION,
        "grad_output",
        grad_output,
        x.rows(),
        grad_output.columns(),
    )?;
    expect_shape(
        OPERATION,
        "grad_weight",
        grad_weight,
        grad_output.columns(),
        x.columns(),
    )?;
    if let Some(grad_bias) = &grad_bias {
        expect_shape(OPERATION, "grad_bias", grad_bias, 1, grad_output.columns())?;
    }
    let left = View::of(grad_output).transposed();
    multiply(ViewMut::of(grad_weight)?, left, View::of(x), true, Threads::All)?;
    let Some(grad_bias) = grad_bias else { return Ok(()) };
    add_row_sums(grad_bias, grad_output)
}

/// `target += Σ rows`.
fn add_row_sums(target: &mut Tensor, rows: &Tensor) -> Result<()> {
    let mut sums = vec![0.0f64; rows.columns()];
    let mut block = vec![0.0f32; rows.columns()];
    for first in (0..rows.rows()).step_by(BLOCK_ROWS) {
        block.fill(0.0);
        for index in first..rows.rows().min(first + BLOCK_ROWS) {
            simd::add_to(&mut block, row(rows, index));
        }
        for (sum, part) in sums.iter_mut().zip(&block) {
            *sum += f64::from(*part);
        }
    }
    for (target, sum) in target.host_mut()?.iter_mut().zip(sums) {
        *target += sum as f32;
    }
    Ok(())
}
