//! Depth order: which whole layers are best removed, greedily and conditionally: the best removal is made,
//! then the rest is scored again in the model that is left (one-at-a-time scores mis-rank depth).
//!
//! A removal is chosen by the cosine distance of the final hidden states to the parent's, which costs no pass
//! over the vocabulary; the KL of each choice is reported. Each candidate branches off the running model before the layer
//! that it does without, in one walk for as many of them as have room together.

use std::ops::Range;

use espalier_arch::Architecture;
use espalier_model::ops::{Head, Layout};
use espalier_model::{BlockWeights, Tensor};
use espalier_proto::task::{DepthOrder, TaskOutput};

use super::divergence::{Divergences, count};
use super::parent::Blocks;
use super::streams::groups;
use super::{Caches, Context};
use crate::data::shard;
use crate::{Error, Result};

/// The removal that is best so far.
struct Removal {
    distance: f64,
    /// Among the layers that are left.
    index: usize,
    /// Final hidden states without it.
    finals: Tensor,
}

/// A layer: its number and its blocks, which follow each other.
#[derive(Debug, Clone)]
struct Layer {
    number: usize,
    blocks: Range<usize>,
}

/// The model without the layers removed so far.
struct Running<'a> {
    context: &'a Context<'a>,
    blocks: Blocks<'a>,
    /// Those that are left.
    layers: Vec<Layer>,
    /// What comes before the first of them.
    embedded: Tensor,
    layout: Layout,
    /// Sequences that go through a block together: what a block needs for more has no room beside the states.
    together: usize,
    /// Numbers of the layers removed, in order.
    removed: Vec<usize>,
    /// Of the removals that are tried.
    done: usize,
    total: usize,
}

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &DepthOrder) -> Result<TaskOutput> {
    let held = caches.held(context, &task.parent)?;
    caches.clear_batches();
    let (blocks, architecture) = (held.blocks(), held.architecture());
    let sequences =
        shard::read(context.store, &task.shard, architecture.vocab_size)?.first(task.sequences.max(1));
    let layers = layers(architecture);
    if task.remove >= layers.len() {
        let reason = format!(
            "remove is {}, expected less than the parent's {} layers",
            task.remove,
            layers.len()
        );
        return Err(Error::Invalid { reason });
    }
    let rows = blocks.plan(context).rows(architecture);
    let mut running = Running {
        context,
        blocks,
        together: (rows / sequences.sequence_tokens.max(1)).max(1),
        embedded: blocks.runner().embed(&sequences.tokens)?,
        layout: Layout {
            sequences: sequences.len(),
            tokens: sequences.sequence_tokens,
        },
        removed: Vec::new(),
        done: 0,
        total: task.remove * (2 * layers.len() - task.remove + 1) / 2,
        layers,
    };
    let parent = running.whole()?;
    let parent_rows = context.operations.download(&parent)?;
    let mut divergences = Vec::new();
    while running.removed.len() < task.remove {
        let Some(best) = running.most_dispensable(&parent_rows)? else {
            break;
        };
        running.remove(best.index);
        let head = blocks.runner().model().head();
        let parent = Head {
            hidden: &parent,
            weight: head,
        };
        let mut sums = Divergences::new(1);
        sums.add(&*context.operations, &[best.finals], head, parent, running.layout)?;
        divergences.extend(sums.means().iter().map(|mean| mean.mean));
    }
    running.done = running.total;
    running.tell()?;
    Ok(TaskOutput::DepthOrder {
        layers: running.removed,
        divergences,
    })
}

fn layers(architecture: &Architecture) -> Vec<Layer> {
    let mut layers: Vec<Layer> = Vec::new();
    for (index, block) in architecture.blocks.iter().enumerate() {
        match layers.last_mut() {
            Some(last) if last.number == block.layer => last.blocks.end = index + 1,
            _ => layers.push(Layer {
                number: block.layer,
                blocks: index..index + 1,
            }),
        }
    }
    layers
}

