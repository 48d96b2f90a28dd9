//! The rules as stories, and random histories against the invariants.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod control;
mod gangs;
mod kit;
mod order;
mod pains;
mod random;
mod stories;
