//! Verify: the exported directory, loaded as anybody would, alternating with the parent.

use std::path::Path;

use espalier_proto::task::{MeasuredPair, Verify};

use super::{Caches, Context, measure};
use crate::Result;
use crate::engine::Subject;
use crate::engine::pair::measure_pair;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Verify) -> Result<MeasuredPair> {
    if !task.engine.is_builtin() {
        caches.clear();
    }
    let both = [
        Subject::Parent(&task.parent),
        Subject::Directory(Path::new(&task.directory)),
    ];
    measure::on(task.engine, context, caches, |engine| {
        measure_pair(engine, both, &task.workload, task.running, task.repeats, context)
    })
}
