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
use crate::{BlockWeights, Error, Model, Result};

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

/// The order of one tensor's rows or columns; a vector is a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    /// What is permuted.
    pub axis: Axis,
    /// Entry `i` is the parent's index of what comes `i`-th.
    pub indices: Vec<usize>,
}

impl Order {
    pub(crate) fn new(axis: Axis, indices: Vec<usize>) -> Self {
        Self { axis, indices }
    }
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
            *weights = weights.map(&mut |role, tensor| match permutation.order_of(shape, role)? {
                Some(order) => operations.gather(tensor, &order.indices, order.axis),
                None => Ok(tensor.clone()),
            })?;
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
    /// The order of a tensor of a block of this shape; none where nothing of it is permuted.
    ///
    /// # Errors
    /// When the block is of another kind.
    pub(crate) fn order_of(&self, shape: &BlockShape, role: Role) -> Result<Option<Order>> {
        match (self, shape) {
            (Self::Attention { groups }, BlockShape::Attention(shape)) => {
                Ok(attention_order(groups, shape, role))
            }
            (Self::Mlp { channels }, BlockShape::Mlp(_)) => Ok(match role {
                Role::Gate | Role::Up => Some(Order::new(Axis::Rows, channels.clone())),
                Role::Down | Role::GateBias | Role::UpBias => {
                    Some(Order::new(Axis::Columns, channels.clone()))
                }
                _ => None,
            }),
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

fn attention_order(groups: &[usize], shape: &Attention, role: Role) -> Option<Order> {
    let expand = |width: usize| -> Vec<usize> {
        groups
            .iter()
            .flat_map(|group| group * width..(group + 1) * width)
            .collect()
    };
    let queries = || expand(shape.queries_per_group * shape.head_dim);
    let keys = || expand(shape.head_dim);
    match role {
        Role::Query => Some(Order::new(Axis::Rows, queries())),
        Role::Key | Role::Value => Some(Order::new(Axis::Rows, keys())),
        Role::Output | Role::QueryBias => Some(Order::new(Axis::Columns, queries())),
        Role::KeyBias | Role::ValueBias => Some(Order::new(Axis::Columns, keys())),
        _ => None,
    }
}
