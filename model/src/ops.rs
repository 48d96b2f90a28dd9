//! The narrow set of operations that every block, loss and optimiser is written over.
//!
//! Each has a forward and an explicit backward; backward operations *add* into the gradients that they
//! are given, so that accumulation needs no second buffer. Activations are `(tokens, features)` with
//! row `sequence * tokens_per_sequence + position`; weights are `(out, in)` as checkpoints store them.
//! The CPU backend is in [`cpu`]; a CUDA backend implements the same trait.

pub mod cpu;

use std::fmt::Debug;

use espalier_arch::Attention;

use crate::{Result, Tensor};

/// How the rows of an activation are divided into sequences of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
}

impl Layout {
    /// Rows of an activation with this layout.
    pub fn rows(self) -> usize {
        self.sequences * self.tokens
    }
}

/// Cosines and sines of every position and frequency, `(positions, head_dim / 2)` each.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Cosines, already multiplied by the attention factor.
    pub cosine: Tensor,
    /// Sines, already multiplied by the attention factor.
    pub sine: Tensor,
}

/// The head's input: hidden states after the final norm, and the matrix that turns them into logits.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// `(tokens, hidden)`.
    pub hidden: &'a Tensor,
    /// `(vocabulary, hidden)`.
    pub weight: &'a Tensor,
}

/// Where a loss puts its gradients. `scale` multiplies the loss before differentiation
/// (1 / tokens of the whole step gives the gradient of the mean).
#[derive(Debug)]
pub struct HeadGradient<'a> {
    /// `(tokens, hidden)`, overwritten.
    pub hidden: &'a mut Tensor,
    /// `(vocabulary, hidden)`, added to; none when the head is frozen.
    pub weight: Option<&'a mut Tensor>,
    /// Factor of the loss.
    pub scale: f32,
}

/// Keys and values of the tokens seen so far, for one attention block.
#[derive(Debug)]
pub struct KvCache {
    /// `(sequences * capacity, kv_groups * head_dim)`.
    pub keys: Tensor,
    /// `(sequences * capacity, kv_groups * head_dim)`.
    pub values: Tensor,
    /// Tokens of each sequence for which there is room.
    pub capacity: usize,
    /// Tokens of each sequence already there.
    pub length: usize,
}

/// Hyperparameters of AdamW (1711.05101) for one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Counts from 1; corrects the moments' bias.
    pub step: u32,
    /// Multiplies every gradient first (global-norm clipping, loss averaging).
    pub gradient_scale: f32,
}

/// One parameter with its gradient and moments, all of one shape and contiguous.
#[derive(Debug)]
pub struct AdamWParameter<'a> {
    /// Updated in place.
    pub value: &'a mut Tensor,
    /// Read, then set to zero.
    pub gradient: &'a mut Tensor,
    /// Updated in place.
    pub first_moment: &'a mut Tensor,
    /// Updated in place.
    pub second_moment: &'a mut Tensor,
}

/// A backend. Every method checks shapes and returns an error that names them when they disagree.
pub trait Operations: Send + Sync + Debug {
    /// A tensor of zeros.
    fn zeros(&self, rows: usize, columns: usize) -> Result<Tensor>;
    /// A tensor with `data`, row by row.
    fn upload(&self, data: &[f32], rows: usize, columns: usize) -> Result<Tensor>;
    /// The elements, row by row.
    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>>;
    /// A copy of its own, contiguous.
    fn contiguous(&self, tensor: &Tensor) -> Result<Tensor>;
    /// `target += source`.
    fn add_assign(&self, target: &mut Tensor, source: &Tensor) -> Result<()>;
    /// `a + b`.
    fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor>;
    /// Sum of squares of every element, in f64.
    fn sum_of_squares(&self, tensor: &Tensor) -> Result<f64>;

    /// Rows of `table` at `tokens`: `(tokens, hidden)`.
    fn embedding(&self, table: &Tensor, tokens: &[u32]) -> Result<Tensor>;
    /// Adds each row of `grad_output` to the row of `grad_table` that its token names.
    fn embedding_backward(&self, grad_output: &Tensor, tokens: &[u32], grad_table: &mut Tensor)
    -> Result<()>;

