//! How often a task may fail, by kind of failure. Counters are state and survive a restart.

use std::time::Duration;

use espalier_proto::task::FailureKind;
use serde::{Deserialize, Serialize};

/// Failures of one task so far, each kind counted apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    /// The input was wrong.
    pub invalid: u32,
    /// The executor reported an error.
    pub error: u32,
    /// Memory ran out.
    pub out_of_memory: u32,
    /// The child ended without an answer.
    pub crashed: u32,
    /// No progress within the deadline.
    pub hung: u32,
    /// Measurements scattered too widely.
    pub too_noisy: u32,
    /// Artifacts could not be stored or read for now.
    #[serde(default)]
    pub storage: u32,
    /// A rank told that another one is gone.
    #[serde(default)]
    pub rank_lost: u32,
    /// The worker was lost.
    pub worker_lost: u32,
    /// The worker gave it up by itself, as when it drains. Free.
    #[serde(default)]
    pub handed_back: u32,
}

impl Failures {
    /// All but lost workers and what was handed back, which are nobody's fault.
    pub fn own(&self) -> u32 {
        [
            self.invalid,
            self.error,
            self.out_of_memory,
            self.crashed,
            self.hung,
            self.too_noisy,
            self.storage,
            self.rank_lost,
        ]
        .iter()
        .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Failures of this kind so far.
    pub fn of(&self, kind: FailureKind) -> u32 {
        match kind {
            FailureKind::Invalid => self.invalid,
            FailureKind::Error => self.error,
            FailureKind::OutOfMemory => self.out_of_memory,
            FailureKind::Crashed => self.crashed,
            FailureKind::Hung => self.hung,
            FailureKind::TooNoisy => self.too_noisy,
            FailureKind::Storage => self.storage,
            FailureKind::RankLost => self.rank_lost,
        }
    }

    /// Whether no counter is below the earlier one.
    pub fn covers(&self, earlier: &Self) -> bool {
        self.invalid >= earlier.invalid
            && self.error >= earlier.error
            && self.out_of_memory >= earlier.out_of_memory
            && self.crashed >= earlier.crashed
            && self.hung >= earlier.hung
            && self.too_noisy >= earlier.too_noisy
            && self.storage >= earlier.storage
            && self.rank_lost >= earlier.rank_lost
            && self.worker_lost >= earlier.worker_lost
            && self.handed_back >= earlier.handed_back
    }

    pub(super) fn count(&mut self, kind: FailureKind) {
        let counter = match kind {
            FailureKind::Invalid => &mut self.invalid,
            FailureKind::Error => &mut self.error,
            FailureKind::OutOfMemory => &mut self.out_of_memory,
            FailureKind::Crashed => &mut self.crashed,
            FailureKind::Hung => &mut self.hung,
            FailureKind::TooNoisy => &mut self.too_noisy,
            FailureKind::Storage => &mut self.storage,
            FailureKind::RankLost => &mut self.rank_lost,
        };
        *counter = counter.saturating_add(1);
    }
}

/// Retries a task has for each kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget;

impl Budget {
    /// Lost workers a task outlives.
    pub const WORKER_LOST: u32 = 8;

    /// Retries after failures of this kind.
    pub fn retries(kind: FailureKind) -> u32 {
        match kind {
            FailureKind::Invalid => 0,
            FailureKind::OutOfMemory => 1,
            FailureKind::Error | FailureKind::Crashed | FailureKind::Hung | FailureKind::TooNoisy => 2,
            // As long as it takes: what was computed so far is worth more than an early end.
            FailureKind::Storage => u32::MAX,
            // The host of a rank that says nothing any more is lost like a worker.
            FailureKind::RankLost => Self::WORKER_LOST,
        }
    }

    /// Whether a task with these failures may be tried again after one more of this kind.
    pub fn allows(failures: &Failures, kind: FailureKind) -> bool {
        failures.of(kind) < Self::retries(kind)
    }

    /// Whether a task with these failures may be tried again after losing one more worker.
    pub fn allows_loss(failures: &Failures) -> bool {
        failures.worker_lost < Self::WORKER_LOST
    }
}

/// How long a task rests after its newest failure: a second, doubling with each failure up to a minute.
/// Nothing after a lost worker.
pub fn retry_pause(failures: &Failures) -> Duration {
    pause(failures.own())
}

/// How long a task rests after it was handed back: nothing the first times, as when workers drain one after another,
/// then as after failures, so that a worker that takes nothing cannot keep the coordinator busy.
pub fn hand_back_pause(failures: &Failures) -> Duration {
    /// Hand-backs that cost no pause.
    const FREE: u32 = 4;
    pause(failures.handed_back.saturating_sub(FREE))
}

fn pause(times: u32) -> Duration {
    const LONGEST: Duration = Duration::from_secs(60);
    match times.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => {
            let factor = 1_u32.checked_shl(doublings.min(6)).unwrap_or(u32::MAX);
            Duration::from_secs(1).saturating_mul(factor).min(LONGEST)
        }
    }
}

/// Whether a failure speaks against the task or the worker: it is neither the input nor the measurement,
/// nor what holds artifacts, nor another rank.
pub(super) fn is_evidence(kind: FailureKind) -> bool {
    match kind {
        FailureKind::Error | FailureKind::Crashed | FailureKind::Hung | FailureKind::OutOfMemory => true,
        FailureKind::Invalid | FailureKind::TooNoisy | FailureKind::Storage | FailureKind::RankLost => false,
    }
}
