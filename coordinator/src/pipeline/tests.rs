//! Drives [`plan`](super::plan) through whole jobs with a made-up worker.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod batching;
mod checks;
mod findings;
mod imported;
mod servable;
mod too_large;
mod whole;
mod world;
