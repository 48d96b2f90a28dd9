//! The order of every prunable axis, and the sorted model that computes the same function.
//!
//! After sorting, every variant is a prefix: the first KV groups with their query heads, the first MLP
//! channels. Head dimensions, and so RoPE, are never permuted. A parent that is sorted as it is read is
//! `checkpoint`'s affair.

use std::path::Path;

use espalier_arch::{Architecture, Attention, BlockKind, BlockShape, Role};
use serde::{Deserialize, Serialize};

use crate::files;
use crate::importance::Importance;
use crate::ops::{Axis, Operations};
use crate::{BlockWeights, Error, Model, Result, Tensor};

/// The order of one block's prunable axis: entry `i` is the parent's index of what comes `i`-th.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum BlockPermutation {
    /// KV groups, with their query heads.
    Attention {
        /// The most important first.
        groups: Vec<usize>,
    },
    /// Intermediate channels.
    Mlp {
        /// The most important first.
        channels: Vec<usize>,
    },
}

/// The order of every block's prunable axis.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Permutation {
    /// One for each block of the parent.
    pub blocks: Vec<BlockPermutation>,
}

impl Permutation {
    /// Orders every axis of `model` by importance, the most important first.
    ///
    /// # Errors
    /// When the importance was measured on a model of another shape.
    pub fn from_importance(
        importance: &Importance,
        model: &Model,
        operations: &dyn Operations,
    ) -> Result<Self> {
        let down = |block: usize| match model.blocks.get(block) {
            Some(BlockWeights::Mlp(weights)) => Ok(weights.down.clone()),
            _ => Err(Error::MissingTensor { role: Role::Down }),
        };
        let blocks = importance.order(&model.architecture, operations, down)?;
        Ok(Self { blocks })
    }

    /// The sorted model: new storage for what was permuted, shared storage for the rest.
    ///
    /// # Errors
    /// When this is not a permutation of the model's axes.
    pub fn apply(&self, model: &Model, operations: &dyn Operations) -> Result<Model> {
        self.check(&model.architecture)?;
        let mut sorted = model.clone();
        let shapes = model.architecture.blocks.iter().map(|block| &block.shape);
        for ((weights, shape), permutation) in sorted.blocks.iter_mut().zip(shapes).zip(&self.blocks) {
            *weights = weights.map(&mut |role, tensor| permutation.sort(shape, role, tensor, operations))?;
        }
        sorted.stacked(operations)
    }

    /// Writes it as JSON, whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        files::write_json(path, self)
    }

    /// Reads what [`Permutation::save`] wrote.
    ///
    /// # Errors
    /// When the file cannot be read or is not a permutation.
    pub fn load(path: &Path) -> Result<Self> {
        files::read_json(path)
    }

    /// Refuses what is no permutation of the axes of this architecture.
    pub(crate) fn check(&self, architecture: &Architecture) -> Result<()> {
        let blocks = &architecture.blocks;
        if blocks.len() != self.blocks.len() {
            return Err(mismatch(
                format!("{} blocks", blocks.len()),
                format!("{} blocks", self.blocks.len()),
            ));
        }
        for (index, (block, permutation)) in blocks.iter().zip(&self.blocks).enumerate() {
            let (order, length) = match (permutation, &block.shape) {
                (BlockPermutation::Attention { groups }, BlockShape::Attention(shape)) => {
                    (groups, shape.kv_groups)
                }
                (BlockPermutation::Mlp { channels }, BlockShape::Mlp(shape)) => (channels, shape.channels),
                (_, shape) => {
                    return Err(mismatch(
                        format!("an order for block {index}, {:?}", shape.kind()),
                        "one for another kind".to_owned(),
                    ));
                }
            };
            let mut seen = order.clone();
            seen.sort_unstable();
            if seen.len() != length || seen.iter().enumerate().any(|(place, value)| place != *value) {
                return Err(mismatch(
                    format!("each of 0 to {} once for block {index}", length.saturating_sub(1)),
                    format!("{} entries that are not", order.len()),
                ));
            }
        }
        Ok(())
    }
}

fn mismatch(expected: String, found: String) -> Error {
    Error::Shape {
        operation: "permutation",
        expected,
        found,
    }
}

impl BlockPermutation {
    /// A tensor of a block of this shape, sorted; the same storage where nothing of it is permuted.
    ///
    /// # Errors
    /// When the block is of another kind.
    pub(crate) fn sort(
        &self,
        shape: &BlockShape,
        role: Role,
        tensor: &Tensor,
        operations: &dyn Operations,
    ) -> Result<Tensor> {
        match (self, shape) {
            (Self::Attention { groups }, BlockShape::Attention(shape)) => {
                sort_attention(groups, shape, role, tensor, operations)
            }
            (Self::Mlp { channels }, BlockShape::Mlp(_)) => match role {
                Role::Gate | Role::Up => operations.gather(tensor, channels, Axis::Rows),
                Role::Down | Role::GateBias | Role::UpBias => {
                    operations.gather(tensor, channels, Axis::Columns)
                }
                _ => Ok(tensor.clone()),
            },
            (own, shape) => Err(Error::BlockKind {
                expected: own.kind(),
                found: shape.kind(),
            }),
        }
    }

    fn kind(&self) -> BlockKind {
        match self {
            Self::Attention { .. } => BlockKind::Attention,
            Self::Mlp { .. } => BlockKind::Mlp,
        }
    }
}

fn sort_attention(
    groups: &[usize],
    shape: &Attention,
    role: Role,
    tensor: &Tensor,
    operations: &dyn Operations,
) -> Result<Tensor> {
    let expand = |width: usize| -> Vec<usize> {
        groups
            .iter()
            .flat_map(|group| group * width..(group + 1) * width)
            .collect()
    };
    let queries = || expand(shape.queries_per_group * shape.head_dim);
    let keys = || expand(shape.head_dim);
    match role {
        Role::Query => operations.gather(tensor, &queries(), Axis::Rows),
        Role::Key | Role::Value => operations.gather(tensor, &keys(), Axis::Rows),
        Role::Output | Role::QueryBias => operations.gather(tensor, &queries(), Axis::Columns),
        Role::KeyBias | Role::ValueBias => operations.gather(tensor, &keys(), Axis::Columns),
        _ => Ok(tensor.clone()),
    }
}
