//! Residual blocks, `x + f(norm(x))`, over the operation set: forward, forward that keeps what backward
//! needs, and the explicit backward.
//!
//! Only the computation of one block lives here; which blocks run, and what is kept across them, is
//! `runner`'s and `train`'s affair.

use espalier_arch::BlockShape;

use crate::ops::{Layout, Operations, RopeTable};
use crate::{BlockWeights, Error, Result, Tensor};

pub mod attention;
pub mod mlp;
mod rope;

pub use rope::RopeTables;
pub(crate) use rope::any_depends_on_length;

/// What every block of a model shares while a batch runs through it.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The backend.
    pub operations: &'a dyn Operations,
    /// How the rows are divided into sequences.
    pub layout: Layout,
    /// Epsilon of every RMS norm.
    pub epsilon: f64,
    /// For attention with rotary positions: at least `layout.tokens` of them.
    pub rope: Option<&'a RopeTable>,
}

/// What one block's backward needs besides the block's input.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // a handful exist at a time, and each points at megabytes
pub enum Saved {
    /// Of an attention block.
    Attention(attention::Saved),
    /// Of a multilayer perceptron.
    Mlp(mlp::Saved),
}

fn kind_mismatch(shape: &BlockShape, weights: &BlockWeights) -> Error {
    match shape {
        BlockShape::Mamba2(_) | BlockShape::Moe(_) => Error::UnsupportedBlock { kind: shape.kind() },
        _ => Error::BlockKind {
            expected: weights.kind(),
            found: shape.kind(),
        },
    }
}

/// The block's output, `(tokens, hidden)`, from its input of the same shape.
///
/// # Errors
/// When weights and shape disagree, or an operation refuses its operands.
pub fn forward(
    context: Context<'_>,
    shape: &BlockShape,
    weights: &BlockWeights,
    hidden: &Tensor,
) -> Result<Tensor> {
    forward_saving(context, shape, weights, hidden).map(|(output, _)| output)
}

/// As [`forward`], with what [`backward`] needs.
///
/// # Errors
/// As [`forward`].
pub fn forward_saving(
    context: Context<'_>,
    shape: &BlockShape,
    weights: &BlockWeights,
    hidden: &Tensor,
) -> Result<(Tensor, Saved)> {
    match (shape, weights) {
        (BlockShape::Attention(shape), BlockWeights::Attention(weights)) => {
            let (output, saved) = attention::forward(context, shape, weights, hidden)?;
            Ok((output, Saved::Attention(saved)))
        }
        (BlockShape::Mlp(shape), BlockWeights::Mlp(weights)) => {
            let (output, saved) = mlp::forward(context, shape, weights, hidden)?;
            Ok((output, Saved::Mlp(saved)))
        }
        _ => Err(kind_mismatch(shape, weights)),
    }
}

/// Turns the gradient of the block's output into that of its input, and adds those of the weights to
/// `gradients`. `hidden` is the block's input.
///
/// # Errors
/// When weights, shape, saved activations and gradients are not of one kind and shape.
pub fn backward(
    context: Context<'_>,
    shape: &BlockShape,
    weights: &BlockWeights,
    hidden: &Tensor,
    saved: Saved,
    grad: Tensor,
    gradients: &mut BlockWeights,
) -> Result<Tensor> {
    match (shape, weights, saved, gradients) {
        (
            BlockShape::Attention(shape),
            BlockWeights::Attention(weights),
            Saved::Attention(saved),
            BlockWeights::Attention(gradients),
        ) => attention::backward(context, shape, weights, hidden, saved, grad, gradients),
        (
            BlockShape::Mlp(shape),
            BlockWeights::Mlp(weights),
            Saved::Mlp(saved),
            BlockWeights::Mlp(gradients),
        ) => mlp::backward(context, shape, weights, hidden, saved, grad, gradients),
        _ => Err(kind_mismatch(shape, weights)),
    }
}

/// What [`Saved`] holds for one row of a block's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SavedRow {
    /// Entries of activations.
    activations: usize,
    /// Entries of statistics, f32 everywhere.
    statistics: usize,
}

/// Bytes that [`Saved`] holds for a block of this shape and an input of `rows` rows, when an entry of an
/// activation takes `activation_bytes` (see [`Operations::activation_bytes`]).
pub fn saved_bytes(shape: &BlockShape, hidden: usize, rows: usize, activation_bytes: usize) -> usize {
    let row = match shape {
        BlockShape::Attention(shape) => attention::saved_row(shape, hidden),
        BlockShape::Mlp(shape) => mlp::saved_row(shape, hidden),
        BlockShape::Mamba2(_) | BlockShape::Moe(_) => return 0,
    };
    let activations = row.activations.saturating_mul(activation_bytes);
    let statistics = row.statistics.saturating_mul(size_of::<f32>());
    activations.saturating_add(statistics).saturating_mul(rows)
}
