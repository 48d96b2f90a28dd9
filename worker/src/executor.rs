//! Executors: one for each kind of task, all over a [`Context`] and the [`Caches`] of their child.
//!
//! They know no lease, no coordinator and no process; whatever they find out is their return value.

mod backend;
mod caches;
mod calibrate;
mod check;
mod context;
mod depth_order;
mod divergence;
mod evaluate;
mod export;
mod ingest;
mod measure;
mod multiple_choice;
mod parent;
mod plan;
mod profile;
mod pulse;
mod rank;
mod recover;
mod score;
mod sort;
mod streams;
mod student;
mod verify;

use espalier_proto::task::{TaskOutput, TaskSpec};

use crate::Result;
pub use backend::Backend;
pub use caches::Caches;
pub use context::{Context, ProgressSink, Stop, StopFlag};
pub use pulse::Pulse;

/// Runs one task to its end.
///
/// # Errors
/// Why the attempt failed; [`crate::Error::failure`] says what that means for trying again.
pub fn execute(context: &Context<'_>, caches: &mut Caches, spec: &TaskSpec) -> Result<TaskOutput> {
    context.check_cancelled()?;
    match spec {
        TaskSpec::Ingest(task) => ingest::run(context, caches, task)
            .map(Box::new)
            .map(TaskOutput::Ingest),
        TaskSpec::Profile(task) => profile::run(context, caches, task).map(TaskOutput::Profile),
        TaskSpec::Calibrate(task) => calibrate::run(context, caches, task),
        TaskSpec::Sort(task) => sort::run(context, task),
        TaskSpec::Score(task) => score::run(context, caches, task),
        TaskSpec::DepthOrder(task) => depth_order::run(context, caches, task),
        TaskSpec::Rank(task) => rank::run(context, caches, task),
        TaskSpec::Check(task) => check::run(context, caches, task)
            .map(Box::new)
            .map(TaskOutput::Measured),
        TaskSpec::Recover(task) => recover::run(context, caches, task).map(TaskOutput::Recover),
        TaskSpec::Evaluate(task) => evaluate::run(context, caches, task).map(TaskOutput::Evaluate),
        TaskSpec::Export(task) => export::run(context, task).map(TaskOutput::Export),
        TaskSpec::Verify(task) => verify::run(context, caches, task)
            .map(Box::new)
            .map(TaskOutput::Measured),
    }
}
