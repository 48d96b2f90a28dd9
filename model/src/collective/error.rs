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
    /// It had done all its work, and others still wanted something of it.
    Left,
}

impl fmt::Display for Loss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disconnected { reason } => write!(formatter, "its connection broke: {reason}"),
            Self::Silent { silence } => write!(formatter, "nothing was heard of it for {silence:.1?}"),
            Self::Aborted { reason } => write!(formatter, "it gave up: {reason}"),
            Self::Damaged { reason } => write!(formatter, "it sent nonsense: {reason}"),
            Self::Left => formatter.write_str("it had left, its own work done"),
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
    /// A rank that the others gave up, by their word.
    #[error("the other ranks have given this one up: {how}")]
    GivenUp {
        /// Why.
        how: Loss,
    },
    /// A rank that the others must have given up meanwhile.
    #[error("this process stood still for {absence:.1?}: the other ranks have gone on without it")]
    Away {
        /// For how long nothing of it ran.
        absence: Duration,
    },
    /// Ranks that did not come together.
    #[error("rank {rank} waited {waited:.1?} for {missing}")]
    NotFormed {
        /// Which rank waited.
        rank: usize,
        /// How long.
        waited: Duration,
        /// Which ranks are missing, where they should be, and what is known of them.
        missing: String,
    },
    /// A rank outside its own gang.
    #[error("rank {rank} has no address among {size}")]
    Address {
        /// As given.
        rank: usize,
        /// Addresses given.
        size: usize,
    },
    /// More bytes than ranks exchange at a time.
    #[error("{bytes} bytes are too many to exchange at once: at most {most}")]
    TooLong {
        /// As given.
        bytes: usize,
        /// What would be right.
        most: usize,
    },
    /// A device that failed, or NCCL on it.
    #[error("this rank's device cannot go on: {reason}")]
    Device {
        /// What it said.
        reason: String,
    },
    /// A thread or a socket that the system does not give.
    #[error("{what}: {reason}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
    /// A call after this rank has left.
    #[error("this rank has left the gang")]
    Closed,
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
