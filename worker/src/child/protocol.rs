//! What an agent and its device child say to each other: one JSON object a line, requests on the child's
//! standard input, replies on its standard output. Nothing else is ever written there; logs go to standard error.

use espalier_proto::task::{Failure, Progress, TaskOutput, TaskSpec};
use serde::{Deserialize, Serialize};

/// From the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request", deny_unknown_fields)]
pub enum Request {
    /// Run this; only sent when the child is idle.
    Run {
        /// Tells attempts apart.
        attempt: u64,
        /// Location of the artifact store.
        artifact_store: String,
        /// The task.
        spec: Box<TaskSpec>,
    },
    /// Stop this attempt, if it still runs, at its next chance.
    Cancel {
        /// Which.
        attempt: u64,
    },
    /// End now.
    Shutdown,
}

/// From the child.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply", deny_unknown_fields)]
pub enum Reply {
    /// How far the attempt has come.
    Progress {
        /// Which.
        attempt: u64,
        /// How far.
        progress: Progress,
    },
    /// The attempt ended well.
    Output {
        /// Which.
        attempt: u64,
        /// What it found out.
        output: Box<TaskOutput>,
    },
    /// The attempt failed.
    Failure {
        /// Which.
        attempt: u64,
        /// Why.
        failure: Failure,
    },
    /// The attempt stopped because it was cancelled.
    Stopped {
        /// Which.
        attempt: u64,
    },
}
