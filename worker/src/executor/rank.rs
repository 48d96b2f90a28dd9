//! Rank: KL of whole candidates, untrained, to choose among a grid.

use std::sync::Arc;

use espalier_model::ops::Head;
use espalier_model::runner::Runner;
use espalier_proto::task::{Rank, TaskOutput};

use super::caches::finals;
use super::divergence::Divergences;
use super::{Caches, Context};
use crate::Result;

/// Candidates that are compared in one pass over the vocabulary.
const TOGETHER: usize = 8;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Rank) -> Result<TaskOutput> {
    let resident = caches.parent(context, &task.parent)?;
    let batches = caches.batches(context, &task.parent, &task.shard, false)?;
    let total = task.candidates.len();
    let mut divergences = Vec::with_capacity(total);
    for group in task.candidates.chunks(TOGETHER) {
        let mut sums = Divergences::new(group.len());
        let mut runners = Vec::with_capacity(group.len());
        for candidate in group {
            let model = Arc::new(resident.model.slice(candidate)?);
            runners.push(Runner::new(Arc::clone(&context.operations), model));
        }
        for batch in batches.iter() {
            let mut students = Vec::with_capacity(group.len());
            for (index, runner) in runners.iter().enumerate() {
                context.progress(divergences.len() + index, total, "candidates", String::new)?;
                students.push(finals(runner, &batch.tokens, batch.layout)?);
            }
            let head = resident.model.head();
            let parent = Head {
                hidden: &batch.finals,
                weight: head,
            };
            sums.add(&*context.operations, &students, head, parent, batch.layout)?;
        }
        divergences.extend(sums.means().iter().map(|mean| mean.mean));
    }
    context.progress(total, total, "candidates", String::new)?;
    Ok(TaskOutput::Rank { divergences })
}
