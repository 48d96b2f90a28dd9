//! What each MLP channel and each KV group contributes, summed in f64 over calibration tokens.
//!
//! Sums of disjoint shards add up, in shard order, to those of the whole. An MLP channel's score is
//! `‖w_i‖ · sqrt(Σ a_i²)`: the root mean square of what the channel adds to the residual stream, where `a` is
//! what the down projection reads and `w_i`
//! its column. KV groups are ordered greedily: the group whose removal, on top of those removed before,
//! leaves the smallest `Σ ‖Σ_removed W_o[:,g]·a_g‖²` goes next. That needs only the sums of inner products
//! `⟨W_o[:,g]·a_g, W_o[:,h]·a_h⟩`, which are `Σ_{i∈g,j∈h} (AᵀA)_ij (W_oᵀW_o)_ij`.

use std::path::Path;

use espalier_arch::{Architecture, Attention, BlockShape};
use serde::{Deserialize, Serialize};

use crate::block::Saved;
use crate::files;
use crate::ops::{Layout, LinearGradient, Operations};
use crate::runner::{Runner, check_layout};
use crate::sort::BlockPermutation;
use crate::{BlockWeights, ElementType, Error, Result, Tensor};

/// Sums for one block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum BlockImportance {
    /// Of an attention block.
    Attention {
        /// `(kv_groups, kv_groups)`, row by row: inner products of the groups' contributions, summed over tokens.
        inner_products: Vec<f64>,
    },
    /// Of a multilayer perceptron.
    Mlp {
        /// `Σ_tokens a_i²`, a channel each.
        squares: Vec<f64>,
    },
}

/// Sums for every block of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Importance {
    /// Sequences that were summed.
    pub sequences: u64,
    /// One for each block.
    pub blocks: Vec<BlockImportance>,
}

impl Importance {
    /// The sums over `tokens`, a few sequences at a time.
    ///
    /// # Errors
    /// When the tokens do not fill the layout, are outside the vocabulary, or make activations that are not finite.
    pub fn measure(
        runner: &Runner,
        tokens: &[u32],
        layout: Layout,
        sequences_at_once: usize,
    ) -> Result<Self> {
        check_layout(tokens, layout)?;
        let mut total: Option<Self> = None;
        for part in tokens.chunks(layout.tokens * sequences_at_once.max(1)) {
            let layout = Layout {
                sequences: part.len() / layout.tokens,
                tokens: layout.tokens,
            };
            let sums = Self::of_batch(runner, part, layout)?;
            match &mut total {
                Some(total) => total.add(&sums)?,
                None => total = Some(sums),
            }
        }
        total.ok_or_else(|| Error::OutOfRange {
            what: "calibration sequences",
            value: 0,
            expected: "at least 1".to_owned(),
        })
    }

    fn of_batch(runner: &Runner, tokens: &[u32], layout: Layout) -> Result<Self> {
        let mut hidden = runner.embed(tokens)?;
        let mut blocks = Vec::with_capacity(runner.model().blocks.len());
        for index in 0..runner.model().blocks.len() {
            let (shape, weights) = runner.block_parts(index)?;
            let block = MeasuredBlock {
                index,
                shape,
                weights,
            };
            let (output, sums) = BlockImportance::measure(runner, block, &hidden, layout)?;
            blocks.push(sums);
            hidden = output;
        }
        Ok(Self {
            sequences: layout.sequences as u64,
            blocks,
        })
    }

    /// Adds the sums of another shard.
    ///
    /// # Errors
    /// When they are of a model of another shape.
    pub fn add(&mut self, other: &Self) -> Result<()> {
        let mut both = self.blocks.iter().zip(&other.blocks);
        if self.blocks.len() != other.blocks.len() || !both.all(|(mine, theirs)| mine.is_like(theirs)) {
            return Err(another_shape());
        }
        self.sequences += other.sequences;
        for (mine, theirs) in self.blocks.iter_mut().zip(&other.blocks) {
            mine.add(theirs)?;
        }
        Ok(())
    }

