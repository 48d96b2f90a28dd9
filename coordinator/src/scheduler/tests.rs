//! The rules as stories, and random histories against the invariants.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod control;
mod formats;
mod gangs;
mod kit;
mod order;
mod pains;
#[cfg(feature = "planted-bugs")]
mod planted;
mod pliable_gangs;
mod random;
mod stories;
