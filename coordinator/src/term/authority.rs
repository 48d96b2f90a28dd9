//! The rules of authority: no clock, no store. The simulation runs them as they are.
//!
//! Why two never promote at once: let the older coordinator have begun its last good look at S. Had the
//! newer one's claim been there by then, it would have been seen; so the claim was answered after S. The older
//! promotes until S + lease; the newer from the answer + lease and a tenth (which pays for clocks that run at
//! different rates). Leases may differ: each stands in its claim, and the longest is waited out. Each measures on
//! its own monotonic clock; none is compared with another's. What the proof rests on beside that: the name of a
//! data directory in claims is of one directory, as a copy is known for one and takes another name.

use std::time::Duration;

/// Whether a coordinator may acknowledge completions and hand out tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It may.
    Holds,
    /// Not now: requests wait, workers keep what they have.
    Waits,
    /// Never again: another coordinator has this term.
    Superseded {
        /// The higher term.
        by: u64,
    },
}

/// Whom a claim takes over from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Predecessor {
    /// There was none, or the lock of its data directory proves that it is gone.
    Gone,
    /// It lies on another disk, and may not know of its successor yet.
    MayServe {
        /// The longest that one of those before may promote after a look.
        lease: Duration,
    },
}

/// One term's authority. Times are those of one monotonic clock.
#[derive(Debug, Clone)]
pub struct Authority {
    term: u64,
    lease: Duration,
    from: Duration,
    until: Duration,
    superseded_by: Option<u64>,
}

impl Authority {
    /// The authority of a term whose claim was answered at `claimed_at`. It promotes nothing before a first
    /// [`Authority::looked`].
    pub fn new(term: u64, lease: Duration, claimed_at: Duration, predecessor: Predecessor) -> Self {
        let wait = match predecessor {
            Predecessor::Gone => Duration::ZERO,
            Predecessor::MayServe { lease: theirs } => {
                let longer = theirs.max(lease);
                longer.saturating_add(longer / 10)
            }
        };
        Self {
            term,
            lease,
            from: claimed_at.saturating_add(wait),
            until: Duration::ZERO,
            superseded_by: None,
        }
    }

    /// The term.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Takes a look at the list of terms that was begun at `begun_at` (not when it was answered: what the list
    /// says may be as old as that) and found this to be the highest. None: there was no term at all.
    pub fn looked(&mut self, begun_at: Duration, highest: Option<u64>) {
        match highest {
            Some(highest) if highest > self.term => {
                self.superseded_by = Some(self.superseded_by.map_or(highest, |by| by.max(highest)));
            }
            Some(highest) if highest == self.term => {
                self.until = self.until.max(begun_at.saturating_add(self.lease));
            }
            // Our own claim is gone: somebody emptied the store. Such a look proves nothing.
            Some(_) | None => {}
        }
    }

    /// Whether promoting is allowed now.
    pub fn standing(&self, now: Duration) -> Standing {
        #[cfg(feature = "planted-bugs")]
        if super::planted::serves_old_terms() {
            return Standing::Holds;
        }
        if let Some(by) = self.superseded_by {
            return Standing::Superseded { by };
        }
        if now >= self.from && now < self.until {
            Standing::Holds
        } else {
            Standing::Waits
        }
    }

    /// The time at which to look again: a third of a lease after the last good look.
    pub fn look_again_at(&self) -> Duration {
        self.until.saturating_sub(self.lease / 3 * 2)
    }
}