    /// Writes the sums, exact to the bit, whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        files::write_json(path, self)
    }

    /// Reads what [`Importance::save`] wrote.
    ///
    /// # Errors
    /// When the file cannot be read or holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        files::read_json(path)
    }

    /// The order of every block's axis, the most important first. `down` gives the down projection of an MLP,
    /// `(hidden, channels)`: no other weight is needed.
    ///
    /// # Errors
    /// When the sums are of a model of another shape, and those of `down`.
    pub(crate) fn order(
        &self,
        architecture: &Architecture,
        operations: &dyn Operations,
        mut down: impl FnMut(usize) -> Result<Tensor>,
    ) -> Result<Vec<BlockPermutation>> {
        if self.blocks.len() != architecture.blocks.len() {
            return Err(shape_error("as many blocks as the model has", "another number"));
        }
        let mut orders = Vec::with_capacity(self.blocks.len());
        for (index, (sums, block)) in self.blocks.iter().zip(&architecture.blocks).enumerate() {
            orders.push(match (sums, &block.shape) {
                (BlockImportance::Attention { inner_products }, BlockShape::Attention(_)) => {
                    BlockPermutation::Attention {
                        groups: greedy_order(inner_products),
                    }
                }
                (BlockImportance::Mlp { squares }, BlockShape::Mlp(_)) => BlockPermutation::Mlp {
                    channels: channel_order(operations, squares, &down(index)?)?,
                },
                _ => return Err(shape_error("blocks of the model's kinds", "others")),
            });
        }
        Ok(orders)
    }
}

fn shape_error(expected: &str, found: &str) -> Error {
    Error::Shape {
        operation: "importance",
        expected: expected.to_owned(),
        found: found.to_owned(),
    }
}

fn another_shape() -> Error {
    shape_error("sums of a model of the same shape", "another")
}

/// A block whose importance is measured.
#[derive(Debug, Clone, Copy)]
pub struct MeasuredBlock<'a> {
    /// Its place in the model.
    pub index: usize,
    /// Its shape.
    pub shape: &'a BlockShape,
    /// Its weights, whole.
    pub weights: &'a BlockWeights,
}

impl BlockImportance {
    /// What the block makes of `hidden`, and the sums over its rows.
    ///
    /// # Errors
    /// When shape and weights disagree, or the activations are not finite.
    pub fn measure(
        runner: &Runner,
        block: MeasuredBlock<'_>,
        hidden: &Tensor,
        layout: Layout,
    ) -> Result<(Tensor, Self)> {
        let MeasuredBlock {
            index,
            shape,
            weights,
        } = block;
        let operations = runner.operations().as_ref();
        let (output, saved) = runner.block_saving(shape, weights, hidden, layout)?;
        let sums = match (&saved, shape, weights) {
            (Saved::Attention(saved), BlockShape::Attention(shape), BlockWeights::Attention(weights)) => {
                group_products(operations, saved.attended(), &weights.output, shape)?
            }
            (Saved::Mlp(saved), ..) => Self::Mlp {
                squares: operations.column_squares(saved.activated())?,
            },
            _ => {
                return Err(Error::BlockKind {
                    expected: weights.kind(),
                    found: shape.kind(),
                });
            }
        };
        if !sums.is_finite() {
            return Err(Error::NotFinite {
                what: format!("importance of block {index}"),
            });
        }
        Ok((output, sums))
    }

    /// Adds the sums over other rows.
    ///
    /// # Errors
    /// When they are of a block of another shape.
    pub fn add(&mut self, other: &Self) -> Result<()> {
        if !self.is_like(other) {
            return Err(another_shape());
        }
        for (mine, theirs) in self.sums_mut().into_iter().zip(other.sums()) {
            mine.iter_mut().zip(theirs).for_each(|(sum, term)| *sum += term);
        }
        Ok(())
    }

