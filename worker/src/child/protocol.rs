//! What an agent and its device child say to each other: one JSON object a line, requests on the child's
//! standard input, replies on its standard output. Nothing else is ever written there; logs go to standard error.
//! This is the one definition: whatever stands in for a child speaks it too.

use espalier_proto::task::{Failure, Progress, TaskOutput, TaskSpec};
use serde::{Deserialize, Serialize};

/// From the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request", deny_unknown_fields)]
pub enum Request {
    /// Run this; only sent when the child is idle.
    Run(Box<Order>),
    /// Every rank of the attempt's gang stands ready: begin.
    Release {
        /// Which.
        attempt: u64,
        /// Names the communicator.
        communicator: String,
        /// Addresses of all ranks, in their order.
        addresses: Vec<String>,
    },
    /// Stop this attempt, if it still runs, at its next chance.
    Cancel {
        /// Which.
        attempt: u64,
        /// Whether it should first leave what the next attempt can go on from.
        #[serde(default)]
        checkpoint: bool,
    },
    /// End now.
    Shutdown,
}

/// An attempt to run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// Tells attempts apart.
    pub attempt: u64,
    /// Its job, for the log.
    #[serde(default)]
    pub job: String,
    /// Its task, for the log.
    #[serde(default)]
    pub task: u64,
    /// W3C `traceparent` of what it is part of; empty when there is none.
    #[serde(default)]
    pub traceparent: String,
    /// Location of the artifact store.
    pub artifact_store: String,
    /// Its id; empty when the coordinator does not say.
    #[serde(default)]
    pub artifact_store_id: String,
    /// The task's work.
    pub spec: TaskSpec,
    /// Its place in a gang. With one, it makes itself reachable, says so, and waits for the release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<Place>,
}

/// A rank's place in its gang.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Counts the formations of the task's gang, from 1.
    pub generation: u64,
    /// This rank, from 0.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// The host name or address under which other hosts reach this one.
    pub host: String,
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
    /// The attempt works on, and has no progress to tell.
    Alive {
        /// Which.
        attempt: u64,
    },
    /// The attempt, a rank of a gang, stands ready.
    Prepared {
        /// Which.
        attempt: u64,
        /// Where the other ranks reach it: `host:port`.
        address: String,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_cancel_of_the_version_before_asks_for_no_checkpoint() {
        let request: Request = serde_json::from_str(r#"{"request":"cancel","attempt":3}"#).unwrap();
        assert_eq!(
            request,
            Request::Cancel {
                attempt: 3,
                checkpoint: false
            }
        );
    }
}
