//! A running coordinator: one loop that owns the state, and the gRPC services that talk to it.
//!
//! The loop ([`owner`]) is the only one to touch the state and the journal; everybody else sends it
//! [`owner::Request`]s over one bounded channel. Planning, report writing and removal run beside it on
//! blocking threads and report back the same way. What the loop has of the world comes through
//! [`surroundings`].

mod adapter;
mod cluster;
mod handle;
mod history;
mod inbox;
mod jobs;
mod kept;
mod log;
mod options;
mod outcome;
pub mod owner;
mod planner;
mod room;
mod serve;
mod start;
mod store;
pub mod surroundings;
mod tasks;
mod turns;
mod view;
mod watch;
pub mod workers;

pub use adapter::PipelinePlanner;
pub use handle::Handle;
pub use options::CoordinatorOptions;
pub use planner::{Planned, Planner, StageSnapshot};
pub use start::Coordinator;