    fn is_like(&self, other: &Self) -> bool {
        let kinds = std::mem::discriminant(self) == std::mem::discriminant(other);
        kinds && self.lengths() == other.lengths()
    }

    fn sums(&self) -> Vec<&Vec<f64>> {
        match self {
            Self::Attention { inner_products } => vec![inner_products],
            Self::Mlp { squares } => vec![squares],
        }
    }

    fn sums_mut(&mut self) -> Vec<&mut Vec<f64>> {
        match self {
            Self::Attention { inner_products } => vec![inner_products],
            Self::Mlp { squares } => vec![squares],
        }
    }

    fn lengths(&self) -> Vec<usize> {
        self.sums().into_iter().map(Vec::len).collect()
    }

    fn is_finite(&self) -> bool {
        self.sums().into_iter().flatten().all(|sum| sum.is_finite())
    }
}

/// `attended` is `(tokens, query_width)`, `output` `(hidden, query_width)`.
fn group_products(
    operations: &dyn Operations,
    attended: &Tensor,
    output: &Tensor,
    shape: &Attention,
) -> Result<BlockImportance> {
    let width = attended.columns();
    let gram = |matrix: &Tensor| -> Result<Tensor> {
        let mut products = operations.zeros(width, width, ElementType::F32)?;
        let layer = LinearGradient {
            output: matrix,
            weight: &mut products,
            bias: None,
        };
        operations.linear_backward_weight(matrix, &mut [layer])?;
        Ok(products)
    };
    let group_width = shape.queries_per_group * shape.head_dim;
    let inner_products = operations.tile_products(&gram(attended)?, &gram(output)?, group_width)?;
    Ok(BlockImportance::Attention { inner_products })
}

/// Channels by `‖w_i‖² · Σ a_i²`, falling; equals keep their order.
fn channel_order(operations: &dyn Operations, squares: &[f64], down: &Tensor) -> Result<Vec<usize>> {
    if down.columns() != squares.len() {
        return Err(shape_error("as many channels as the model has", "another number"));
    }
    let norms = operations.column_squares(down)?;
    let scores = norms.iter().zip(squares).map(|(norm, square)| norm * square);
    let mut ranked: Vec<(usize, f64)> = scores.enumerate().collect();
    ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    Ok(ranked.into_iter().map(|(channel, _)| channel).collect())
}

/// Groups in the reverse order of their greedy removal.
fn greedy_order(inner_products: &[f64]) -> Vec<usize> {
    let groups = inner_products.len().isqrt();
    let product = |a: usize, b: usize| inner_products.get(a * groups + b).copied().unwrap_or(0.0);
    let mut kept: Vec<usize> = (0..groups).collect();
    let mut removed: Vec<usize> = Vec::with_capacity(groups);
    while !kept.is_empty() {
        // What the removed set's squared error grows by: ‖g‖² + 2⟨g, Σ removed⟩.
        let growth = |group: usize| {
            product(group, group) + 2.0 * removed.iter().map(|other| product(group, *other)).sum::<f64>()
        };
        let costs = kept
            .iter()
            .enumerate()
            .map(|(place, group)| (place, growth(*group)));
        let Some((place, _)) = costs.min_by(|(_, a), (_, b)| a.total_cmp(b)) else {
            break;
        };
        removed.push(kept.remove(place));
    }
    removed.reverse();
    removed
}

#[cfg(test)]
mod tests {
    use super::greedy_order;

    #[test]
    fn a_group_that_cancels_one_already_removed_is_removed_next() {
        // Group 0 is smallest; group 2 is larger than group 1 but nearly its opposite.
        let products = [1.0, 0.0, -1.9, 0.0, 2.0, 0.0, -1.9, 0.0, 4.0];
        assert_eq!(greedy_order(&products), [1, 2, 0]);
    }

    #[test]
    fn independent_groups_are_ordered_by_size() {
        assert_eq!(
            greedy_order(&[1.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 2.0]),
            [1, 2, 0]
        );
    }
}
