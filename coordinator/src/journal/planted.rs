//! Bugs on purpose: the simulation has to find each of them. Built only with the feature `planted-bugs`,
//! and switched on for the thread that asks.

use std::cell::Cell;

/// One commit in so many is left to the disk's own time.
const SKIPS: u32 = 5;

/// A way to be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// A commit returns before it is durable, now and then.
    SkipAnFsync,
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    static COMMITS: Cell<u32> = const { Cell::new(0) };
}

/// Plants a bug in this thread's journals, or none.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
    COMMITS.set(0);
}

/// Whether this commit does not wait for the disk.
pub(super) fn skips_fsync() -> bool {
    let commits = COMMITS.get().wrapping_add(1);
    COMMITS.set(commits);
    PLANTED.get() == Some(Bug::SkipAnFsync) && commits.is_multiple_of(SKIPS)
}
