//! Which models are timed to tell what single blocks cost in vLLM, and what their times say.
//!
//! For each shape there are two stacks of distinct copies, a shallow and a deep one; each stack has at least one block
//! of attention, for vLLM serves nothing without. Stacks have a small vocabulary, so that the head does not drown the
//! blocks; what the head of the whole vocabulary costs is told by a short model that has it, and by the parent itself.
//! Where its copies would stay in the cache, which those of the whole model do not, a stack has further blocks of the
//! parent's largest shape beside them, the same in both depths. Costs and both bases come out of one fit over all of them
//! ([`crate::engine::fit`]).

use espalier_arch::{Architecture, Block, BlockShape, Precision};
use espalier_proto::task::Profile;
use espalier_search::statistics::{ERROR_OF_MEDIAN, median, standard_error};
use espalier_search::{CostRow, Point, Subject};

use super::Error;
use crate::engine::fit::{Cost, Equation, solve};
use crate::engine::lossless;

/// Rows of the stacks' embedding.
const SMALL_VOCABULARY: usize = 1024;
/// Copies of a shape in a shallow stack, and how many more a deep one has: at least, and at most.
const SHALLOW: (usize, usize) = (2, 24);
const MORE: (usize, usize) = (8, 24);
/// Of a time, beside its scatter: what repeats do not show.
const SYSTEMATIC: f64 = 0.003;

/// A model to time, and what it is made of.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stack {
    pub architecture: Architecture,
    /// How often each unknown is in it: the shapes, the small vocabulary's base, the whole one's.
    counts: Vec<f64>,
}

/// All models of a profile. The first is the parent, unless it was left out.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Dictionary {
    /// Shapes whose cost is told, those asked for first.
    shapes: Vec<BlockShape>,
    asked: usize,
    vocab_size: usize,
    pub stacks: Vec<Stack>,
}

impl Dictionary {
    /// For the shapes of a task. `cache_bytes` is the cache before the memory that weights are read from: those of a stack
    /// exceed it where those of the parent do.
    ///
    /// # Errors
    /// When the parent has no attention.
    pub fn of(task: &Profile, precision: Precision, cache_bytes: usize) -> Result<Self, Error> {
        let parent = &task.architecture;
        let first_of = |is: fn(&BlockShape) -> bool| {
            parent
                .blocks
                .iter()
                .map(|block| &block.shape)
                .find(|shape| is(shape))
        };
        let Some(attention) = first_of(is_attention) else {
            return Err(Error::Refused {
                reason: "the parent has no attention, expected at least one block of it".to_owned(),
            });
        };
        let mut dictionary = Self {
            shapes: task.shapes.clone(),
            asked: task.shapes.len(),
            vocab_size: parent.vocab_size,
            stacks: Vec::new(),
        };
        for block in &parent.blocks {
            if !dictionary.shapes.contains(&block.shape) {
                dictionary.shapes.push(block.shape.clone());
            }
        }
        let bytes_of = |shape: &BlockShape| {
            let parameters: u64 = shape
                .parts(parent.hidden)
                .iter()
                .map(|part| part.elements())
                .sum();
            usize::try_from(parameters.saturating_mul(precision.bytes()))
                .unwrap_or(usize::MAX)
                .max(1)
        };
        let of_parent = parent.blocks.iter().map(|block| bytes_of(&block.shape));
        let target = cache_bytes.min(of_parent.fold(0, usize::saturating_add));
        let shapes = parent.blocks.iter().map(|block| &block.shape);
        let largest = shapes.max_by_key(|shape| bytes_of(shape)).unwrap_or(attention);
        let whole: Vec<BlockShape> = parent.blocks.iter().map(|block| block.shape.clone()).collect();
        dictionary.add(parent, &whole, parent.vocab_size);
        let mlp = first_of(|shape| !is_attention(shape));
        let short: Vec<BlockShape> = [Some(attention), mlp, Some(attention), mlp]
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        dictionary.add(parent, &short, parent.vocab_size);
        for shape in dictionary.shapes.clone() {
            let fills = target.div_ceil(bytes_of(&shape));
            let shallow = fills.clamp(SHALLOW.0, SHALLOW.1);
            let deep = shallow + fills.clamp(MORE.0, MORE.1);
            let left = target.saturating_sub(shallow.saturating_mul(bytes_of(&shape)));
            let filler = left.div_ceil(bytes_of(largest));
            for copies in [shallow, deep] {
                let lead = (!is_attention(&shape)).then(|| attention.clone());
                let blocks: Vec<BlockShape> = lead
                    .into_iter()
                    .chain(std::iter::repeat_n(largest.clone(), filler))
                    .chain(std::iter::repeat_n(shape.clone(), copies))
                    .collect();
                dictionary.add(parent, &blocks, SMALL_VOCABULARY.min(parent.vocab_size));
            }
        }
        Ok(dictionary)
    }

    /// Of a parent that has no room the others tell what it is made of.
    pub fn leave_parent_out(&mut self) {
        self.stacks.remove(0);
    }

