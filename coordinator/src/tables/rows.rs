//! What the tables hold. Stored as JSON: add fields with defaults, or raise the schema.

use espalier_proto::task::ArtifactId;
use espalier_search::{CostKey, CostRow, Score};
use serde::{Deserialize, Serialize};

use crate::scheduler::{AttemptId, JobId, TaskId};

/// Tasks of a stage whose ids follow each other, by the first of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRange {
    /// The last of them.
    pub last: TaskId,
    /// Their job.
    pub job: JobId,
    /// Their executor.
    pub kind: String,
}

/// An event's place in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Its frame.
    pub frame: u64,
    /// Its place in the frame.
    pub index: u64,
}

/// One try at a task, or at a rank of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptRow {
    /// Its id.
    pub attempt: AttemptId,
    /// Its task.
    pub task: TaskId,
    /// The worker's name.
    pub worker: String,
    /// The device of that worker.
    pub device: String,
    /// Milliseconds since 1970.
    pub started_unix_ms: i64,
    /// The same, when it ended; none while it runs, or when nobody noted it.
    pub ended_unix_ms: Option<i64>,
    /// How it went.
    pub outcome: AttemptOutcome,
    /// Why it failed; one line, empty otherwise.
    pub message: String,
    /// Where the journal says that it started. That is no row of the job's events then: most of them would be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_in: Option<Place>,
    /// The same of its completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_in: Option<Place>,
}

/// How an attempt went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptOutcome {
    /// It still runs.
    Running,
    /// It ended well.
    Completed,
    /// It failed.
    Failed,
    /// It went down with its worker.
    Lost,
    /// Its worker gave it up by itself.
    HandedBack,
    /// It was told to stop.
    Stopped,
}

impl AttemptOutcome {
    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Lost => "lost",
            Self::HandedBack => "handed_back",
            Self::Stopped => "stopped",
        }
    }
}

/// Something that happened to a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRow {
    /// The journal's frame that says so.
    pub frame: u64,
    /// Its place in the frame.
    #[serde(default)]
    pub index: u64,
    /// Milliseconds since 1970; 0 when nobody noted it.
    pub unix_ms: i64,
    /// The journal's own word: `attempt_started`.
    pub kind: String,
    /// The task it was about; 0 for none.
    pub task: u64,
    /// The attempt; 0 for none.
    pub attempt: u64,
    /// The worker's name; empty for none.
    pub worker: String,
    /// One line for people.
    pub message: String,
}

/// A measured row of a cost table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostEntry {
    /// The task that measured it.
    pub task: TaskId,
    /// What it is true for.
    pub key: CostKey,
    /// What was measured.
    pub row: CostRow,
}

/// A score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScoreEntry {
    /// The task that found it.
    pub task: TaskId,
    /// What was found.
    pub score: Score,
}

/// Importance sums of one shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportanceRow {
    /// The task that summed them.
    pub task: TaskId,
    /// Where they lie.
    pub artifact: ArtifactId,
}

/// What was decided before a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionRow {
    /// The stage.
    pub stage: String,
    /// One line for people.
    pub note: String,
    /// JSON of the decision.
    pub decision: String,
}
