//! The scheduler: a pure state machine over jobs, stages, tasks, attempts and workers.
//!
//! [`decide`] turns a [`Command`] into [`Event`]s without changing anything; [`apply`] folds an event into
//! the [`State`]; [`effects`] says what has to be done in the world once an event is durable. The same
//! journal replayed through `apply` gives the same state. Here live no clock, no I/O, no randomness, no
//! channels, and nothing that knows what a task's payload means. Timeouts arrive as commands.

mod apply;
mod command;
mod decide;
mod effect;
mod event;
mod ids;
mod invariants;
mod placement;
mod retry;
mod state;
#[cfg(test)]
mod tests;

pub use apply::apply;
pub use command::{Command, Introduction, Now, Rejection, StagePlan, TaskPlan};
pub use decide::decide;
pub use effect::{Effect, effects, resume};
pub use event::{Event, StageRecord, TaskRecord};
pub use ids::{AttemptId, Epoch, JobId, Lease, Payload, TaskId, Term, WorkerId};
pub use invariants::check;
pub use retry::{Budget, Failures};
pub use state::{
    Attempt, Device, DeviceInfo, Job, JobPhase, Stage, Standing, State, Task, TaskPhase, Worker,
};
