//! The coordinator's loop and the worker's core under a virtual clock, network and disk, with seeded faults.
//!
//! Nothing of what decides is simulated: the scheduler, the journal, the owner's loop and the agent's
//! protocol are the ones that run in production. What is simulated is what surrounds them:
//!
//! - [`clock`]: time, and the queue of what happens in it;
//! - [`network`], [`wire`], [`heartbeat`]: links, streams and heartbeats;
//! - [`disk`], [`store`]: what is durable and what is not, and what was shipped;
//! - [`coordinator`], [`succession`], [`worker`], [`device`], [`gangs`]: processes, their lives and deaths, devices that pretend;
//! - [`planner`], [`user`]: what is asked for;
//! - [`faults`]: what goes wrong, each with its story;
//! - [`oracle`]: what is true, and what no run may show.
//!
//! [`plan::Plan`] draws a run from its seed, [`run::run`] lives it. The same seed is the same run: a violation
//! is replayed with `simulate --seed N --trace`.

pub mod clock;
pub mod coordinator;
pub mod device;
pub mod dice;
pub mod disk;
pub mod faults;
pub mod gangs;
pub mod heartbeat;
pub mod network;
pub mod oracle;
pub mod plan;
pub mod planner;
#[cfg(feature = "planted-bugs")]
pub mod planted;
pub mod run;
pub mod store;
pub mod succession;
pub mod trace;
pub mod user;
pub mod wire;
pub mod worker;
pub mod world;
