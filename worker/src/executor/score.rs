//! Score: what each variant of one block costs in quality, all other blocks whole (Puzzle, 2411.19146).
//!
//! The variants start from the parent's input of the block, which is kept for the shard; every variant runs
//! through the rest of the parent, and all are compared to it in one pass over the vocabulary.

use espalier_arch::Variant;
use espalier_model::Tensor;
use espalier_model::ops::{Head, Layout};
use espalier_proto::task::{ScoreBlock, TaskOutput};
use espalier_search::Score;

use super::caches::Batch;
use super::divergence::Divergences;
use super::{Caches, Context, Resident};
use crate::{Error, Result};

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &ScoreBlock) -> Result<TaskOutput> {
    let resident = caches.parent(context, &task.parent)?;
    let batches = caches.batches(context, &task.parent, &task.shard, true)?;
    let blocks = resident.model.blocks.len();
    if task.block >= blocks {
        let reason = format!(
            "block is {}, expected 0 to {}",
            task.block,
            blocks.saturating_sub(1)
        );
        return Err(Error::Invalid { reason });
    }
    let total = batches.len() * task.variants.len();
    let mut divergences = Divergences::new(task.variants.len());
    for (number, batch) in batches.iter().enumerate() {
        let input = block_input(&resident, batch, task.block)?;
        let mut students = Vec::with_capacity(task.variants.len());
        for (index, variant) in task.variants.iter().enumerate() {
            context.progress(number * task.variants.len() + index, total, "variants", || {
                format!("block {}", task.block)
            })?;
            students.push(patched(&resident, task.block, variant, &input, batch.layout)?);
        }
        let head = resident.model.head();
        let parent = Head {
            hidden: &batch.finals,
            weight: head,
        };
        divergences.add(&*context.operations, &students, head, parent, batch.layout)?;
    }
    context.progress(total, total, "variants", || format!("block {}", task.block))?;
    let tokens = divergences.tokens();
    let scores = task
        .variants
        .iter()
        .zip(divergences.means())
        .map(|(variant, mean)| Score {
            block: task.block,
            variant: variant.clone(),
            divergence: mean.mean,
            standard_error: mean.error,
            tokens,
        });
    Ok(TaskOutput::Score {
        scores: scores.collect(),
    })
}

fn block_input(resident: &Resident, batch: &Batch, block: usize) -> Result<Tensor> {
    if let Some(input) = batch.inputs.as_ref().and_then(|inputs| inputs.get(block)) {
        return Ok(input.clone());
    }
    let hidden = resident.runner.embed(&batch.tokens)?;
    Ok(resident.runner.blocks(0..block, &hidden, batch.layout)?)
}

/// Final hidden states of the parent with one block replaced.
fn patched(
    resident: &Resident,
    block: usize,
    variant: &Variant,
    input: &Tensor,
    layout: Layout,
) -> Result<Tensor> {
    let (shape, weights) = match (
        resident.model.architecture.blocks.get(block),
        resident.model.blocks.get(block),
    ) {
        (Some(block), Some(weights)) => (&block.shape, weights),
        _ => {
            return Err(Error::Invalid {
                reason: format!("there is no block {block}"),
            });
        }
    };
    let smaller = shape
        .with_variant(variant)
        .map_err(|reason| espalier_arch::Error::VariantDoesNotFit { block, reason })?;
    let hidden = match smaller {
        None => input.clone(),
        Some(smaller) => resident
            .runner
            .block_with(&smaller, &weights.prefix(&smaller)?, input, layout)?,
    };
    let hidden = resident
        .runner
        .blocks(block + 1..resident.model.blocks.len(), &hidden, layout)?;
    Ok(resident.runner.final_norm(&hidden)?)
}
