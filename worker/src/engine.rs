//! Engines: what runs a model under a workload and says how long it took and how much memory it needs.
//!
//! [`builtin`] is our own; [`stacks`] prices single block shapes on it; [`pair`] measures two models in
//! alternation. [`quiet`] throws away what was timed while the process did not run as it should. Statistics of
//! repeats live in [`statistics`].

pub mod builtin;
pub mod pair;
pub mod quiet;
pub mod stacks;
pub mod statistics;
