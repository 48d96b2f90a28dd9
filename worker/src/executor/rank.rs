//! Rank: KL of whole candidates, untrained, to choose among a grid.

use espalier_model::ops::Head;
use espalier_proto::task::{Rank, TaskOutput};

use super::divergence::Divergences;
use super::streams::{Form, Part, Start, Unit, finals};
use super::{Caches, Context};
use crate::Result;

/// Candidates that are compared in one pass over the vocabulary.
const TOGETHER: usize = 8;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Rank) -> Result<TaskOutput> {
    let held = caches.held(context, &task.parent)?;
    let batches = caches.batches(context, (&task.parent, &held), &task.shard)?;
    let (blocks, architecture) = (held.blocks(), held.architecture());
    let forms = task.candidates.iter();
    let forms: Vec<Form> = forms
        .map(|candidate| Form::of(architecture, candidate))
        .collect::<Result<_>>()?;
    // Some candidates and a batch each, the batches of the same candidates after one another.
    let unit = |forms| {
        batches.iter().map(move |batch| Unit {
            forms,
            layout: batch.layout,
            start: Start::Tokens(&batch.tokens),
            own: None,
        })
    };
    let units: Vec<Unit<'_>> = forms.chunks(TOGETHER).flat_map(unit).collect();
    let mut sums: Vec<Divergences> = forms
        .chunks(TOGETHER)
        .map(|forms| Divergences::new(forms.len()))
        .collect();
    let note = format!("{} candidates", forms.len());
    finals(context, blocks, units, Part::only(&note), |index, students| {
        let (chunk, batch) = (index / batches.len(), index % batches.len());
        let (Some(sums), Some(batch)) = (sums.get_mut(chunk), batches.get(batch)) else {
            return Ok(());
        };
        let parent = Head {
            hidden: &batch.finals,
            weight: blocks.runner().model().head(),
        };
        sums.add(
            &*context.operations,
            &students,
            parent.weight,
            parent,
            batch.layout,
        )
    })?;
    context.progress(1, 1, "blocks", || note.clone())?;
    let divergences = sums.iter().flat_map(Divergences::means).map(|mean| mean.mean);
    Ok(TaskOutput::Rank {
        divergences: divergences.collect(),
    })
}
