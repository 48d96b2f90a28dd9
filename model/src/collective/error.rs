//! What can go wrong between ranks. Every wait of every rank gets the same, so these can be copied.

use std::fmt;
use std::time::Duration;

/// How a rank was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loss {
    /// Its connection ended or broke: its process ended, most likely.
    Disconnected {
        /// What the system said.
        reason: String,
    },
    /// Nothing was heard of it: stopped, or cut off.
    Silent {
        /// For how long.
        silence: Duration,
    },
    /// It told the others that it gives up.
    Aborted {
        /// Why, by its own word.
        reason: String,
    },
    /// It sent what no rank of this version sends.
    Damaged {
        /// What was wrong.
        reason: String,
    },
}

impl fmt::Display for Loss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disconnected { reason } => write!(formatter, "its connection broke: {reason}"),
            Self::Silent { silence } => write!(formatter, "nothing was heard of it for {silence:.1?}"),
            Self::Aborted { reason } => write!(formatter, "it gave up: {reason}"),
            Self::Damaged { reason } => write!(formatter, "it sent nonsense: {reason}"),
        }
    }
}

/// What can go wrong between ranks.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A rank that is gone, without which no other can go on.
    #[error("rank {rank} at {address} was lost: {how}")]
    RankLost {
        /// Its number in the gang.
        rank: usize,
        /// Where it was reached.
        address: String,
        /// How it was lost.
        how: Loss,
    },
    /// This rank gave up.
    #[error("this rank has aborted the gang")]
    Aborted,
    /// A call that did not end in time.
    #[error("{operation} did not end within {waited:.1?}: another rank did not make the same call, or hangs")]
    Deadline {
        /// What was waited for.
        operation: &'static str,
        /// How long.
        waited: Duration,
    },
    /// Ranks that do not do the same.
    #[error("the ranks' calls do not fit together: rank {rank} calls {found} where another calls {expected}")]
    Mismatch {
        /// The rank that noticed, or was noticed.
        rank: usize,
        /// What the other called.
        expected: String,
        /// What this one called.
        found: String,
    },
    /// A set of ranks that no communicator can have.
    #[error(
        "rank {rank} of {size} cannot form a communicator of ranks {ranks:?}: it must be among them, each once"
    )]
    Ranks {
        /// Which rank asked.
        rank: usize,
        /// Ranks of the gang.
        size: usize,
        /// As given.
        ranks: Vec<usize>,
    },
    /// A rank that is not there.
    #[error("{operation}: rank {rank} is none of the other ranks of {size}")]
    NoSuchRank {
        /// What was asked for.
        operation: &'static str,
        /// As given.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
    },
}
