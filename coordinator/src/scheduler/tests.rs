//! The rules as stories, and random histories against the invariants.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod kit;
mod random;
mod stories;
