//! A model's weights, block by block, and the views that make a smaller model of them.
//!
//! Matrices are `(out, in)` as checkpoints store them; vectors are `(1, n)`. No computation lives here:
//! that is `block` and `runner`. Reading files is `checkpoint`, writing them `export`.

use espalier_arch::{Architecture, Attention, BlockShape, Candidate, Mlp};

use crate::{Error, Result, Tensor};

pub(crate) mod file;
mod stage;
mod tensors;

pub use file::SavedModel;
pub use stage::StageWeights;
pub(crate) use stage::specs as stage_specs;
pub(crate) use tensors::{checked, for_blocks, is_vector, matrix_shape, read_as};

/// Weights of one attention block.
#[derive(Debug, Clone)]
pub struct AttentionWeights {
    /// Weight of the norm before the block, `(1, hidden)`.
    pub norm: Tensor,
    /// `(query_width, hidden)`; rows of a KV group's query heads lie together.
    pub query: Tensor,
    /// `(kv_width, hidden)`.
    pub key: Tensor,
    /// `(kv_width, hidden)`.
    pub value: Tensor,
    /// `(hidden, query_width)`.
    pub output: Tensor,
    /// `(1, query_width)`.
    pub query_bias: Option<Tensor>,
    /// `(1, kv_width)`.
    pub key_bias: Option<Tensor>,
    /// `(1, kv_width)`.
    pub value_bias: Option<Tensor>,
    /// `(1, hidden)`.
    pub output_bias: Option<Tensor>,
    /// Weight of the norm of each query head, `(1, head_dim)`.
    pub query_norm: Option<Tensor>,
    /// Weight of the norm of each key head, `(1, head_dim)`.
    pub key_norm: Option<Tensor>,
}

/// Weights of one multilayer perceptron.
#[derive(Debug, Clone)]
pub struct MlpWeights {
    /// Weight of the norm before the block, `(1, hidden)`.
    pub norm: Tensor,
    /// `(channels, hidden)`; none where the activation has no gate.
    pub gate: Option<Tensor>,
    /// `(channels, hidden)`.
    pub up: Tensor,
    /// `(hidden, channels)`.
    pub down: Tensor,
    /// `(1, channels)`.
    pub gate_bias: Option<Tensor>,
    /// `(1, channels)`.
    pub up_bias: Option<Tensor>,
    /// `(1, hidden)`.
    pub down_bias: Option<Tensor>,
}

/// Weights of one block. Mamba-2 and mixtures of experts will be variants of their own.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // a model has tens, and each points at megabytes
pub enum BlockWeights {
    /// Causal self-attention.
    Attention(AttentionWeights),
    /// A multilayer perceptron.
    Mlp(MlpWeights),
}

/// A whole model: its shape and its weights, one [`BlockWeights`] for each block of the architecture.
#[derive(Debug, Clone)]
pub struct Model {
    /// The shape.
    pub architecture: Architecture,
    /// `(vocabulary, hidden)`.
    pub embedding: Tensor,
    /// As many as the architecture has blocks, of the same kinds and in the same order.
    pub blocks: Vec<BlockWeights>,
    /// `(1, hidden)`.
    pub final_norm: Tensor,
    /// `(vocabulary, hidden)`; none where the embedding serves as head.
    pub head: Option<Tensor>,
}

impl AttentionWeights {
    /// The first `shape.kv_groups` groups with their query heads, as views.
    fn prefix(&self, shape: &Attention) -> Result<Self> {
        let (queries, keys) = (shape.query_width(), shape.kv_width());
        Ok(Self {
            norm: self.norm.clone(),
            query: self.query.first_rows(queries)?,
            key: self.key.first_rows(keys)?,
            value: self.value.first_rows(keys)?,
            output: self.output.first_columns(queries)?,
            query_bias: first_columns(self.query_bias.as_ref(), queries)?,
            key_bias: first_columns(self.key_bias.as_ref(), keys)?,
            value_bias: first_columns(self.value_bias.as_ref(), keys)?,
            output_bias: self.output_bias.clone(),
            query_norm: self.query_norm.clone(),
            key_norm: self.key_norm.clone(),
        })
    }
}

impl MlpWeights {
    /// The first `shape.channels` channels, as views.
    fn prefix(&self, shape: &Mlp) -> Result<Self> {
        Ok(Self {
            norm: self.norm.clone(),
            gate: self
                .gate
                .as_ref()
                .map(|gate| gate.first_rows(shape.channels))
                .transpose()?,
            up: self.up.first_rows(shape.channels)?,
            down: self.down.first_columns(shape.channels)?,
            gate_bias: first_columns(self.gate_bias.as_ref(), shape.channels)?,
            up_bias: first_columns(self.up_bias.as_ref(), shape.channels)?,
            down_bias: self.down_bias.clone(),
        })
    }
}

fn first_columns(vector: Option<&Tensor>, columns: usize) -> Result<Option<Tensor>> {
    vector.map(|vector| vector.first_columns(columns)).transpose()
}

impl BlockWeights {
    /// The prefix of these weights that `shape` describes, as views.
    ///
    /// # Errors
    /// When `shape` is of another kind or larger.
    pub fn prefix(&self, shape: &BlockShape) -> Result<Self> {
        match (self, shape) {
            (Self::Attention(weights), BlockShape::Attention(shape)) => {
                Ok(Self::Attention(weights.prefix(shape)?))
            }
            (Self::Mlp(weights), BlockShape::Mlp(shape)) => Ok(Self::Mlp(weights.prefix(shape)?)),
            (weights, shape) => Err(Error::BlockKind {
                expected: weights.kind(),
                found: shape.kind(),
            }),
        }
    }
}

impl Model {
    /// The matrix that turns normed hidden states into logits, `(vocabulary, hidden)`: the embedding when tied.
    pub fn head(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// The smaller model in which each block has the candidate's variant. Every tensor is a view of this
    /// model's: nothing is copied. Skipped blocks are absent.
    ///
    /// # Errors
    /// When the candidate does not fit the architecture.
    pub fn slice(&self, candidate: &Candidate) -> Result<Self> {
        let architecture = self.architecture.with_candidate(candidate)?;
        let mut blocks = Vec::with_capacity(architecture.blocks.len());
        let whole = self.architecture.blocks.iter().zip(&self.blocks);
        for ((block, weights), variant) in whole.zip(&candidate.variants) {
            let shape = block.shape.with_variant(variant).map_err(|reason| {
                espalier_arch::Error::VariantDoesNotFit {
                    block: blocks.len(),
                    reason,
                }
            })?;
            if let Some(shape) = shape {
                blocks.push(weights.prefix(&shape)?);
            }
        }
        Ok(Self {
            architecture,
            embedding: self.embedding.clone(),
            blocks,
            final_norm: self.final_norm.clone(),
            head: self.head.clone(),
        })
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors().iter().map(|(_, tensor)| tensor.bytes()).sum()
    }

    /// Parameters, counted from the tensors.
    pub fn parameters(&self) -> usize {
        self.tensors().iter().map(|(_, tensor)| tensor.len()).sum()
    }
}
