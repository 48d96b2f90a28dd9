//! Calibrate: importance sums over one shard, in f64.

use espalier_model::importance::Importance;
use espalier_proto::task::{Calibrate, TaskOutput};

use super::caches::layouts;
use super::{Caches, Context};
use crate::data::shard;
use crate::{Error, Result};

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Calibrate) -> Result<TaskOutput> {
    let resident = caches.parent(context, &task.parent)?;
    let sequences = shard::read(context.store, &task.shard, resident.model.architecture.vocab_size)?;
    let batches = layouts(&sequences, context.plan().rows(&resident.model.architecture));
    let total = sequences.tokens.len();
    let (mut sums, mut done): (Option<Importance>, usize) = (None, 0);
    for (layout, tokens) in &batches {
        context.progress(done, total, "tokens", String::new)?;
        let part = Importance::measure(&resident.runner, tokens, *layout, layout.sequences)?;
        match &mut sums {
            Some(sums) => sums.add(&part)?,
            None => sums = Some(part),
        }
        done += tokens.len();
    }
    let sums = sums.ok_or_else(|| Error::Invalid {
        reason: "the calibration shard has no sequence, expected at least one".to_owned(),
    })?;
    let importance = context.put_written(|path| sums.save(path))?;
    context.progress(total, total, "tokens", String::new)?;
    Ok(TaskOutput::Calibrate { importance })
}
