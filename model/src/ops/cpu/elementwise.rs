//! Copies, activations and the embedding: one pass over rows.

use rayon::prelude::*;

use super::rows::{Rows, Shared, expect, expect_shape, for_each_row, for_each_row_pair};
use super::simd::{self, exponential, vectorised};
use crate::ops::{Axis, TokenBatch};
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
    let rows = Rows::of(tensor)?;
    for_each_row(&mut copy, |index, out| out.copy_from_slice(rows.row(index)))?;
    Ok(copy)
}

pub(super) fn upload(data: &[f32], rows: usize, columns: usize) -> Result<Tensor> {
    expect(
        "upload",
        rows.checked_mul(columns) == Some(data.len()),
        || format!("{rows} x {columns} elements"),
        || format!("{} elements", data.len()),
    )?;
    let mut tensor = Tensor::unspecified(rows, columns)?;
    for_each_row(&mut tensor, |index, out| {
        out.copy_from_slice(&data[index * columns..(index + 1) * columns]);
    })?;
    Ok(tensor)
}

pub(super) fn concatenate(tensors: &[&Tensor]) -> Result<Tensor> {
    let columns = tensors.first().map_or(0, |tensor| tensor.columns());
    let mut all = Vec::new();
    for tensor in tensors {
        expect_shape("concatenate", "every tensor", tensor, tensor.rows(), columns)?;
        let rows = Rows::of(tensor)?;
        all.extend((0..tensor.rows()).map(|index| rows.row(index)));
    }
    let mut out = Tensor::unspecified(all.len(), columns)?;
    for_each_row(&mut out, |index, out| out.copy_from_slice(all[index]))?;
    Ok(out)
}

pub(super) fn gather(tensor: &Tensor, indices: &[usize], axis: Axis) -> Result<Tensor> {
    let (length, what) = match axis {
        Axis::Rows => (tensor.rows(), "rows"),
        Axis::Columns => (tensor.columns(), "columns"),
    };
    if let Some(outside) = indices.iter().find(|index| **index >= length) {
        expect(
            "gather",
            false,
            || format!("{what} below {length}"),
            || outside.to_string(),
        )?;
    }
    let rows = Rows::of(tensor)?;
    match axis {
        Axis::Rows => {
            let mut out = Tensor::unspecified(indices.len(), tensor.columns())?;
            for_each_row(&mut out, |index, out| {
                out.copy_from_slice(rows.row(indices[index]))
            })?;
            Ok(out)
        }
        Axis::Columns => {
            let mut out = Tensor::unspecified(tensor.rows(), indices.len())?;
            for_each_row(&mut out, |index, out| {
                let row = rows.row(index);
                for (out, column) in out.iter_mut().zip(indices) {
                    *out = row[*column];
                }
            })?;
            Ok(out)
        }
    }
}

pub(super) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    expect_same("swiglu", "up", up, gate)?;
    let mut out = Tensor::unspecified(gate.rows(), gate.columns())?;
    let (gate, up) = (Rows::of(gate)?, Rows::of(up)?);
    for_each_row(&mut out, |index, out| {
        swiglu_row(out, gate.row(index), up.row(index))
    })?;
    Ok(out)
}

pub(super) fn swiglu_backward(grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor)> {
    expect_same("swiglu_backward", "up", up, gate)?;
    expect_same("swiglu_backward", "grad_output", grad_output, gate)?;
    let mut grad_gate = Tensor::unspecified(gate.rows(), gate.columns())?;
    let mut grad_up = Tensor::unspecified(gate.rows(), gate.columns())?;
    let (grad, gate, up) = (Rows::of(grad_output)?, Rows::of(gate)?, Rows::of(up)?);
    for_each_row_pair(&mut grad_gate, &mut grad_up, |index, grad_gate, grad_up| {
        swiglu_backward_row(
            grad_gate,
            grad_up,
            grad.row(index),
            gate.row(index),
            up.row(index),
        );
    })?;
    Ok((grad_gate, grad_up))
}

pub(super) fn relu_squared(x: &Tensor) -> Result<Tensor> {
    let mut out = Tensor::unspecified(x.rows(), x.columns())?;
    let x = Rows::of(x)?;
    for_each_row(&mut out, |index, out| relu_squared_row(out, x.row(index)))?;
    Ok(out)
}

pub(super) fn relu_squared_backward(grad_output: &Tensor, x: &Tensor) -> Result<Tensor> {
    expect_same("relu_squared_backward", "grad_output", grad_output, x)?;
    let mut out = Tensor::unspecified(x.rows(), x.columns())?;
    let (grad, x) = (Rows::of(grad_output)?, Rows::of(x)?);
    for_each_row(&mut out, |index, out| {
        relu_squared_backward_row(out, grad.row(index), x.row(index));
    })?;
    Ok(out)
}

pub(super) fn embedding(table: &Tensor, tokens: &TokenBatch) -> Result<Tensor> {
    tokens.expect_ids("embedding", table.rows())?;
    let ids = &tokens.host()?.ids;
    let mut out = Tensor::unspecified(ids.len(), table.columns())?;
    let table = Rows::of(table)?;
    for_each_row(&mut out, |index, out| {
        if let Some(token) = ids.get(index) {
            out.copy_from_slice(table.row(*token as usize));
        }
    })?;
    Ok(out)
}

/// A row of the table is the work of one thread, which adds what its tokens give in the order of their rows.
pub(super) fn embedding_backward(
    grad_output: &Tensor,
    tokens: &TokenBatch,
    grad_table: &mut Tensor,
) -> Result<()> {
    const OPERATION: &str = "embedding_backward";
    tokens.expect_ids(OPERATION, grad_table.rows())?;
    let columns = grad_table.columns();
    expect_shape(OPERATION, "grad_output", grad_output, tokens.rows(), columns)?;
    let by_token = &tokens.host()?.by_token;
    let gradients = Rows::of(grad_output)?;
    let leading = grad_table.leading_dimension();
    let table = Shared::new(grad_table.host_mut()?);
    let ranges = by_token.starts.par_windows(2).zip(&by_token.tokens);
    ranges.for_each(|(range, token)| {
        // SAFETY: every token is there once, and its row is nobody else's.
        let target = unsafe { table.slice(*token as usize * leading, columns) };
        let rows = by_token.rows.get(range[0] as usize..range[1] as usize);
        for row in rows.unwrap_or_default() {
            simd::add_to(target, gradients.row(*row as usize));
        }
    });
    Ok(())
}
