//! Which models are timed to tell what single blocks cost in vLLM, and what their times say.
//!
//! For each shape there are two stacks of distinct copies, a shallow and a deep one; each stack has at least one block
//! of attention, for vLLM serves nothing without. Stacks have a small vocabulary, so that the head does not drown the
//! blocks; what the head of the whole vocabulary costs is told by a short model that has it, and by the parent itself.
//! Costs and both bases come out of one fit over all of them ([`crate::engine::fit`]).

use espalier_arch::{Architecture, Block, BlockShape, Precision};
use espalier_proto::task::Profile;
use espalier_search::{CostRow, Point, Subject};

use super::Error;
use crate::engine::fit::{Cost, Equation, solve};
use crate::engine::lossless;
use crate::engine::statistics::{median, spread};

/// Rows of the stacks' embedding.
const SMALL_VOCABULARY: usize = 1024;
/// Copies of a shape in a shallow stack, and how many more a deep one has: at least, and at most.
const SHALLOW: (usize, usize) = (2, 24);
const MORE: (usize, usize) = (8, 24);
/// Of a time, beside its scatter: what repeats do not show.
const SYSTEMATIC: f64 = 0.003;
/// For a normal distribution: σ is 1.4826 of the median absolute deviation, and the median of n has a standard error of
/// √(π/2)·σ/√n.
const ERROR_OF_MEDIAN: f64 = 1.4826 * 1.253_314_137_315_5;

/// A model to time, and what it is made of.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stack {
    pub architecture: Architecture,
    /// How often each unknown is in it: the shapes, the small vocabulary's base, the whole one's.
    counts: Vec<f64>,
}

/// All models of a profile. The first is the parent.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Dictionary {
    /// Shapes whose cost is told, those asked for first.
    shapes: Vec<BlockShape>,
    asked: usize,
    vocab_size: usize,
    pub stacks: Vec<Stack>,
}

impl Dictionary {
    /// For the shapes of a task. `cache_bytes` is the last-level cache: weights of a stack exceed it where those of the
    /// parent do.
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
            for copies in [shallow, deep] {
                let lead = (!is_attention(&shape)).then(|| attention.clone());
                let blocks: Vec<BlockShape> = lead
                    .into_iter()
                    .chain(std::iter::repeat_n(shape.clone(), copies))
                    .collect();
                dictionary.add(parent, &blocks, SMALL_VOCABULARY.min(parent.vocab_size));
            }
        }
        Ok(dictionary)
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
fn row(subject: Subject, point: Point, cost: Cost, repeats: usize) -> CostRow {
    CostRow {
        subject,
        point,
        median_ms: cost.value,
        spread_ms: cost.error * lossless(repeats.max(1)).sqrt() / ERROR_OF_MEDIAN,
        repeats,
    }
}

/// Of the median of some times.
pub(super) fn standard_error(times: &[f64]) -> f64 {
    ERROR_OF_MEDIAN * spread(times) / lossless(times.len().max(1)).sqrt()
}

fn is_attention(shape: &BlockShape) -> bool {
    matches!(shape, BlockShape::Attention(_))
}
