//! Depth order: which whole layers are best removed, greedily and conditionally: the best removal is made,
//! then the rest is scored again in the model that is left (one-at-a-time scores mis-rank depth).
//!
//! A removal is chosen by the cosine distance of the final hidden states to the parent's, which costs no pass
//! over the vocabulary; the KL of each choice is reported. Candidates start from the running model's
//! activations before the layer that they remove.

use std::ops::Range;

use espalier_model::Tensor;
use espalier_model::ops::{Head, Layout};
use espalier_proto::task::{DepthOrder, TaskOutput};

use super::divergence::{Divergences, count};
use super::{Caches, Context, Resident};
use crate::data::shard;
use crate::{Error, Result};

/// A layer: its number and its blocks, which follow each other.
#[derive(Debug, Clone)]
struct Layer {
    number: usize,
    blocks: Range<usize>,
}

/// The model without the layers removed so far, and its activations before each layer that is left.
struct Running {
    layers: Vec<Layer>,
    inputs: Vec<Tensor>,
    layout: Layout,
}

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &DepthOrder) -> Result<TaskOutput> {
    let resident = caches.parent(context, &task.parent)?;
    caches.clear_batches();
    let sequences = shard::read(context.store, &task.shard, resident.model.architecture.vocab_size)?
        .first(task.sequences.max(1));
    let layout = Layout {
        sequences: sequences.len(),
        tokens: sequences.sequence_tokens,
    };
    let layers = layers(&resident);
    if task.remove >= layers.len() {
        let reason = format!(
            "remove is {}, expected less than the parent's {} layers",
            task.remove,
            layers.len()
        );
        return Err(Error::Invalid { reason });
    }
    let embedded = resident.runner.embed(&sequences.tokens)?;
    let mut running = Running {
        layers,
        inputs: vec![embedded],
        layout,
    };
    let parent = running.extend(&resident, 0)?;
    let parent_rows = context.operations.download(&parent)?;
    let total = task.remove * (2 * running.layers.len() - task.remove + 1) / 2;
    let (mut order, mut divergences, mut done) = (Vec::new(), Vec::new(), 0);
    while order.len() < task.remove {
        let mut best: Option<(f64, usize)> = None;
        for index in 0..running.layers.len() {
            context.progress(done, total, "removals", || format!("removed {order:?}"))?;
            done += 1;
            let finals = context.operations.download(&running.without(&resident, index)?)?;
            let distance = cosine_distance(&finals, &parent_rows, parent.columns());
            if best.is_none_or(|(least, _)| distance < least) {
                best = Some((distance, index));
            }
        }
        let Some((_, index)) = best else { break };
        order.push(running.layers[index].number);
        let finals = running.remove(&resident, index)?;
        let head = resident.model.head();
        let mut sums = Divergences::new(1);
        sums.add(
            &*context.operations,
            &[finals],
            head,
            Head {
                hidden: &parent,
                weight: head,
            },
            layout,
        )?;
        divergences.extend(sums.means().iter().map(|mean| mean.mean));
    }
    context.progress(total, total, "removals", || format!("removed {order:?}"))?;
    Ok(TaskOutput::DepthOrder {
        layers: order,
        divergences,
    })
}

fn layers(resident: &Resident) -> Vec<Layer> {
    let mut layers: Vec<Layer> = Vec::new();
    for (index, block) in resident.model.architecture.blocks.iter().enumerate() {
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

impl Running {
    /// Computes the inputs of the layers after `from` anew, and the final hidden states.
    fn extend(&mut self, resident: &Resident, from: usize) -> Result<Tensor> {
        self.inputs.truncate(from + 1);
        let mut hidden = match self.inputs.last() {
            Some(input) => input.clone(),
            None => {
                return Err(Error::Invalid {
                    reason: "the model has no input".to_owned(),
                });
            }
        };
        for layer in self.layers.get(from..).unwrap_or_default() {
            hidden = resident
                .runner
                .blocks(layer.blocks.clone(), &hidden, self.layout)?;
            self.inputs.push(hidden.clone());
        }
        Ok(resident.runner.final_norm(&hidden)?)
    }

    /// Final hidden states without one of the layers left.
    fn without(&self, resident: &Resident, index: usize) -> Result<Tensor> {
        let mut hidden = self.inputs[index].clone();
        for layer in &self.layers[index + 1..] {
            hidden = resident
                .runner
                .blocks(layer.blocks.clone(), &hidden, self.layout)?;
        }
        Ok(resident.runner.final_norm(&hidden)?)
    }

    /// Removes one of the layers left for good; the final hidden states of what remains.
    fn remove(&mut self, resident: &Resident, index: usize) -> Result<Tensor> {
        self.layers.remove(index);
        self.extend(resident, index)
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
