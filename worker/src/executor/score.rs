//! Score: what each variant of one block costs in quality, all other blocks whole (Puzzle, 2411.19146).
//!
//! The variants start from the parent's input of the block, which is kept for the shard; every variant runs
//! through the rest of the parent, and all are compared to it in one pass over the vocabulary.

use espalier_model::ops::Head;
use espalier_proto::task::{ScoreBlock, TaskOutput};
use espalier_search::Score;

use super::divergence::Divergences;
use super::streams::{Form, Part, Start, Unit, finals};
use super::{Caches, Context};
use crate::{Error, Result};

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &ScoreBlock) -> Result<TaskOutput> {
    let held = caches.held(context, &task.parent)?;
    let (blocks, architecture) = (held.blocks(), held.architecture());
    let depth = architecture.blocks.len();
    if task.block >= depth {
        let reason = format!(
            "block is {}, expected 0 to {}",
            task.block,
            depth.saturating_sub(1)
        );
        return Err(Error::Invalid { reason });
    }
    let forms = task.variants.iter();
    let forms: Vec<Form> = forms
        .map(|variant| Form::whole(architecture).with(task.block, variant))
        .collect::<Result<_>>()?;
    let (batches, inputs) = caches.inputs(context, (&task.parent, &held), &task.shard, task.block)?;
    let units: Vec<Unit<'_>> = batches
        .iter()
        .zip(&inputs)
        .map(|(batch, input)| Unit {
            forms: &forms,
            layout: batch.layout,
            start: Start::Before(task.block, input),
        })
        .collect();
    let mut divergences = Divergences::new(task.variants.len());
    let note = format!("{} variants of block {}", forms.len(), task.block);
    finals(context, blocks, &units, Part::only(&note), |index, students| {
        let Some(batch) = batches.get(index) else {
            return Ok(());
        };
        let parent = Head {
            hidden: &batch.finals,
            weight: blocks.runner().model().head(),
        };
        divergences.add(
            &*context.operations,
            &students,
            parent.weight,
            parent,
            batch.layout,
        )
    })?;
    context.progress(depth, depth, "blocks", || note.clone())?;
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
