//! Gradients of causal attention, recomputed tile by tile from the log-sums that the forward kept.
//!
//! With `P = e^(S − L)` and `D = Σ grad · output` of each row: `grad_v += Pᵀ grad`,
//! `dS = P ∘ (grad vᵀ − D)`, `grad_q = scale dS k`, `grad_k += scale dSᵀ q` (2205.14135, algorithm 4).
//! A piece of work is one sequence and KV group: nobody else adds to its keys' and values' gradients.

use rayon::prelude::*;

use super::attention::{Band, Heads, KEY_BLOCK, QUERY_BLOCK, expect_qkv, pack_heads};
use super::matmul::{Threads, View, ViewMut, multiply};
use super::rows::{Rows, Shared, expect_shape};
use super::simd::{self, exponential, vectorised};
use crate::ops::Layout;
use crate::tensor::Buffer;
use crate::{Result, Tensor};
use espalier_arch::Attention;

vectorised! {
    /// `x = e^(x − shift)`.
    fn weights_row(x: &mut [f32], shift: f32) {
        for x in x {
            *x = exponential::<FMA>(*x - shift);
        }
    }

    /// `grad = weights · (grad − mean)`.
    fn softmax_backward_row(grad: &mut [f32], weights: &[f32], mean: f32) {
        for (grad, weight) in grad.iter_mut().zip(weights) {
            *grad = weight * (*grad - mean);
        }
    }
}

/// What the forward took and gave, and the gradient of what it gave.
pub(super) struct Saved<'a> {
    pub(super) grad_output: &'a Tensor,
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) output: &'a Tensor,
    pub(super) log_sums: &'a Tensor,
}

/// One sequence and group.
struct Piece<'a> {
    heads: Heads,
    tokens: usize,
    row: usize,
    group: usize,
    queries: Band<'a>,
    outputs: Band<'a>,
    gradients: Band<'a>,
    log_sums: Band<'a>,
    keys: Band<'a>,
    values: Band<'a>,
}

/// Gradients of a piece's keys and values, `(tokens, dim)` each.
struct KeyGradients {
    keys: Buffer,
    values: Buffer,
}

/// One block of queries, stacked head by head.
struct Block {
    first: usize,
    count: usize,
    stacked: usize,
    queries: Buffer,
    gradients: Buffer,
    log_sums: Vec<f32>,
    means: Vec<f32>,
    weights: Buffer,
    slopes: Buffer,
}

impl<'a> Piece<'a> {
    fn new(saved: &Saved<'a>, heads: Heads, tokens: usize, index: usize) -> Result<Self> {
        let (sequence, group) = (index / heads.groups, index % heads.groups);
        let row = sequence * tokens;
        let query_column = group * heads.per_group * heads.dim;
        Ok(Self {
            heads,
            tokens,
            row,
            group,
            queries: Band::of(Rows::of(saved.q)?, row, query_column),
            outputs: Band::of(Rows::of(saved.output)?, row, query_column),
            gradients: Band::of(Rows::of(saved.grad_output)?, row, query_column),
            log_sums: Band::of(Rows::of(saved.log_sums)?, row, group * heads.per_group),
            keys: Band::of(Rows::of(saved.k)?, row, group * heads.dim),
            values: Band::of(Rows::of(saved.v)?, row, group * heads.dim),
        })
    }

    fn block(&self, first: usize) -> Block {
        let Heads {
            per_group,
            dim,
            scale,
            ..
        } = self.heads;
        let count = QUERY_BLOCK.min(self.tokens - first);
        let stacked = per_group * count;
        let mut queries = Buffer::unspecified(stacked * dim);
        let mut gradients = Buffer::unspecified(stacked * dim);
        let mut outputs = Buffer::unspecified(stacked * dim);
        pack_heads(&mut queries, self.queries, first, count, self.heads, scale);
        pack_heads(&mut gradients, self.gradients, first, count, self.heads, 1.0);
        pack_heads(&mut outputs, self.outputs, first, count, self.heads, 1.0);
        let rows = gradients.chunks_exact(dim).zip(outputs.chunks_exact(dim));
        let means = rows
            .map(|(gradient, output)| simd::dot(gradient, output))
            .collect();
        let log_sum_of = |index: usize| {
            let logs = self.log_sums.row(first + index % count, per_group);
            logs.get(index / count).copied().unwrap_or_default()
        };
        Block {
            first,
            count,
            stacked,
            queries,
            gradients,
            log_sums: (0..stacked).map(log_sum_of).collect(),
            means,
            weights: Buffer::unspecified(stacked * KEY_BLOCK),
            slopes: Buffer::unspecified(stacked * KEY_BLOCK),
        }
    }

