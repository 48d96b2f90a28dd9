//! Forward and explicit backward of one stage: a slice of the block list, the embedding before the first, final
//! norm and head after the last. A model on one rank is one stage.
//!
//! Every block's input is kept; of the activations inside blocks only as much as a budget allows, from the last
//! block down, and the other blocks are run once more when their turn comes. Both ways give the same bits.

use std::sync::Arc;

use crate::block::{self, Context, RopeTables, Saved};
use crate::ops::{Head, HeadGradient, Layout, Losses, Operations, RopeTable, TokenBatch};
use crate::weights::StageWeights;
use crate::{Error, Result, Tensor};

/// What a micro-batch is taught where the head is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lesson<'a> {
    /// Forward KL from this head.
    Parent(Head<'a>),
    /// The targets that its tokens came with.
    Targets,
}

/// What of a micro-batch that went forward its backward needs.
#[derive(Debug)]
pub(super) struct Kept {
    layout: Layout,
    /// Each block's input.
    inputs: Vec<Tensor>,
    /// What of each block's inside is kept.
    saved: Vec<Option<Saved>>,
}

/// What has its gradients written for the last time in a backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// Final norm, and the head where it is not the embedding.
    Head,
    /// The stage's block of this number.
    Block(usize),
    /// The embedding, and with it everything.
    Embedding,
}

/// A stage's weights as its blocks read them, with the gradients.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) operations: Arc<dyn Operations>,
    pub(super) weights: StageWeights,
    /// f32, in the shape of the weights.
    pub(super) gradients: StageWeights,
    rope: RopeTables,
}

impl Stage {
    pub(super) fn new(
        operations: Arc<dyn Operations>,
        weights: StageWeights,
        gradients: StageWeights,
    ) -> Self {
        Self {
            operations,
            weights,
            gradients,
            rope: RopeTables::default(),
        }
    }

    /// Takes a micro-batch through the stage: from its tokens on the first, else from what the stage before made
    /// of them. Gives the last block's output. Activations inside blocks are kept up to `activation_bytes`.
    pub(super) fn forward(
        &self,
        tokens: &TokenBatch,
        layout: Layout,
        before: Option<Tensor>,
        activation_bytes: usize,
    ) -> Result<(Kept, Tensor)> {
        let first_kept = self.first_kept_block(layout, activation_bytes);
        let blocks = self.weights.blocks().len();
        let (mut inputs, mut saved) = (Vec::with_capacity(blocks), Vec::with_capacity(blocks));
        let mut hidden = enter(self.operations.as_ref(), &self.weights, tokens, before)?;
        for index in 0..blocks {
            let table = self.rope_table(index, layout)?;
            let (shape, weights) = self.weights.block(index)?;
            let context = self.context(layout, table.as_deref());
            let (output, kept) = block::forward_saving(context, shape, weights, &hidden)?;
            inputs.push(hidden);
            saved.push((index >= first_kept).then_some(kept));
            hidden = output;
        }
        let kept = Kept {
            layout,
            inputs,
            saved,
        };
        Ok((kept, hidden))
    }

    /// The losses of the last stage's output, a row each, and their gradient to it; head and final norm get
    /// theirs.
    pub(super) fn loss(
        &mut self,
        lesson: Lesson<'_>,
        tokens: &TokenBatch,
        hidden: &Tensor,
        predictions: usize,
    ) -> Result<(Tensor, Tensor)> {
        let operations = self.operations.as_ref();
        let epsilon = self.weights.architecture().norm_epsilon;
        let norm = self.weights.final_norm()?;
        let (normed, reciprocal) = operations.rms_norm(hidden, norm, epsilon)?;
        let head = Head {
            hidden: &normed,
            weight: self.weights.head()?,
        };
        let (norm_gradient, weight) = self.gradients.head_mut()?;
        #[allow(clippy::cast_possible_truncation)] // a factor needs no more than f32
        let gradient = HeadGradient {
            weight,
            scale: (1.0 / predictions as f64) as f32,
        };
        let Losses {
            rows,
            hidden_gradient,
        } = match lesson {
            Lesson::Parent(parent) => operations.distillation(head, parent, Some(gradient))?,
            Lesson::Targets => operations.cross_entropy(head, tokens, Some(gradient))?,
        };
        let grad_normed = hidden_gradient.ok_or_else(|| Error::Shape {
            operation: "loss",
            expected: "the gradient that was asked for".to_owned(),
            found: "none".to_owned(),
        })?;
        let grad =
            operations.rms_norm_backward(&grad_normed, hidden, norm, &reciprocal, None, norm_gradient)?;
        Ok((rows, grad))
    }

