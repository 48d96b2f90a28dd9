//! Why an attempt failed, and what that means for trying again.

use serde::{Deserialize, Serialize};

/// Why an attempt failed, as far as retrying goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The input is wrong; no retry can mend it.
    Invalid,
    /// The executor reported an error.
    Error,
    /// The device or the host ran out of memory.
    OutOfMemory,
    /// The child ended without an answer.
    Crashed,
    /// No progress within the deadline.
    Hung,
    /// Measurements scattered too widely to tell.
    TooNoisy,
    /// What holds artifacts takes or gives nothing for now: it is full, read-only or away. Nobody's fault.
    Storage,
    /// Another rank of the gang is gone or silent. Whose fault that is, its own attempt tells.
    RankLost,
}

/// Why an attempt failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// As far as retrying goes.
    pub kind: FailureKind,
    /// One clear line.
    pub message: String,
}
