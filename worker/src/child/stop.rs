//! Which attempt was asked to stop, and how: written by the thread that reads requests, read by the one that
//! works.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::executor::Stop;

/// No attempt has this number.
const NONE: u64 = u64::MAX;

/// The last attempt asked to stop in each way.
#[derive(Debug)]
pub(super) struct Stops {
    now: AtomicU64,
    after_checkpoint: AtomicU64,
}

impl Default for Stops {
    fn default() -> Self {
        Self {
            now: AtomicU64::new(NONE),
            after_checkpoint: AtomicU64::new(NONE),
        }
    }
}

impl Stops {
    /// Asks an attempt to stop.
    pub(super) fn ask(&self, attempt: u64, checkpoint: bool) {
        let place = if checkpoint {
            &self.after_checkpoint
        } else {
            &self.now
        };
        place.store(attempt, Ordering::SeqCst);
    }

    /// Takes back what was asked of the number's last bearer.
    pub(super) fn forget(&self, attempt: u64) {
        for place in [&self.now, &self.after_checkpoint] {
            // Another number in it is nobody's business here.
            let _ = place.compare_exchange(attempt, NONE, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// How an attempt should stop; a stop at once goes before one that waits for a checkpoint.
    pub(super) fn asked(&self, attempt: u64) -> Option<Stop> {
        let is_asked = |place: &AtomicU64| place.load(Ordering::SeqCst) == attempt;
        if is_asked(&self.now) {
            Some(Stop::Now)
        } else if is_asked(&self.after_checkpoint) {
            Some(Stop::AfterCheckpoint)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_at_once_goes_before_one_that_waits_and_both_end_with_their_attempt() {
        let stops = Stops::default();
        assert_eq!(stops.asked(1), None);
        stops.ask(1, true);
        assert_eq!(stops.asked(1), Some(Stop::AfterCheckpoint));
        assert_eq!(stops.asked(2), None);
        stops.ask(1, false);
        assert_eq!(stops.asked(1), Some(Stop::Now));
        stops.forget(1);
        assert_eq!(stops.asked(1), None);
    }
}
