//! What single block shapes cost on the built-in engine.
//!
//! A shape is timed as it is shipped: contiguous weights inside a stack of distinct copies, by the difference
//! between a deep and a shallow stack, which share their first copies. All stacks together exceed the
//! last-level cache, and every pass goes over all of them, so weights come from memory as they do in a whole
//! model. The stacks have a vocabulary of one token, so that the head does not drown the blocks; the base
//! (embedding, final norm, head, choice of the token) is timed as a model without blocks.

use std::sync::Arc;
use std::time::Instant;

use espalier_arch::{Architecture, Block, BlockShape};
use espalier_model::Model;
use espalier_model::decode::Session;
use espalier_model::ops::Operations;
use espalier_search::statistics::{median, spread};
use espalier_search::{CostRow, Point, Subject};

use super::builtin::{dummy, milliseconds, prompt};
use super::lossless;
use super::quiet::Quiet;
use crate::{Error, Result};

/// Copies in the shallow stack.
const SHALLOW: usize = 1;
/// Copies that the deep stack has more, at least and at most.
const FEWEST: usize = 4;
const MOST: usize = 24;
/// Bytes of all deep stacks together, at least; twice the last-level cache when that is more.
const LEAST_BYTES: usize = 192 << 20;
/// Bytes that all deep stacks are to have together for the cache's sake, at most: [`FEWEST`] copies of large shapes
/// have more.
const MOST_BYTES: usize = 1 << 30;
/// Timings of a decode point in a round: single steps are short and so noisy.
const DECODE_PASSES: usize = 4;

/// A stack, or the base when it has no blocks.
struct Stack {
    model: Arc<Model>,
    vocab_size: usize,
}

/// One shape's two stacks.
struct Subjects {
    shapes: Vec<BlockShape>,
    deep: Vec<Stack>,
    shallow: Vec<Stack>,
    differences: Vec<f64>,
    base: Stack,
}

/// Timings of every subject at every point, round by round.
pub struct Stacks {
    operations: Arc<dyn Operations>,
    subjects: Subjects,
    points: Vec<Point>,
    /// `[point][shape]`, milliseconds of one block.
    blocks: Vec<Vec<Vec<f64>>>,
    /// `[point]`, milliseconds of the base.
    base: Vec<Vec<f64>>,
}

impl Stacks {
    /// Builds the stacks of every shape.
    ///
    /// # Errors
    /// When a shape's kind cannot be run yet or a point asks for nothing.
    pub fn new(
        operations: &Arc<dyn Operations>,
        architecture: &Architecture,
        shapes: &[BlockShape],
        points: &[Point],
    ) -> Result<Self> {
        for point in points {
            let (Point::Prefill { tokens, sequences }
            | Point::Decode {
                context: tokens,
                sequences,
            }) = point;
            if *tokens == 0 || *sequences == 0 {
                return Err(Error::Invalid {
                    reason: format!("profile point {point:?} asks for nothing"),
                });
            }
        }
        let subjects = Subjects::new(operations, architecture, shapes)?;
        Ok(Self {
            operations: Arc::clone(operations),
            blocks: vec![vec![Vec::new(); shapes.len()]; points.len()],
            base: vec![Vec::new(); points.len()],
            subjects,
            points: points.to_vec(),
        })
    }

    /// One round: every subject at every point, each undisturbed.
    ///
    /// # Errors
    /// When a model fails, or is disturbed again and again.
    pub fn round(&mut self, quiet: &Quiet) -> Result<()> {
        for index in 0..self.points.len() {
            let point = self.points[index];
            let time = |stacks| quiet.measure(|| time_all(&self.operations, stacks, point));
            let deep = time(&self.subjects.deep)?;
            let shallow = time(&self.subjects.shallow)?;
            let base = time(std::slice::from_ref(&self.subjects.base))?;
            for (shape, (deep, shallow)) in deep.iter().zip(&shallow).enumerate() {
                let copies = self.subjects.differences[shape];
                let differences = deep
                    .iter()
                    .zip(shallow)
                    .map(|(deep, shallow)| (deep - shallow) / copies);
                self.blocks[index][shape].extend(differences);
            }
            self.base[index].extend(base.into_iter().flatten());
        }
        Ok(())
    }

    /// Forgets the timings so far.
    pub fn forget(&mut self) {
        self.blocks.iter_mut().flatten().for_each(Vec::clear);
        self.base.iter_mut().for_each(Vec::clear);
    }

    /// The cost table's rows.
    pub fn rows(&self) -> Vec<CostRow> {
        let mut rows = Vec::new();
        for (index, point) in self.points.iter().enumerate() {
            for (shape, samples) in self.subjects.shapes.iter().zip(&self.blocks[index]) {
                rows.push(row(Subject::Block(shape.clone()), *point, samples));
            }
            rows.push(row(
                Subject::Base {
                    vocab_size: self.subjects.base.vocab_size,
                },
                *point,
                &self.base[index],
            ));
        }
        rows
    }
}

