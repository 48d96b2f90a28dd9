//! Linear layers: what is checked and added around a product, forward and backward.

use super::matmul::{Threads, View, ViewMut, linear_into, multiply};
use super::rows::{Rows, expect, expect_shape, for_each_row};
use super::simd;
use crate::ops::{Linear, LinearGradient};
use crate::{Result, Tensor};

/// Rows whose bias gradients are added up in f32 before they are added in f64.
const BLOCK_ROWS: usize = 32;

pub(super) fn forward(x: &Tensor, layer: Linear<'_>, residual: Option<&Tensor>) -> Result<Tensor> {
    let Linear { weight, bias } = layer;
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
    let residual = residual.map(Rows::of).transpose()?;
    let bias = bias.map(Tensor::host).transpose()?;
    match (residual, bias) {
        (Some(residual), Some(bias)) => for_each_row(&mut out, |index, out| {
            simd::sum_into(out, residual.row(index), bias);
        })?,
        (Some(residual), None) => {
            for_each_row(&mut out, |index, out| out.copy_from_slice(residual.row(index)))?
        }
        (None, Some(bias)) => for_each_row(&mut out, |_, out| out.copy_from_slice(bias))?,
        (None, None) => {}
    }
    linear_into(&mut out, x, weight, residual.is_some() || bias.is_some())?;
    Ok(out)
}

pub(super) fn backward_input(layers: &[(&Tensor, &Tensor)]) -> Result<Tensor> {
    const OPERATION: &str = "linear_backward_input";
    let (rows, columns) = layers
        .first()
        .map_or((0, 0), |(grad, weight)| (grad.rows(), weight.columns()));
    for (grad, weight) in layers {
        expect_shape(OPERATION, "grad_output", grad, rows, weight.rows())?;
        expect_shape(OPERATION, "weight", weight, weight.rows(), columns)?;
    }
    let mut grad_x = Tensor::unspecified(rows, columns)?;
    for (index, (grad, weight)) in layers.iter().enumerate() {
        let out = ViewMut::of(&mut grad_x)?;
        multiply(out, View::of(grad)?, View::of(weight)?, index > 0, Threads::All)?;
    }
    Ok(grad_x)
}

pub(super) fn backward_weight(x: &Tensor, layer: &mut LinearGradient<'_>) -> Result<()> {
    const OPERATION: &str = "linear_backward_weight";
    let (grad, outputs) = (layer.output, layer.output.columns());
    expect_shape(OPERATION, "grad_output", grad, x.rows(), outputs)?;
    expect_shape(OPERATION, "grad_weight", layer.weight, outputs, x.columns())?;
    if let Some(grad_bias) = &layer.bias {
        expect_shape(OPERATION, "grad_bias", grad_bias, 1, outputs)?;
    }
    let out = ViewMut::of(layer.weight)?;
    multiply(
        out,
        View::of(grad)?.transposed(),
        View::of(x)?,
        true,
        Threads::All,
    )?;
    match &mut layer.bias {
        Some(grad_bias) => add_row_sums(grad_bias, grad),
        None => Ok(()),
    }
}

/// `target += Σ rows of tensor`.
fn add_row_sums(target: &mut Tensor, tensor: &Tensor) -> Result<()> {
    let mut sums = vec![0.0f64; tensor.columns()];
    let mut block = vec![0.0f32; tensor.columns()];
    let rows = Rows::of(tensor)?;
    for first in (0..tensor.rows()).step_by(BLOCK_ROWS) {
        block.fill(0.0);
        for index in first..tensor.rows().min(first + BLOCK_ROWS) {
            simd::add_to(&mut block, rows.row(index));
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
