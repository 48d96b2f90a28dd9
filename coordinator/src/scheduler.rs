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
mod index;
mod invariants;
mod job;
mod placement;
#[cfg(feature = "planted-bugs")]
pub mod planted;
mod retry;
mod shared;
mod state;
mod task;
#[cfg(test)]
mod tests;
mod why;
mod worker;

pub use apply::apply;
pub use command::{Command, Introduction, Now, Rejection, StagePlan, TaskPlan};
pub use decide::decide;
pub use effect::{Effect, effects, resume};
pub use event::{Event, RankRecord, StageRecord, TaskRecord};
pub use ids::{AttemptId, Epoch, JobId, Lease, Name, Payload, TaskId, Term, Token, WorkerId};
pub use invariants::{check, check_touched};
pub use job::{Ended, Job, JobPhase, Pause, Retry, Stage, Summary};
pub use retry::{Budget, Failures, hand_back_pause, retry_pause};
pub use state::{Release, State};
pub use task::{Attempt, Evidence, Gang, GangPlace, Needs, Rank, RankPhase, Task, TaskPhase, Trouble};
pub use worker::{Cordon, Device, DeviceInfo, EngineInfo, Standing, Worker};
