//! Check: a candidate's shape with dummy weights, alternating with the parent's, before a token is spent on it.

use espalier_proto::task::{Check, MeasuredPair};

use super::{Caches, Context, measure};
use crate::Result;
use crate::engine::Subject;
use crate::engine::pair::measure_pair;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Check) -> Result<MeasuredPair> {
    caches.clear();
    let both = [&task.parent, &task.architecture].map(Subject::Shape);
    measure::on(task.engine, context, caches, |engine| {
        measure_pair(engine, both, &task.workload, task.running, task.repeats, context)
    })
}