fn row(subject: Subject, point: Point, samples: &[f64]) -> CostRow {
    // A difference of two timings may come out below zero on a busy machine; a cost may not.
    let median_ms = median(samples).max(0.0);
    CostRow {
        subject,
        point,
        median_ms,
        spread_ms: spread(samples),
        repeats: samples.len(),
    }
}

impl Subjects {
    fn new(
        operations: &Arc<dyn Operations>,
        architecture: &Architecture,
        shapes: &[BlockShape],
    ) -> Result<Self> {
        let cache = operations
            .accelerator()
            .map_or_else(last_level_cache_bytes, |device| {
                usize::try_from(device.cache_bytes).unwrap_or(usize::MAX)
            });
        let target = cache.saturating_mul(2).clamp(LEAST_BYTES, MOST_BYTES);
        let share = target / shapes.len().max(1);
        let (mut deep, mut shallow, mut differences) = (Vec::new(), Vec::new(), Vec::new());
        for (index, shape) in shapes.iter().enumerate() {
            let parameters: usize = shape
                .parts(architecture.hidden)
                .iter()
                .map(|part| part.elements() as usize)
                .sum();
            let more =
                (share / parameters.saturating_mul(operations.activation_bytes()).max(1)).clamp(FEWEST, MOST);
            let stack = dummy(
                operations,
                &stack_of(architecture, shape, SHALLOW + more),
                index as u64,
            )?;
            let mut first = (*stack).clone();
            first.architecture.blocks.truncate(SHALLOW);
            first.blocks.truncate(SHALLOW);
            shallow.push(Stack {
                model: Arc::new(first),
                vocab_size: 1,
            });
            deep.push(Stack {
                model: stack,
                vocab_size: 1,
            });
            differences.push(lossless(more));
        }
        let empty = Architecture {
            blocks: Vec::new(),
            ..architecture.clone()
        };
        let base = Stack {
            model: dummy(operations, &empty, 0)?,
            vocab_size: architecture.vocab_size,
        };
        tracing::debug!(
            base_bytes = base.model.head().bytes(),
            shapes = shapes.len(),
            "stacks are built"
        );
        Ok(Self {
            shapes: shapes.to_vec(),
            deep,
            shallow,
            differences,
            base,
        })
    }
}

fn stack_of(architecture: &Architecture, shape: &BlockShape, copies: usize) -> Architecture {
    let blocks = (0..copies)
        .map(|layer| Block {
            layer,
            shape: shape.clone(),
        })
        .collect();
    Architecture {
        vocab_size: 1,
        layers: copies,
        blocks,
        tied_embedding: true,
        ..architecture.clone()
    }
}

/// Milliseconds of every stack at a point, one or several samples each: `[stack][sample]`. Each sample is one
/// pass over all stacks, so that a stack's weights have left the cache when its turn comes again.
fn time_all(operations: &Arc<dyn Operations>, stacks: &[Stack], point: Point) -> Result<Vec<Vec<f64>>> {
    match point {
        Point::Prefill { tokens, sequences } => stacks
            .iter()
            .map(|stack| {
                let mut session = session(operations, stack, sequences, tokens)?;
                let prompt = prompt(tokens.saturating_mul(sequences), stack.vocab_size);
                operations.wait()?;
                let start = Instant::now();
                let logits = session.prefill(&prompt)?;
                session.likeliest(&logits)?;
                Ok(vec![milliseconds(start)])
            })
            .collect(),
        Point::Decode { context, sequences } => {
            let mut sessions = Vec::with_capacity(stacks.len());
            for stack in stacks {
                let mut session = session(operations, stack, sequences, context + DECODE_PASSES + 1)?;
                session.prefill(&prompt(context.saturating_mul(sequences), stack.vocab_size))?;
                session.settle()?;
                sessions.push(session);
            }
            operations.wait()?;
            let next = vec![0_u32; sequences];
            let mut samples = vec![Vec::with_capacity(DECODE_PASSES); stacks.len()];
            for _ in 0..DECODE_PASSES {
                for (session, samples) in sessions.iter_mut().zip(&mut samples) {
                    let start = Instant::now();
                    let logits = session.decode(&next)?;
                    session.likeliest(&logits)?;
                    samples.push(milliseconds(start));
                }
            }
            Ok(samples)
        }
    }
}

fn session(
    operations: &Arc<dyn Operations>,
    stack: &Stack,
    sequences: usize,
    capacity: usize,
) -> Result<Session> {
    Ok(Session::new(
        Arc::clone(operations),
        Arc::clone(&stack.model),
        sequences,
        capacity,
    )?)
}

/// The largest cache the system tells of; 32 MiB where it tells none.
pub(super) fn last_level_cache_bytes() -> usize {
    let size = |index: usize| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = std::fs::read_to_string(path).ok()?;
        text.trim()
            .strip_suffix('K')?
            .parse::<usize>()
            .ok()
            .map(|kibibytes| kibibytes << 10)
    };
    (0..8).filter_map(size).max().unwrap_or(32 << 20)
}
