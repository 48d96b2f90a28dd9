//! Bugs on purpose, to see that the simulation would have found them. Each is a switch in the room that it is
//! a bug of, for the thread that asks, and in no build without the feature `planted-bugs`.

use std::ops::Range;

use espalier_coordinator::scheduler::planted::Bug;
use espalier_coordinator::{journal, scheduler, term};

use crate::plan::Plan;
use crate::run::{Violation, run};
use crate::trace::Trace;

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// Commits are said to be durable without an fsync.
    SkippedFsync,
    /// The completion of an attempt that was handed on is taken, once.
    StalePromotion,
    /// What failed before a restart is forgotten.
    ForgottenCounter,
    /// A gang begins when half of it is ready.
    HalfAGang,
    /// A coordinator goes on although another has taken over.
    OldTerm,
}

impl Planted {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::SkippedFsync,
        Self::StalePromotion,
        Self::ForgottenCounter,
        Self::HalfAGang,
        Self::OldTerm,
    ];

    fn plant(self) {
        match self {
            Self::SkippedFsync => journal::planted::plant(Some(journal::planted::Bug::SkipAnFsync)),
            Self::StalePromotion => scheduler::planted::plant(Some(Bug::PromoteOneStaleAttempt)),
            Self::ForgottenCounter => scheduler::planted::plant(Some(Bug::ForgetTheRetryCounter)),
            Self::HalfAGang => scheduler::planted::plant(Some(Bug::ReleaseHalfAGang)),
            Self::OldTerm => term::planted::serve_old_terms(true),
        }
    }
}

fn pull_up() {
    journal::planted::plant(None);
    scheduler::planted::plant(None);
    term::planted::serve_old_terms(false);
}

/// The first of these short seeds that shows the bug, and what it showed.
pub fn caught(bug: Planted, seeds: Range<u64>) -> Option<(u64, Violation)> {
    let found = seeds.into_iter().find_map(|seed| {
        bug.plant();
        let violation = run(Plan::short(seed), Trace::new(None, 0)).err()?;
        Some((seed, violation))
    });
    pull_up();
    found
}
