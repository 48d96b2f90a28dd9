//! Runs a model, whole or block by block, and measures its quality on tokens.
//!
//! Scoring keeps the hidden states before a block and runs on from there, so blocks are addressed singly
//! and in ranges, and a variant can stand in for its block. Nothing here is trained (see `train`) and no
//! cache is kept (see `decode`).

use std::ops::Range;
use std::sync::Arc;

use espalier_arch::BlockShape;

use crate::block::{self, Context, RopeTables, Saved};
use crate::ops::{Head, Layout, Operations};
use crate::{BlockWeights, Error, Model, Result, Tensor};

/// A model on a backend, ready to run.
#[derive(Debug)]
pub struct Runner {
    operations: Arc<dyn Operations>,
    model: Arc<Model>,
    rope: RopeTables,
}

impl Runner {
    /// A runner of `model`.
    pub fn new(operations: Arc<dyn Operations>, model: Arc<Model>) -> Self {
        Self {
            operations,
            model,
            rope: RopeTables::default(),
        }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The backend.
    pub fn operations(&self) -> &Arc<dyn Operations> {
        &self.operations
    }

    /// Hidden states before the first block, `(tokens, hidden)`. `tokens` lie sequence after sequence.
    ///
    /// # Errors
    /// When a token is outside the vocabulary.
    pub fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        let batch = self.operations.tokens(tokens, None)?;
        self.operations.embedding(&self.model.embedding, &batch)
    }

    /// Hidden states after block `index`.
    ///
    /// # Errors
    /// When there is no such block or the shapes disagree.
    pub fn block(&self, index: usize, hidden: &Tensor, layout: Layout) -> Result<Tensor> {
        let (shape, weights) = self.block_parts(index)?;
        self.block_with(shape, weights, hidden, layout)
    }

    /// Hidden states after blocks `range`, from those before the first of them.
    ///
    /// # Errors
    /// When there is no such block or the shapes disagree.
    pub fn blocks(&self, range: Range<usize>, hidden: &Tensor, layout: Layout) -> Result<Tensor> {
        let mut hidden = hidden.clone();
        for index in range {
            hidden = self.block(index, &hidden, layout)?;
        }
        Ok(hidden)
    }

    /// Hidden states after a block of this shape and these weights: a variant standing in.
    ///
    /// # Errors
    /// When the shapes disagree.
    pub fn block_with(
        &self,
        shape: &BlockShape,
        weights: &BlockWeights,
        hidden: &Tensor,
        layout: Layout,
    ) -> Result<Tensor> {
        self.block_saving(shape, weights, hidden, layout)
            .map(|(output, _)| output)
    }

    /// As [`Runner::block_with`], with the activations inside the block.
    ///
    /// # Errors
    /// When the shapes disagree.
    pub fn block_saving(
        &self,
        shape: &BlockShape,
        weights: &BlockWeights,
        hidden: &Tensor,
        layout: Layout,
    ) -> Result<(Tensor, Saved)> {
        let operations = self.operations.as_ref();
        let table = self.rope.get(operations, shape, layout.tokens)?;
        let epsilon = self.model.architecture.norm_epsilon;
        let context = Context {
            operations,
            layout,
            epsilon,
            rope: table.as_deref(),
        };
        block::forward_saving(context, shape, weights, hidden)
    }

    /// The shape and weights of block `index`.
    ///
    /// # Errors
    /// When there is no such block.
    pub fn block_parts(&self, index: usize) -> Result<(&BlockShape, &BlockWeights)> {
        block_parts(&self.model, index)
    }

    /// Hidden states after the final norm, which the head reads.
    ///
    /// # Errors
    /// When the width is not the model's.
    pub fn final_norm(&self, hidden: &Tensor) -> Result<Tensor> {
        let epsilon = self.model.architecture.norm_epsilon;
        self.operations
            .rms_norm(hidden, &self.model.final_norm, epsilon)
            .map(|(normed, _)| normed)
    }

    /// Final-normed hidden states of `tokens`, `(tokens, hidden)`.
    ///
    /// # Errors
    /// When a token is outside the vocabulary or `tokens` do not fill the layout.
    pub fn hidden_states(&self, tokens: &[u32], layout: Layout) -> Result<Tensor> {
        check_layout(tokens, layout)?;
        let hidden = self.blocks(0..self.model.blocks.len(), &self.embed(tokens)?, layout)?;
        self.final_norm(&hidden)
    }