impl Running<'_> {
    fn tell(&self) -> Result<()> {
        self.context.progress(self.done, self.total, "removals", || {
            format!("removed {:?}", self.removed)
        })
    }

    /// The final hidden states of the model as it is.
    fn whole(&self) -> Result<Tensor> {
        let mut hidden = self.embedded.clone();
        self.blocks.walk(self.context, &self.left(0), |block, weights| {
            self.pass(block, weights, &mut hidden)
        })?;
        Ok(self.blocks.runner().final_norm(&hidden)?)
    }

    /// Blocks of the layers left, from one on.
    fn left(&self, from: usize) -> Vec<usize> {
        let layers = self.layers.iter().skip(from);
        layers.flat_map(|layer| layer.blocks.clone()).collect()
    }

    fn pass(&self, block: usize, weights: &BlockWeights, hidden: &mut Tensor) -> Result<()> {
        self.context.check_cancelled()?;
        let Some(whole) = self.blocks.architecture().blocks.get(block) else {
            return Ok(());
        };
        let runner = self.blocks.runner();
        let Layout { sequences, tokens } = self.layout;
        let mut passed = Vec::new();
        for first in (0..sequences).step_by(self.together) {
            let piece = Layout {
                sequences: self.together.min(sequences - first),
                tokens,
            };
            let rows = hidden.narrow_rows(first * tokens, piece.sequences * tokens)?;
            passed.push(runner.block_with(&whole.shape, weights, &rows, piece)?);
        }
        *hidden = match passed.as_slice() {
            [all] => all.clone(),
            pieces => {
                let pieces: Vec<&Tensor> = pieces.iter().collect();
                self.context.operations.concatenate(&pieces)?
            }
        };
        Ok(())
    }

    /// Which of the layers left changes the final hidden states the least when it goes too.
    fn most_dispensable(&mut self, parent_rows: &[f32]) -> Result<Option<Removal>> {
        let columns = self.blocks.architecture().hidden;
        let mut best: Option<Removal> = None;
        let candidates: Vec<usize> = (0..self.layers.len()).collect();
        let each = self.embedded.bytes();
        // Beside what goes together: the model's own states, and the best so far.
        let room = self.blocks.room(self.context, each.saturating_mul(2));
        let mut base = self.embedded.clone();
        for group in groups(&candidates, |_| each, room) {
            self.tell()?;
            let finals = self.without(group.clone(), &mut base)?;
            for (index, finals) in group.zip(finals) {
                let rows = self.context.operations.download(&finals)?;
                let distance = cosine_distance(&rows, parent_rows, columns);
                if best.as_ref().is_none_or(|best| distance < best.distance) {
                    best = Some(Removal {
                        distance,
                        index,
                        finals,
                    });
                }
                self.done += 1;
            }
        }
        Ok(best)
    }

    /// Final hidden states without one of the layers left, for each of some. `base` are the model's own: before the first
    /// of those layers, and before the next group's when this returns.
    fn without(&self, group: Range<usize>, base: &mut Tensor) -> Result<Vec<Tensor>> {
        let candidates = self.layers.get(group.clone()).unwrap_or_default();
        let (Some(first), Some(last)) = (candidates.first(), candidates.last()) else {
            return Ok(Vec::new());
        };
        let base_end = match group.end < self.layers.len() {
            true => last.blocks.end,
            false => last.blocks.start,
        };
        let mut wanted = self.left(group.start);
        wanted.retain(|block| *block < base_end || *block >= first.blocks.end);
        // Of those that have branched off.
        let mut without: Vec<Tensor> = Vec::new();
        self.blocks.walk(self.context, &wanted, |block, weights| {
            let next = candidates.get(without.len());
            if next.is_some_and(|layer| layer.blocks.start == block) {
                without.push(base.clone());
            }
            for (hidden, layer) in without.iter_mut().zip(candidates) {
                if block >= layer.blocks.end {
                    self.pass(block, weights, hidden)?;
                }
            }
            match block < base_end {
                true => self.pass(block, weights, base),
                false => Ok(()),
            }
        })?;
        // The last layer of all alone: without it, the model ends where it stands.
        without.resize(candidates.len(), base.clone());
        let runner = self.blocks.runner();
        let normed = without.iter().map(|hidden| runner.final_norm(hidden));
        Ok(normed.collect::<espalier_model::Result<_>>()?)
    }

    /// Removes one of the layers left for good.
    fn remove(&mut self, index: usize) {
        let layer = self.layers.remove(index);
        self.removed.push(layer.number);
    }
}

