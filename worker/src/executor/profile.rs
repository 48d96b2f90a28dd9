//! Profile: every block shape and the base at every point, and the whole parent under the workload, all
//! interleaved round by round, so that whatever disturbs the machine disturbs them alike.

use espalier_proto::task::{Profile, Profiled};

use super::{Caches, Context, measure};
use crate::Result;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Profile) -> Result<Profiled> {
    caches.clear();
    measure::on(task.engine, context, caches, |engine| engine.profile(task))
}
