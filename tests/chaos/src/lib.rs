//! Real coordinators and workers, killed, stopped, cut off and starved: the kit that the tests and checks share.
//!
//! - [`errand`]: what a stand-in task does, carried in the spec of a real task, and its planner [`story`].
//! - [`ledger`]: what happened, as the processes themselves wrote it down; a kill loses nothing of it.
//! - [`process`], [`port`], [`proxy`], [`rig`]: processes to kill and stop, ports they come back to, wires to cut, and
//!   a cluster of all.
//! - [`kill`]: the coordinator killed again and again under working workers.
//! - [`lost`]: a coordinator whose node is gone, and its successor.
//! - [`tiny`], [`small_disk`] and [`upset`]: the whole pipeline by the real program, upset in every way.
//!
//! The coordinator, the agent and the protocol are the real ones. Only the device child and the planner stand in.

pub mod errand;
pub mod kill;
pub mod ledger;
pub mod lost;
pub mod port;
pub mod process;
pub mod proxy;
pub mod rig;
pub mod small_disk;
pub mod story;
pub mod tiny;
pub mod upset;
