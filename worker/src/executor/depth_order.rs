//! Depth order: which whole layers are best removed, greedily and conditionally: the best removal is made,
//! then the rest is scored again in the model that is left (one-at-a-time scores mis-rank depth).
//!
//! A removal is chosen by the cosine distance of the final hidden states to the parent's, which costs no pass
//! over the vocabulary; the KL of each choice is reported. Candidates start from the running model's
//! activations before the layer that they remove.

use std::ops::Range;

use espalier_arch::{Architecture, Variant};
use espalier_model::Tensor;
use espalier_model::ops::{Head, Layout};
use espalier_proto::task::{DepthOrder, TaskOutput};

use super::divergence::{Divergences, count};
use super::parent::Blocks;
use super::streams::{Form, Stream, advance, groups};
use super::{Caches, Context};
use crate::data::shard;
use crate::{Error, Result};

/// A layer: its number and its blocks, which follow each other.
#[derive(Debug, Clone)]
struct Layer {
    number: usize,
    blocks: Range<usize>,
}

/// The model without the layers removed so far, and its activations before each layer that is left.
struct Running<'a> {
    context: &'a Context<'a>,
    blocks: Blocks<'a>,
    /// What is left of it.
    form: Form,
    layers: Vec<Layer>,
    inputs: Vec<Tensor>,
    layout: Layout,
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
    let mut running = Running {
        context,
        blocks,
        form: Form::whole(architecture),
        inputs: vec![blocks.runner().embed(&sequences.tokens)?],
        layout: Layout {
            sequences: sequences.len(),
            tokens: sequences.sequence_tokens,
        },
        removed: Vec::new(),
        done: 0,
        total: task.remove * (2 * layers.len() - task.remove + 1) / 2,
        layers,
    };
    let parent = running.extend(0)?;
    let parent_rows = context.operations.download(&parent)?;
    let mut divergences = Vec::new();
    while running.removed.len() < task.remove {
        let Some(index) = running.most_dispensable(&parent_rows)? else {
            break;
        };
        let finals = running.remove(index)?;
        let head = blocks.runner().model().head();
        let parent = Head {
            hidden: &parent,
            weight: head,
        };
        let mut sums = Divergences::new(1);
        sums.add(&*context.operations, &[finals], head, parent, running.layout)?;
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

    /// Computes the inputs of the layers after the `from`th anew, and the final hidden states.
    fn extend(&mut self, from: usize) -> Result<Tensor> {
        self.inputs.truncate(from + 1);
        let Some(mut hidden) = self.inputs.last().cloned() else {
            return Err(Error::Invalid {
                reason: "the model has no input".to_owned(),
            });
        };
        let left = self.layers.get(from..).unwrap_or_default();
        let ends: Vec<usize> = left.iter().map(|layer| layer.blocks.end).collect();
        let wanted: Vec<usize> = left.iter().flat_map(|layer| layer.blocks.clone()).collect();
        let runner = self.blocks.runner();
        self.blocks.walk(self.context, &wanted, |block, weights| {
            self.context.check_cancelled()?;
            let Some(whole) = self.blocks.architecture().blocks.get(block) else {
                return Ok(());
            };
            hidden = runner.block_with(&whole.shape, weights, &hidden, self.layout)?;
            if ends.contains(&(block + 1)) {
                self.inputs.push(hidden.clone());
            }
            Ok(())
        })?;
        Ok(runner.final_norm(&hidden)?)
    }

    /// Which of the layers left changes the final hidden states the least when it goes too.
    fn most_dispensable(&mut self, parent_rows: &[f32]) -> Result<Option<usize>> {
        let columns = self.blocks.architecture().hidden;
        let mut best: Option<(f64, usize)> = None;
        let candidates: Vec<usize> = (0..self.layers.len()).collect();
        let bytes = |_: &usize| self.inputs.first().map_or(0, Tensor::bytes);
        for group in groups(&candidates, bytes, self.blocks.room(self.context, 0)) {
            self.tell()?;
            let finals = self.without(group.clone())?;
            for (index, finals) in group.zip(finals) {
                let rows = self.context.operations.download(&finals)?;
                let distance = cosine_distance(&rows, parent_rows, columns);
                if best.is_none_or(|(least, _)| distance < least) {
                    best = Some((distance, index));
                }
                self.done += 1;
            }
        }
        Ok(best.map(|(_, index)| index))
    }

    /// Final hidden states without one of the layers left, for each of some.
    fn without(&self, group: Range<usize>) -> Result<Vec<Tensor>> {
        let end = self.blocks.architecture().blocks.len();
        // Each enters after the layer that it does without.
        let mut streams: Vec<Stream<'_>> = self.layers[group.clone()]
            .iter()
            .zip(&self.inputs[group])
            .map(|(layer, input)| Stream {
                form: &self.form,
                from: layer.blocks.end,
                layout: self.layout,
                hidden: input.clone(),
            })
            .collect();
        advance(self.context, self.blocks, 0..end, &mut streams, |_, _| Ok(()))?;
        let runner = self.blocks.runner();
        let normed = streams.iter().map(|stream| runner.final_norm(&stream.hidden));
        Ok(normed.collect::<espalier_model::Result<_>>()?)
    }

    /// Removes one of the layers left for good; the final hidden states of what remains.
    fn remove(&mut self, index: usize) -> Result<Tensor> {
        let layer = self.layers.remove(index);
        for block in layer.blocks {
            self.form = self.form.clone().with(block, &Variant::Skip)?;
        }
        self.removed.push(layer.number);
        self.extend(index)
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