    /// Adds what one block of queries gives to keys and values; gives the queries' own, `(stacked, dim)`.
    fn backward_block(&self, block: &mut Block, sums: &mut KeyGradients) -> Result<Buffer> {
        let dim = self.heads.dim;
        let stacked = block.stacked;
        let mut grad_queries = Buffer::zeros(stacked * dim);
        let (first_key, _) = self.heads.keys_of(block.first);
        let (_, end_key) = self.heads.keys_of(block.first + block.count - 1);
        for start in (first_key..end_key).step_by(KEY_BLOCK) {
            let keys = KEY_BLOCK.min(end_key - start);
            let key_view = self.keys.view(start, keys, dim)?;
            let value_view = self.values.view(start, keys, dim)?;
            let queries = View::new(&block.queries, stacked, dim, dim)?;
            let gradients = View::new(&block.gradients, stacked, dim, dim)?;
            let weights = ViewMut::new(&mut block.weights, stacked, keys, keys)?;
            multiply(weights, queries, key_view.transposed(), false, Threads::One)?;
            let slopes = ViewMut::new(&mut block.slopes, stacked, keys, keys)?;
            multiply(slopes, gradients, value_view.transposed(), false, Threads::One)?;
            self.differentiate(block, start, keys);
            let queries = View::new(&block.queries, stacked, dim, dim)?;
            let gradients = View::new(&block.gradients, stacked, dim, dim)?;
            let weights = View::new(&block.weights, stacked, keys, keys)?;
            let slopes = View::new(&block.slopes, stacked, keys, keys)?;
            let target = ViewMut::new(&mut sums.values[start * dim..], keys, dim, dim)?;
            multiply(target, weights.transposed(), gradients, true, Threads::One)?;
            // The packed queries carry the scale already.
            let target = ViewMut::new(&mut sums.keys[start * dim..], keys, dim, dim)?;
            multiply(target, slopes.transposed(), queries, true, Threads::One)?;
            let target = ViewMut::new(&mut grad_queries, stacked, dim, dim)?;
            multiply(target, slopes, key_view, true, Threads::One)?;
        }
        simd::scale(&mut grad_queries, self.heads.scale);
        Ok(grad_queries)
    }

    /// Scores become weights, and gradients of weights become gradients of scores, in place.
    fn differentiate(&self, block: &mut Block, start: usize, keys: usize) {
        let rows = block
            .weights
            .chunks_exact_mut(keys)
            .zip(block.slopes.chunks_exact_mut(keys));
        for (index, (weights, slopes)) in rows.take(block.stacked).enumerate() {
            let (low, high) = self.heads.keys_of(block.first + index % block.count);
            let low = low.saturating_sub(start).min(keys);
            let high = high.saturating_sub(start).min(keys).max(low);
            for hidden in [0..low, high..keys] {
                weights[hidden.clone()].fill(0.0);
                slopes[hidden].fill(0.0);
            }
            weights_row(&mut weights[low..high], block.log_sums[index]);
            softmax_backward_row(&mut slopes[low..high], &weights[low..high], block.means[index]);
        }
    }
}

pub(super) fn backward(
    saved: &Saved<'_>,
    shape: &Attention,
    layout: Layout,
) -> Result<(Tensor, Tensor, Tensor)> {
    const OPERATION: &str = "attention_backward";
    let heads = Heads::of(OPERATION, shape)?;
    expect_qkv(OPERATION, saved.q, saved.k, saved.v, heads, layout)?;
    let query_heads = heads.groups * heads.per_group;
    let (width, kv_width) = (query_heads * heads.dim, heads.groups * heads.dim);
    expect_shape(OPERATION, "grad_output", saved.grad_output, layout.rows(), width)?;
    expect_shape(OPERATION, "output", saved.output, layout.rows(), width)?;
    expect_shape(OPERATION, "log_sums", saved.log_sums, layout.rows(), query_heads)?;
    let mut grad_q = Tensor::unspecified(layout.rows(), width)?;
    let mut grad_k = Tensor::unspecified(layout.rows(), kv_width)?;
    let mut grad_v = Tensor::unspecified(layout.rows(), kv_width)?;
    let shared_q = Shared::new(grad_q.host_mut()?);
    let shared_k = Shared::new(grad_k.host_mut()?);
    let shared_v = Shared::new(grad_v.host_mut()?);
    let dim = heads.dim;
    let work = |index: usize| -> Result<()> {
        let piece = Piece::new(saved, heads, layout.tokens, index)?;
        let mut sums = KeyGradients {
            keys: Buffer::zeros(layout.tokens * dim),
            values: Buffer::zeros(layout.tokens * dim),
        };
        for first in (0..layout.tokens).step_by(QUERY_BLOCK) {
            let mut block = piece.block(first);
            let grad_queries = piece.backward_block(&mut block, &mut sums)?;
            for (index, gradient) in grad_queries.chunks_exact(dim).enumerate() {
                let head = piece.group * heads.per_group + index / block.count;
                let token = piece.row + first + index % block.count;
                // SAFETY: a head of a token belongs to one piece only.
                unsafe { shared_q.slice(token * width + head * dim, dim) }.copy_from_slice(gradient);
            }
        }
        let rows = sums.keys.chunks_exact(dim).zip(sums.values.chunks_exact(dim));
        for (position, (key, value)) in rows.enumerate() {
            let start = (piece.row + position) * kv_width + piece.group * dim;
            // SAFETY: a group of a token belongs to one piece only.
            unsafe { shared_k.slice(start, dim) }.copy_from_slice(key);
            // SAFETY: as above.
            unsafe { shared_v.slice(start, dim) }.copy_from_slice(value);
        }
        Ok(())
    };
    (0..layout.sequences * heads.groups)
        .into_par_iter()
        .try_for_each(work)?;
    Ok((grad_q, grad_k, grad_v))
}