    /// The head's input for final-normed hidden states.
    pub fn head<'a>(&'a self, normed: &'a Tensor) -> Head<'a> {
        Head {
            hidden: normed,
            weight: self.model.head(),
        }
    }

    /// Logits of every position, `(tokens, vocabulary)`: for small checks, since it holds all of them.
    ///
    /// # Errors
    /// As [`Runner::hidden_states`].
    pub fn logits(&self, tokens: &[u32], layout: Layout) -> Result<Tensor> {
        let normed = self.hidden_states(tokens, layout)?;
        self.operations.logits(self.head(&normed))
    }

    /// Negative log-likelihood of each next token within its sequence, nats, a row each (the last row of
    /// every sequence is 0); perplexity is exp of the mean over `sequences * (tokens - 1)`.
    ///
    /// # Errors
    /// As [`Runner::hidden_states`].
    pub fn next_token_losses(&self, tokens: &[u32], layout: Layout) -> Result<Vec<f32>> {
        check_layout(tokens, layout)?;
        let targets = next_token_targets(tokens, layout);
        let batch = self.operations.tokens(tokens, Some(&targets))?;
        let hidden = self.operations.embedding(&self.model.embedding, &batch)?;
        let hidden = self.blocks(0..self.model.blocks.len(), &hidden, layout)?;
        let normed = self.final_norm(&hidden)?;
        let losses = self.operations.cross_entropy(self.head(&normed), &batch, None)?;
        self.operations.download(&losses.rows)
    }

    /// Perplexity of the next tokens within their sequences, a few sequences at a time.
    ///
    /// # Errors
    /// As [`Runner::hidden_states`]; also when there is nothing to predict.
    pub fn perplexity(&self, tokens: &[u32], layout: Layout, sequences_at_once: usize) -> Result<f64> {
        check_layout(tokens, layout)?;
        let predictions = layout.sequences * layout.tokens.saturating_sub(1);
        if predictions == 0 {
            return Err(Error::OutOfRange {
                what: "tokens to predict",
                value: 0,
                expected: "at least one sequence of two tokens".to_owned(),
            });
        }
        let mut total = 0.0;
        for part in tokens.chunks(layout.tokens * sequences_at_once.max(1)) {
            let part_layout = Layout {
                sequences: part.len() / layout.tokens,
                tokens: layout.tokens,
            };
            total += self
                .next_token_losses(part, part_layout)?
                .into_iter()
                .map(f64::from)
                .sum::<f64>();
        }
        Ok((total / predictions as f64).exp())
    }

    /// Forward KL from `parent` at every position, nats, a row each.
    ///
    /// # Errors
    /// As [`Runner::hidden_states`].
    pub fn divergence_from(&self, parent: &Self, tokens: &[u32], layout: Layout) -> Result<Vec<f32>> {
        let student_hidden = self.hidden_states(tokens, layout)?;
        let parent_hidden = parent.hidden_states(tokens, layout)?;
        let (student, parent) = (self.head(&student_hidden), parent.head(&parent_hidden));
        let losses = self.operations.distillation(student, parent, None)?;
        self.operations.download(&losses.rows)
    }
}

/// The token after each position of its sequence; none at the last.
pub fn next_token_targets(tokens: &[u32], layout: Layout) -> Vec<Option<u32>> {
    let mut targets = Vec::with_capacity(tokens.len());
    for sequence in tokens.chunks(layout.tokens.max(1)) {
        targets.extend(sequence.iter().skip(1).copied().map(Some));
        targets.push(None);
    }
    targets
}

pub(crate) fn block_parts(model: &Model, index: usize) -> Result<(&BlockShape, &BlockWeights)> {
    let block = model.architecture.blocks.get(index);
    match (block, model.blocks.get(index)) {
        (Some(block), Some(weights)) => Ok((&block.shape, weights)),
        _ => Err(Error::OutOfRange {
            what: "block",
            value: index,
            expected: format!("below {}", model.blocks.len()),
        }),
    }
}

pub(crate) fn check_layout(tokens: &[u32], layout: Layout) -> Result<()> {
    if layout.tokens > 0 && tokens.len() == layout.rows() {
        return Ok(());
    }
    Err(Error::Shape {
        operation: "tokens",
        expected: format!("{} sequences of {} tokens", layout.sequences, layout.tokens),
        found: format!("{} tokens", tokens.len()),
    })
}
