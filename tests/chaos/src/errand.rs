//! What a stand-in task does. It travels as the parent of a real `calibrate` task, so that everything between
//! the planner and the child is what it is in production.

use anyhow::{Context, Result, bail};
use espalier_proto::task::{ArtifactId, Calibrate, ParentRef, Shard, TaskOutput, TaskSpec};
use serde::{Deserialize, Serialize};

/// How an errand ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// With an output.
    Well,
    /// With the death of the child.
    Crash,
}

/// One errand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errand {
    /// Unique within a run.
    pub name: String,
    /// How long it takes.
    pub millis: u64,
    /// Whether it keeps every processor busy all that time.
    pub busy: bool,
    /// Whether its child starts a process of its own for it, which only the child's end or a kill of its group ends.
    pub brings_process: bool,
    /// How it ends.
    pub ending: Ending,
}

impl Errand {
    /// As the spec of a task.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn to_spec(&self) -> Result<TaskSpec> {
        let nothing = ArtifactId("0".repeat(64));
        Ok(TaskSpec::Calibrate(Calibrate {
            parent: ParentRef {
                source: serde_json::to_string(self)?,
                fingerprint: "errand".to_owned(),
                permutation: None,
            },
            shard: Shard {
                artifact: nothing,
                sequences: 1,
                sequence_tokens: 1,
            },
        }))
    }

    /// Out of the spec of a task.
    ///
    /// # Errors
    /// When the task is not an errand.
    pub fn from_spec(spec: &TaskSpec) -> Result<Self> {
        let TaskSpec::Calibrate(task) = spec else {
            bail!("a {} task is no errand", spec.kind());
        };
        serde_json::from_str(&task.parent.source).context("the task is no errand")
    }

    /// What it finds out.
    pub fn output(&self) -> TaskOutput {
        TaskOutput::Calibrate {
            importance: ArtifactId("0".repeat(64)),
            streamed: false,
        }
    }
}
