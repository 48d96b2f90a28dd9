//! Verify: the exported directory, loaded as anybody would, alternating with the parent.

use std::sync::Arc;

use espalier_model::checkpoint::Parent;
use espalier_proto::task::{MeasuredPair, Verify};

use super::{Caches, Context};
use crate::Result;
use crate::engine::pair::measure_pair;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Verify) -> Result<MeasuredPair> {
    let resident = caches.parent(context, &task.parent)?;
    caches.clear_batches();
    let operations = &context.operations;
    let candidate = Arc::new(Parent::open(&task.directory)?.load(&**operations)?);
    let mut progress = |done, total| context.progress(done, total, "alternations", String::new);
    measure_pair(
        operations,
        &resident.model,
        &candidate,
        &task.workload,
        task.repeats,
        &mut progress,
    )
}
