//! The worker: an agent that holds leases and supervises, and device children that run tasks.
//!
//! ```text
//! coordinator <- gRPC -> agent <- JSON lines -> child -> executor -> engine, data -> model
//! ```
//!
//! [`discovery`] says which devices there are. [`agent`] runs no tensor code; [`child`] knows no coordinator; [`executor`] knows neither, only a
//! [`executor::Context`]. Large things travel through the artifact store.

pub mod agent;
pub mod child;
pub mod data;
pub mod discovery;
pub mod engine;
mod error;
pub mod executor;
mod trace;

pub use agent::{Shutdown, WorkerOptions, run};
pub use child::{Assigned, run as run_child};
pub use error::{Error, Result};
