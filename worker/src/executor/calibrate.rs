//! Calibrate: importance sums over one shard, in f64.
//!
//! Batches are added up in their order, block by block: the sums are the same however many go through a block together.

use espalier_model::importance::{BlockImportance, Importance, MeasuredBlock};
use espalier_model::ops::Layout;
use espalier_proto::task::{Calibrate, TaskOutput};

use super::caches::layouts;
use super::parent::Blocks;
use super::streams::groups;
use super::{Caches, Context};
use crate::data::shard;
use crate::{Error, Result};

/// The sums so far.
struct Sums {
    sequences: u64,
    blocks: Vec<Option<BlockImportance>>,
}

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Calibrate) -> Result<TaskOutput> {
    let held = caches.held(context, &task.parent)?;
    let (blocks, architecture) = (held.blocks(), held.architecture());
    let sequences = shard::read(context.store, &task.shard, architecture.vocab_size)?;
    let batches = layouts(&sequences, blocks.plan(context).rows(architecture));
    let row = architecture.hidden * context.operations.activation_bytes();
    let bytes = |(layout, _): &(Layout, Vec<u32>)| layout.rows() * row;
    let groups = groups(&batches, bytes, blocks.room(context, 0));
    let depth = architecture.blocks.len();
    let mut sums = Sums {
        sequences: 0,
        blocks: vec![None; depth],
    };
    let total = groups.len() * depth;
    for (number, group) in groups.iter().enumerate() {
        let batches = batches.get(group.clone()).unwrap_or_default();
        let tell = |block| context.progress(number * depth + block, total, "blocks", String::new);
        sums.add_group(context, blocks, batches, tell)?;
    }
    let sums = sums.whole().ok_or_else(|| Error::Invalid {
        reason: "the calibration shard has no sequence, expected at least one".to_owned(),
    })?;
    let importance = context.put_written(|path| sums.save(path))?;
    context.progress(total, total, "blocks", String::new)?;
    Ok(TaskOutput::Calibrate {
        importance,
        streamed: blocks.are_read(),
    })
}

impl Sums {
    fn add_group(
        &mut self,
        context: &Context<'_>,
        blocks: Blocks<'_>,
        batches: &[(Layout, Vec<u32>)],
        tell: impl Fn(usize) -> Result<()>,
    ) -> Result<()> {
        let runner = blocks.runner();
        let mut states = Vec::with_capacity(batches.len());
        for (layout, tokens) in batches {
            states.push(runner.embed(tokens)?);
            self.sequences += layout.sequences as u64;
        }
        let all: Vec<usize> = (0..self.blocks.len()).collect();
        blocks.walk(context, &all, |index, weights| {
            tell(index)?;
            let (Some(block), Some(sum)) = (
                blocks.architecture().blocks.get(index),
                self.blocks.get_mut(index),
            ) else {
                return Ok(());
            };
            let measured = MeasuredBlock {
                index,
                shape: &block.shape,
                weights,
            };
            for (hidden, (layout, _)) in states.iter_mut().zip(batches) {
                context.check_cancelled()?;
                let (output, own) = BlockImportance::measure(runner, measured, hidden, *layout)?;
                *hidden = output;
                match sum {
                    Some(sum) => sum.add(&own)?,
                    None => *sum = Some(own),
                }
            }
            Ok(())
        })
    }

    /// None where there was nothing to add up.
    fn whole(self) -> Option<Importance> {
        let blocks: Option<Vec<BlockImportance>> = self.blocks.into_iter().collect();
        let sequences = self.sequences;
        blocks
            .filter(|_| sequences > 0)
            .map(|blocks| Importance { sequences, blocks })
    }
}