    /// `x · weightᵀ + bias`: x `(tokens, in)`, weight `(out, in)`, bias `(1, out)`.
    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// `x · weightᵀ + bias + residual`, the residual step's last operation in one pass.
    fn linear_residual(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        residual: &Tensor,
    ) -> Result<Tensor>;
    /// `grad_x (+)= grad_output · weight`: overwritten, or added to when `accumulate`.
    fn linear_backward_input(
        &self,
        grad_output: &Tensor,
        weight: &Tensor,
        grad_x: &mut Tensor,
        accumulate: bool,
    ) -> Result<()>;
    /// `grad_weight += grad_outputᵀ · x`, `grad_bias += Σ rows of grad_output`.
    fn linear_backward_weight(
        &self,
        grad_output: &Tensor,
        x: &Tensor,
        grad_weight: &mut Tensor,
        grad_bias: Option<&mut Tensor>,
    ) -> Result<()>;

    /// RMS norm over groups of `weight.columns()` entries of each row (a whole row, or each head of it).
    /// Gives the output and the reciprocal root mean square of each group, `(rows, groups)`.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)>;
    /// Gradient of [`Operations::rms_norm`] to x is *added* to `grad_x`; the weight's to `grad_weight`.
    fn rms_norm_backward(
        &self,
        grad_output: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        reciprocal: &Tensor,
        grad_x: &mut Tensor,
        grad_weight: Option<&mut Tensor>,
    ) -> Result<()>;

    /// Rotates every head of `x` in place (half-split pairs, as Hugging Face checkpoints expect); row
    /// `s * tokens + t` stands at position `first_position + t`.
    fn rope(
        &self,
        x: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
        first_position: usize,
    ) -> Result<()>;
    /// The inverse rotation, in place, from position 0.
    fn rope_backward(
        &self,
        grad: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
    ) -> Result<()>;

    /// Causal attention within each sequence: q `(tokens, query_width)`, k and v `(tokens, kv_width)`;
    /// scores are scaled by `1/sqrt(head_dim)`. Gives the output `(tokens, query_width)` and the log of
    /// each softmax's denominator `(tokens, query_heads)`. No score matrix outlives its tile.
    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor)>;
    /// Gradients of [`Operations::attention`] to q, k and v, each new.
    #[allow(clippy::too_many_arguments)] // what the forward took and gave, and nothing else
    fn attention_backward(
        &self,
        grad_output: &Tensor,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        output: &Tensor,
        log_sums: &Tensor,
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor, Tensor)>;
    /// Appends k and v of `layout.tokens` new tokens a sequence to the cache, then attends q to all that is
    /// there, causally among the new ones. Serves prefill in chunks and decoding alike.
    fn attention_cached(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        cache: &mut KvCache,
        shape: &Attention,
        layout: Layout,
    ) -> Result<Tensor>;

    /// `silu(gate) · up`, elementwise.
    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor>;
    /// Gradients of [`Operations::swiglu`] to gate and up, each new.
    fn swiglu_backward(&self, grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor)>;
    /// `relu(x)²`, elementwise.
    fn relu_squared(&self, x: &Tensor) -> Result<Tensor>;
    /// Gradient of [`Operations::relu_squared`], new.
    fn relu_squared_backward(&self, grad_output: &Tensor, x: &Tensor) -> Result<Tensor>;

    /// Logits of every row, `(tokens, vocabulary)`: for decoding and small checks only, since it holds
    /// vocabulary × tokens.
    fn logits(&self, head: Head<'_>) -> Result<Tensor>;
    /// Negative log-likelihood of `targets` (a token each; none leaves the row out: loss 0, no gradient),
    /// a row each, computed in chunks of rows.
    fn cross_entropy(
        &self,
        head: Head<'_>,
        targets: &[Option<u32>],
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Vec<f32>>;
    /// Forward KL at temperature 1, `Σ p_parent (log p_parent − log p_student)`, a row each, computed in
    /// chunks of rows with the gradient in the same pass.
    fn distillation(
        &self,
        student: Head<'_>,
        parent: Head<'_>,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Vec<f32>>;
    /// [`Operations::distillation`] of several students against one parent, whose logits are computed once
    /// a chunk: `result[student][row]`.
    fn distillation_many(&self, students: &[Head<'_>], parent: Head<'_>) -> Result<Vec<Vec<f32>>>;

    /// One fused AdamW step over every parameter. Gradients are left at zero.
    fn adamw(&self, parameters: &mut [AdamWParameter<'_>], step: AdamWStep) -> Result<()>;
}