/// One minus the mean cosine of the rows.
fn cosine_distance(a: &[f32], b: &[f32], columns: usize) -> f64 {
    let columns = columns.max(1);
    let mut sum = 0.0;
    for (x, y) in a.chunks(columns).zip(b.chunks(columns)) {
        let (mut dot, mut xx, mut yy) = (0.0_f64, 0.0_f64, 0.0_f64);
        for (p, q) in x.iter().zip(y) {
            let (p, q) = (f64::from(*p), f64::from(*q));
            dot += p * q;
            xx += p * p;
            yy += q * q;
        }
        sum += dot / (xx * yy).sqrt().max(f64::MIN_POSITIVE);
    }
    1.0 - sum / count((a.len() / columns).max(1))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::path::PathBuf;

    use espalier_artifact::BlockingStore;
    use espalier_model::Device;
    use espalier_model::checkpoint::Parent;
    use espalier_proto::task::ParentRef;

    use super::super::parent::Held;
    use super::super::{Backend, Caches, Context};
    use super::*;
    use crate::data::shard::Sequences;

    #[test]
    fn sequences_go_through_a_block_in_pieces_as_they_do_together() {
        let tiny = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
        let source = tiny.to_str().unwrap().to_owned();
        let reference = ParentRef {
            fingerprint: Parent::open(&source).unwrap().fingerprint().unwrap(),
            source,
            permutation: None,
        };
        let directory = tempfile::tempdir().unwrap();
        let store = BlockingStore::open(directory.path().join("store").to_str().unwrap()).unwrap();
        let backend = Backend::open(Device::Cpu, None).unwrap();
        let context = Context::new(&backend, &store, Box::new(|_| ()), Box::new(|| None));
        let mut caches = Caches::default();
        let held = caches.held(&context, &reference).unwrap();
        let blocks = held.blocks();
        let tokens: Vec<u32> = (0..5 * 16).map(|token| token * 7 % 1024).collect();
        let finals = |together: usize| {
            let running = Running {
                context: &context,
                blocks,
                layers: layers(held.architecture()),
                embedded: blocks.runner().embed(&tokens).unwrap(),
                layout: Layout {
                    sequences: 5,
                    tokens: 16,
                },
                together,
                removed: Vec::new(),
                done: 0,
                total: 0,
            };
            context.operations.download(&running.whole().unwrap()).unwrap()
        };
        let whole = finals(5);
        for together in [1, 2, 4] {
            let apart = finals(together);
            assert_eq!(apart.len(), whole.len());
            let far = apart.iter().zip(&whole).map(|(a, b)| (a - b).abs());
            assert!(far.fold(0.0, f32::max) < 1e-4, "{together} together");
        }
    }

    #[test]
    fn a_streamed_parent_is_read_once_to_begin_with_and_once_for_each_removal() {
        let tiny = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
        let source = tiny.to_str().unwrap().to_owned();
        let parent = Parent::open(&source).unwrap();
        let bytes = 4 * parent.architecture.parameters().total;
        let in_blocks = 4 * parent.architecture.parameters().in_blocks();
        let reference = ParentRef {
            fingerprint: parent.fingerprint().unwrap(),
            source,
            permutation: None,
        };
        let directory = tempfile::tempdir().unwrap();
        let store = BlockingStore::open(directory.path().join("store").to_str().unwrap()).unwrap();
        let tokens: Vec<u32> = (0..64).map(|token| token * 7 % 1024).collect();
        let sequences = Sequences {
            tokens,
            sequence_tokens: 32,
        };
        let task = DepthOrder {
            parent: reference.clone(),
            remove: 2,
            shard: shard::write(&store, &sequences).unwrap(),
            sequences: 2,
        };
        let mut outputs = Vec::new();
        for limit in [None, Some(bytes * 6 / 10)] {
            let backend = Backend::open(Device::Cpu, limit).unwrap();
            let context = Context::new(&backend, &store, Box::new(|_| ()), Box::new(|| None));
            let mut caches = Caches::default();
            let held = caches.held(&context, &reference).unwrap();
            let before = held.loaded_bytes();
            outputs.push(run(&context, &mut caches, &task).unwrap());
            if let Held::Streamed(_) = held {
                // Layers are alike: six of them, then six, then five.
                let read = u64::try_from(held.loaded_bytes() - before).unwrap();
                assert_eq!(read, (6 + 6 + 5) * in_blocks / 6);
            }
        }
        assert_eq!(outputs[0], outputs[1]);
    }
}