    fn add(&mut self, parent: &Architecture, blocks: &[BlockShape], vocab_size: usize) {
        let mut counts: Vec<f64> = self
            .shapes
            .iter()
            .map(|shape| lossless(blocks.iter().filter(|block| *block == shape).count()))
            .collect();
        let is_whole = vocab_size == self.vocab_size;
        if SMALL_VOCABULARY < self.vocab_size {
            counts.push(if is_whole { 0.0 } else { 1.0 });
        }
        counts.push(if is_whole { 1.0 } else { 0.0 });
        let blocks = blocks.iter().enumerate().map(|(layer, shape)| Block {
            layer,
            shape: shape.clone(),
        });
        let architecture = Architecture {
            vocab_size,
            layers: blocks.len(),
            blocks: blocks.collect(),
            ..parent.clone()
        };
        self.stacks.push(Stack { architecture, counts });
    }

    /// The cost table's rows at a point, from `times`, each stack's by round, milliseconds.
    ///
    /// # Errors
    /// When the times do not tell the costs.
    pub fn rows(&self, point: Point, times: &[Vec<f64>]) -> Result<Vec<CostRow>, Error> {
        let equations: Vec<Equation> = self
            .stacks
            .iter()
            .zip(times)
            .filter(|(_, times)| !times.is_empty())
            .map(|(stack, times)| {
                let time = median(times);
                Equation {
                    counts: stack.counts.clone(),
                    time,
                    error: standard_error(times)
                        .hypot(SYSTEMATIC * time)
                        .max(f64::MIN_POSITIVE.sqrt()),
                }
            })
            .collect();
        let costs = solve(&equations).ok_or_else(|| Error::Engine {
            reason: format!("the times of its stacks at {point} do not tell what blocks cost"),
        })?;
        let repeats = times.iter().map(Vec::len).min().unwrap_or(0);
        let asked = self.shapes.iter().take(self.asked).zip(&costs);
        let base = Subject::Base {
            vocab_size: self.vocab_size,
        };
        let rows = asked
            .map(|(shape, cost)| row(Subject::Block(shape.clone()), point, *cost, repeats))
            .chain(costs.last().map(|cost| row(base, point, *cost, repeats)));
        Ok(rows.collect())
    }
}

/// With the spread under which the row's error comes out as fitted.
pub(super) fn row(subject: Subject, point: Point, cost: Cost, repeats: usize) -> CostRow {
    CostRow {
        subject,
        point,
        median_ms: cost.value,
        spread_ms: cost.error * lossless(repeats.max(1)).sqrt() / ERROR_OF_MEDIAN,
        repeats,
    }
}

fn is_attention(shape: &BlockShape) -> bool {
    matches!(shape, BlockShape::Attention(_))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::engine::vllm::tests;
    use crate::engine::vllm::tests::{attention, mlp};

    /// Its parent has 1.5 MB of blocks in bf16.
    fn task() -> Profile {
        Profile {
            shapes: vec![attention(2), attention(1), mlp(512), mlp(32)],
            ..tests::task()
        }
    }

    #[test]
    fn small_shapes_leave_the_cache_beside_blocks_that_both_depths_have() {
        const CACHE: u64 = 1_400_000;
        const LARGEST: u64 = 400_000;
        let dictionary = Dictionary::of(&task(), Precision::Bf16, CACHE as usize).unwrap();
        let stacks = dictionary.stacks.get(2..).unwrap();
        for pair in stacks.chunks(2) {
            let [shallow, deep] = pair else {
                panic!("a stack alone");
            };
            let bytes = 2 * shallow.architecture.parameters().in_blocks();
            assert!(bytes >= CACHE, "{bytes} bytes stay in the cache");
            assert!(bytes < CACHE + 2 * LARGEST, "{bytes} bytes are more than needed");
            let more = deep
                .counts
                .iter()
                .zip(&shallow.counts)
                .map(|(deep, shallow)| deep - shallow);
            let more: Vec<f64> = more.filter(|more| *more > 0.0).collect();
            assert!(more.len() == 1, "only copies of the shape differ: {more:?}");
        }
    }

    #[test]
    fn costs_come_out_of_stacks_that_are_padded() {
        let dictionary = Dictionary::of(&task(), Precision::Bf16, 1_400_000).unwrap();
        let truth = [0.2, 0.1, 0.5, 0.05, 1.0, 3.0];
        let times = dictionary.stacks.iter().map(|stack| {
            let time = stack
                .counts
                .iter()
                .zip(truth)
                .map(|(count, cost)| count * cost)
                .sum();
            vec![time; 3]
        });
        let point = Point::Prefill {
            tokens: 64,
            sequences: 1,
        };
        let rows = dictionary.rows(point, &times.collect::<Vec<_>>()).unwrap();
        for (row, expected) in rows.iter().zip([0.2, 0.1, 0.5, 0.05, 3.0]) {
            assert!((row.median_ms - expected).abs() < 1e-6, "{row:?} for {expected}");
        }
    }
}
