//! Jobs and their stages: the scheduler, the journal, the planning of the pipeline, and the services
//! over them.
//!
//! A coordinator is one loop that owns a pure state machine ([`scheduler`]). What happens is appended
//! to the [`journal`] before anybody is told. Which stage comes next is the planner's business and what an
//! outcome looks like the report's; both run off the loop. No tensor code lives here.

pub mod archive;
pub mod client;
pub mod collect;
pub mod cost_tables;
pub mod doctor;
mod error;
mod history;
pub mod http;
pub mod journal;
mod lock;
pub mod logs;
pub mod memory;
pub mod metrics;
pub mod pipeline;
mod remains;
pub mod report;
pub mod scheduler;
pub mod service;
pub mod shipping;
pub mod spec;
pub mod tables;
pub mod term;
mod told;
pub mod trace;

pub use error::{Error, Result};
pub use service::{Coordinator, CoordinatorOptions, Handle};
