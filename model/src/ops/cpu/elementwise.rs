//! Sums, activations and the embedding: one pass over rows.

use rayon::prelude::*;

use super::rows::{expect, expect_shape, for_each_row, for_each_row_pair, row};
use super::simd::{self, exponential, vectorised};
use crate::{Result, Tensor};

vectorised! {
    /// `out = silu(gate) · up`.
    fn swiglu_row(out: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exponential::<FMA>(-gate)) * up;
        }
    }

    /// With `s = σ(gate)`: `grad_gate = grad · up · s (1 + gate (1 − s))`, `grad_up = grad · gate · s`.
    fn swiglu_backward_row(
        grad_gate: &mut [f32],
        grad_up: &mut [f32],
        grad: &[f32],
        gate: &[f32],
        up: &[f32],
    ) {
        let inputs = grad.iter().zip(gate).zip(up);
        for ((grad_gate, grad_up), ((grad, gate), up)) in grad_gate.iter_mut().zip(grad_up).zip(inputs) {
            let sigmoid = 1.0 / (1.0 + exponential::<FMA>(-gate));
            let silu = gate * sigmoid;
            *grad_up = grad * silu;
            *grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid));
        }
    }

    /// `out = max(x, 0)²`.
    fn relu_squared_row(out: &mut [f32], x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            let positive = if *x < 0.0 { 0.0 } else { *x };
            *out = positive * positive;
        }
    }

    /// `out = grad · 2 max(x, 0)`.
    fn relu_squared_backward_row(out: &mut [f32], grad: &[f32], x: &[f32]) {
        for ((out, grad), x) in out.iter_mut().zip(grad).zip(x) {
            let positive = if *x < 0.0 { 0.0 } else { *x };
            *out = 2.0 * grad * positive;
        }
    }
}

fn expect_same(operation: &'static str, name: &str, tensor: &Tensor, like: &Tensor) -> Result<()> {
    expect_shape(operation, name, tensor, like.rows(), like.columns())
}

pub(super) fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::unspecified(tensor.rows(), tensor.columns())?;
    for_each_row(&mut copy, |index, out| out.copy_from_slice(row(tensor, index)))?;
    Ok(copy)
}

pub(super) fn add_assign(target: &mut Tensor, source: &Tensor) -> Result<()> {
    expect_same("add_assign", "source", source, target)?;
    for_each_row(target, |index, out| simd::add_to(out, row(source, index)))
}

pub(super) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    expect_same("add", "b", b, a)?;
    let mut out = Tensor::unspecified(a.rows(), a.columns())?;
    for_each_row(&mut out, |index, out| {
        simd::sum_into(out, row(a, index), row(b, index))
    })?;
    Ok(out)
}

/// Rows are added up in blocks of a fixed number, and the blocks in order.
pub(super) fn sum_of_squares(tensor: &Tensor) -> f64 {
    const BLOCK_ELEMENTS: usize = 64 * 1024;
    if tensor.is_empty() {
        return 0.0;
    }
    let block_rows = (BLOCK_ELEMENTS / tensor.columns()).max(1);
    let blocks: Vec<f64> = (0..tensor.rows().div_ceil(block_rows))
        .into_par_iter()
        .map(|block| {
            let first = block * block_rows;
            let rows = first..tensor.rows().min(first + block_rows);
            rows.map(|index| simd::sum_of_squares(row(tensor, index))).sum()
        })
        .collect();
    blocks.iter().sum()
}

pub(super) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    expect_same("swiglu", "up", up, gate)?;
    let mut out = Tensor::unspecified(gate.rows(), gate.columns())?;
    for_each_row(&mut out, |index, out| {
        swiglu_row(out, row(gate, index), row(up, index))
    })?;
    Ok(out)
}

pub(super) fn swiglu_backward(grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor)> {
    expect_same("swiglu_backward", "up", up, gate)?;
    expect_same("swiglu_backward", "grad_output", grad_output, gate)?;
    let mut grad_gate = Tensor::unspecified(gate.rows(), gate.columns())?;
    let mut grad_up = Tensor::unspecified(gate.rows(), gate.columns())?;
    for_each_row_pair(&mut grad_gate, &mut grad_up, |index, grad_gate, grad_up| {
        swiglu_backward_row(
            grad_gate,
            grad_up,
            row(grad_output, index),
            row(gate, index),
            row(up, index),
        );
    })?;
    Ok((grad_gate, grad_up))
}

pub(super) fn relu_squared(x: &Tensor) -> Result<Tensor> {
    let mut out = Tensor::unspecified(x.rows(), x.columns())?;
    for_each_row(&mut out, |index, out| relu_squared_row(out, row(x, index)))?;
    Ok(out)
}

pub(super) fn relu_squared_backward(grad_output: &Tensor, x: &Tensor) -> Result<Tensor> {
    expect_same("relu_squared_backward", "grad_output", grad_output, x)?;
    let mut out = Tensor::unspecified(x.rows(), x.columns())?;
    for_each_row(&mut out, |index, out| {
        relu_squared_backward_row(out, row(grad_output, index), row(x, index));
    })?;
    Ok(out)
}

/// An error unless every token is a row of `table`.
pub(super) fn expect_tokens(
    operation: &'static str,
    tokens: impl IntoIterator<Item = u32>,
    table: &Tensor,
) -> Result<()> {
    let rows = table.rows();
    for token in tokens {
        expect(
            operation,
            usize::try_from(token).is_ok_and(|token| token < rows),
            || format!("tokens below {rows}, the vocabulary"),
            || format!("token {token}"),
        )?;
    }
    Ok(())
}

pub(super) fn embedding(table: &Tensor, tokens: &[u32]) -> Result<Tensor> {
    expect_tokens("embedding", tokens.iter().copied(), table)?;
    let mut out = Tensor::unspecified(tokens.len(), table.columns())?;
    for_each_row(&mut out, |index, out| {
        if let Some(token) = tokens.get(index) {
            out.copy_from_slice(row(table, *token as usize));
        }
    })?;
    Ok(out)
}

/// Each thread owns some rows of the table and walks over all tokens, so that the order of additions is
/// that of the tokens.
pub(super) fn embedding_backward(
    grad_output: &Tensor,
    tokens: &[u32],
    grad_table: &mut Tensor,
) -> Result<()> {
    const OPERATION: &str = "embedding_backward";
    expect_tokens(OPERATION, tokens.iter().copied(), grad_table)?;
    expect_shape(
        OPERATION,
        "grad_output",
        grad_output,
        tokens.len(),
        grad_table.columns(),
    )?;
    if grad_table.is_empty() || tokens.is_empty() {
        return Ok(());
    }
    let (columns, leading) = (grad_table.columns(), grad_table.leading_dimension());
    let rows_per_part = grad_table.rows().div_ceil(4 * rayon::current_num_threads());
    let parts = grad_table.host_mut()?.par_chunks_mut(leading * rows_per_part);
    parts.enumerate().for_each(|(part, rows)| {
        let first = part * rows_per_part;
        for (index, token) in tokens.iter().enumerate() {
            let Some(local) = (*token as usize).checked_sub(first) else {
                continue;
            };
            let start = local * leading;
            if let Some(target) = rows.get_mut(start..start + columns) {
                simd::add_to(target, row(grad_output, index));
            }
        }
    });
    Ok(())
}
