//! The words that may be labels. There are few, and all are known beforehand.

use espalier_proto::task::FailureKind;

use crate::scheduler::Event;

/// Kinds of task; the last stands for all others.
pub const KIND_NAMES: [&str; 13] = [
    "ingest",
    "profile",
    "calibrate",
    "sort",
    "score",
    "depth_order",
    "rank",
    "check",
    "recover",
    "evaluate",
    "export",
    "verify",
    "other",
];
/// How many kinds there are.
pub const KINDS: usize = KIND_NAMES.len();

/// Where a kind's counters are.
pub fn kind_index(kind: &str) -> usize {
    let found = KIND_NAMES.iter().position(|name| *name == kind);
    found.unwrap_or(KINDS - 1)
}

/// What became of a try at a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It was handed to a device.
    Started,
    /// It ended well.
    Completed,
    /// It failed.
    Failed,
    /// It went down with its worker.
    Lost,
    /// It was cancelled, or handed back.
    Stopped,
}

/// The names of [`End`], in its order.
pub const STATE_NAMES: [&str; STATES] = ["started", "completed", "failed", "lost", "stopped"];
/// How many there are.
pub const STATES: usize = 5;

impl End {
    /// Where its counter is.
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The names of kinds of failure.
pub const FAILURE_NAMES: [&str; FAILURES] = [
    "invalid",
    "error",
    "out_of_memory",
    "crashed",
    "hung",
    "too_noisy",
    "storage",
    "rank_lost",
];
/// How many there are.
pub const FAILURES: usize = 8;

/// Where a failure's counter is.
pub fn failure_index(kind: FailureKind) -> usize {
    match kind {
        FailureKind::Invalid => 0,
        FailureKind::Error => 1,
        FailureKind::OutOfMemory => 2,
        FailureKind::Crashed => 3,
        FailureKind::Hung => 4,
        FailureKind::TooNoisy => 5,
        FailureKind::Storage => 6,
        FailureKind::RankLost => 7,
    }
}

/// Why a lease ended without its worker's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// Nothing was heard from the worker for too long.
    WorkerLost,
    /// The worker was started anew.
    WorkerRestarted,
}

impl Expiry {
    /// Every reason.
    pub const ALL: [Self; 2] = [Self::WorkerLost, Self::WorkerRestarted];

    /// Why leases end in a decision: a worker that joins in it was started anew.
    pub fn of(decision: &[Event]) -> Self {
        let joins = |event: &Event| matches!(event, Event::WorkerJoined { .. });
        if decision.iter().any(joins) {
            Self::WorkerRestarted
        } else {
            Self::WorkerLost
        }
    }

    /// Where its counter is.
    pub fn index(self) -> usize {
        self as usize
    }

    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::WorkerLost => "worker_lost",
            Self::WorkerRestarted => "worker_restarted",
        }
    }
}

/// Where a worker stands.
pub const WORKER_STATES: [&str; 6] = ["ready", "away", "cordoned", "leaving", "lost", "left"];