    /// Takes the gradient of the stage's output back through it, and says of each piece when its own gradients
    /// are written. Gives the gradient of the stage's input; none on the first stage.
    pub(super) fn backward(
        &mut self,
        tokens: &TokenBatch,
        kept: Kept,
        grad: Tensor,
        written: &mut dyn FnMut(Written, &mut StageWeights) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let Kept {
            layout,
            inputs,
            mut saved,
        } = kept;
        let operations = Arc::clone(&self.operations);
        let mut grad = grad;
        written(Written::Head, &mut self.gradients)?;
        for (index, input) in inputs.into_iter().enumerate().rev() {
            let table = self.rope_table(index, layout)?;
            let (shape, weights) = self.weights.block(index)?;
            let context = Context {
                operations: operations.as_ref(),
                layout,
                epsilon: self.weights.architecture().norm_epsilon,
                rope: table.as_deref(),
            };
            let kept = match saved.pop().flatten() {
                Some(kept) => kept,
                None => block::forward_saving(context, shape, weights, &input)?.1,
            };
            let gradients = self.gradients.block_mut(index)?;
            grad = block::backward(context, shape, weights, &input, kept, grad, gradients)?;
            written(Written::Block(index), &mut self.gradients)?;
        }
        let before = if self.weights.is_first() {
            if let Some(table) = self.gradients.embedding_mut() {
                operations.embedding_backward(&grad, tokens, table)?;
            }
            None
        } else {
            Some(grad)
        };
        written(Written::Embedding, &mut self.gradients)?;
        Ok(before)
    }

    /// The last blocks are kept, because theirs are the activations that go first: when an earlier block is
    /// run again, they are gone.
    fn first_kept_block(&self, layout: Layout, activation_bytes: usize) -> usize {
        let architecture = self.weights.architecture();
        let shapes = architecture.blocks.get(self.weights.range()).unwrap_or_default();
        let entry = self.operations.activation_bytes();
        let mut left = activation_bytes;
        for (index, block) in shapes.iter().enumerate().rev() {
            let bytes = block::saved_bytes(&block.shape, architecture.hidden, layout.rows(), entry);
            match left.checked_sub(bytes) {
                Some(rest) => left = rest,
                None => return index + 1,
            }
        }
        0
    }

    fn rope_table(&self, index: usize, layout: Layout) -> Result<Option<Arc<RopeTable>>> {
        let (shape, _) = self.weights.block(index)?;
        self.rope.get(self.operations.as_ref(), shape, layout.tokens)
    }

    fn context<'a>(&'a self, layout: Layout, rope: Option<&'a RopeTable>) -> Context<'a> {
        Context {
            operations: self.operations.as_ref(),
            layout,
            epsilon: self.weights.architecture().norm_epsilon,
            rope,
        }
    }
}

/// A stage of a parent that teaches and is not trained.
#[derive(Debug)]
pub(super) struct Taught {
    pub(super) weights: StageWeights,
    rope: RopeTables,
}

impl Taught {
    pub(super) fn new(weights: StageWeights) -> Self {
        Self {
            weights,
            rope: RopeTables::default(),
        }
    }

    /// As [`Stage::forward`], but keeps nothing. On the last stage the output is final-normed.
    pub(super) fn forward(
        &self,
        operations: &dyn Operations,
        tokens: &TokenBatch,
        layout: Layout,
        before: Option<Tensor>,
    ) -> Result<Tensor> {
        let epsilon = self.weights.architecture().norm_epsilon;
        let mut hidden = enter(operations, &self.weights, tokens, before)?;
        for index in 0..self.weights.blocks().len() {
            let (shape, weights) = self.weights.block(index)?;
            let table = self.rope.get(operations, shape, layout.tokens)?;
            let context = Context {
                operations,
                layout,
                epsilon,
                rope: table.as_deref(),
            };
            hidden = block::forward(context, shape, weights, &hidden)?;
        }
        if self.weights.is_last() {
            let (normed, _) = operations.rms_norm(&hidden, self.weights.final_norm()?, epsilon)?;
            return Ok(normed);
        }
        Ok(hidden)
    }
}

/// What a stage's first block reads.
fn enter(
    operations: &dyn Operations,
    weights: &StageWeights,
    tokens: &TokenBatch,
    before: Option<Tensor>,
) -> Result<Tensor> {
    match before {
        None => operations.embedding(weights.embedding()?, tokens),
        Some(hidden) => Ok(hidden),
    }
}
