//! Check: a candidate's shape with dummy weights, alternating with the parent's, before a token is spent on it.

use espalier_proto::task::{Check, MeasuredPair};

use super::{Caches, Context};
use crate::Result;
use crate::engine::builtin::dummy;
use crate::engine::pair::measure_pair;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Check) -> Result<MeasuredPair> {
    caches.clear();
    let operations = &context.operations;
    let parent = dummy(operations, &task.parent, 1)?;
    let candidate = dummy(operations, &task.architecture, 2)?;
    measure_pair(
        operations,
        &parent,
        &candidate,
        &task.workload,
        task.repeats,
        &mut |done, total| context.progress(done, total, "alternations", String::new),
    )
}
