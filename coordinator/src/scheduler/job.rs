//! Jobs and their stages.

use serde::{Deserialize, Serialize};

use super::{JobId, Name, Payload, TaskId};

/// A user's request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// The id the submission carried.
    pub request_id: Option<String>,
    /// JSON of the spec.
    pub spec: Payload,
    /// The parent, for display.
    pub parent: String,
    /// The directory of the outcome.
    pub output: String,
    /// The kind of device its tasks need.
    pub device_kind: Name,
    /// Higher goes first.
    #[serde(default)]
    pub priority: i32,
    /// Where it stands.
    pub phase: JobPhase,
    /// Held by a user: nothing more of it starts.
    #[serde(default)]
    pub paused: Option<Pause>,
    /// How often a user let it go on after it had failed, the newest last.
    #[serde(default)]
    pub retries: Vec<Retry>,
    /// The stages known so far.
    pub stages: Vec<Stage>,
    /// Stages that ended, one for the submission and one for each retry: what a planner can know.
    pub results: u64,
    /// What the planner had seen when it last answered, or what there was when the job was last retried: an answer
    /// to no more than that is no longer one.
    pub planned: u64,
    /// Milliseconds since 1970.
    pub submitted_at: i64,
    /// When its first task started.
    pub started_at: Option<i64>,
}

/// A user's hold on a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// One line.
    pub reason: String,
    /// Milliseconds since 1970.
    pub at: i64,
}

/// A user let a failed job go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// So that a retry sent twice is one.
    pub request_id: Option<String>,
    /// Milliseconds since 1970.
    pub at: i64,
}

impl Job {
    /// Whether the planner has to be asked.
    pub fn wants_plan(&self) -> bool {
        matches!(self.phase, JobPhase::Active) && self.planned < self.results
    }

    /// Whether what it half-wrote has to go, once none of its attempts runs.
    pub fn wants_removal(&self) -> bool {
        match self.phase {
            JobPhase::Failed { removed, .. } | JobPhase::Cancelled { removed, .. } => !removed,
            JobPhase::Active | JobPhase::Finishing { .. } | JobPhase::Succeeded { .. } => false,
        }
    }
}

/// Where a job stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobPhase {
    /// Its stages run.
    Active,
    /// Its outcome is known and being written.
    Finishing {
        /// JSON of the outcome.
        outcome: Payload,
    },
    /// Its outcome is in place.
    Succeeded {
        /// JSON of the outcome.
        outcome: Payload,
        /// Milliseconds since 1970.
        at: i64,
    },
    /// It ended without.
    Failed {
        /// Why.
        message: String,
        /// Milliseconds since 1970.
        at: i64,
        /// Whether what it had half-written is gone.
        removed: bool,
    },
    /// A user ended it.
    Cancelled {
        /// Why.
        reason: String,
        /// Milliseconds since 1970.
        at: i64,
        /// Whether what it had half-written is gone.
        removed: bool,
    },
}

impl JobPhase {
    /// Whether the job has ended.
    pub fn is_terminal(&self) -> bool {
        match self {
            Self::Active | Self::Finishing { .. } => false,
            Self::Succeeded { .. } | Self::Failed { .. } | Self::Cancelled { .. } => true,
        }
    }

    /// One word, past tense for those that have ended.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Active => "started",
            Self::Finishing { .. } => "reached its outcome",
            Self::Succeeded { .. } => "succeeded",
            Self::Failed { .. } => "failed",
            Self::Cancelled { .. } => "been cancelled",
        }
    }
}

/// A step of a job's pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Unique within the job.
    pub name: String,
    /// Its executor.
    pub kind: Name,
    /// JSON of what was decided before it.
    pub decision: Option<Payload>,
    /// The same for people.
    pub note: String,
    /// Whether what it makes lies in the job's output, and so goes when the job fails.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_output: bool,
    /// Its tasks.
    pub tasks: Vec<TaskId>,
    /// How many of them are done.
    pub done: usize,
    /// When its first task started, milliseconds since 1970.
    pub started_at: Option<i64>,
    /// When its last task ended.
    pub finished_at: Option<i64>,
    /// Milliseconds between failures of its job and the retries after them, since it started.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rested_ms: i64,
}

impl Stage {
    /// Milliseconds that it took up to `now`, or to its end; 0 before it starts. What passed between a failure of its job
    /// and the retry is not counted.
    pub fn elapsed_ms(&self, now: i64) -> i64 {
        let ended = self.finished_at.unwrap_or(now);
        self.started_at
            .map_or(0, |start| (ended - start - self.rested_ms).max(0))
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
fn is_zero(value: &i64) -> bool {
    *value == 0
}

/// How an archived job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// With its outcome in place.
    Succeeded,
    /// Without.
    Failed,
    /// By a user.
    Cancelled,
}

impl Ended {
    /// The word of [`JobPhase::name`].
    pub fn name(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "been cancelled",
        }
    }
}

/// What is left of a job whose archive is durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Its id.
    pub id: JobId,
    /// The id the submission carried.
    pub request_id: Option<String>,
    /// Tells a submission sent twice from another with the same request id.
    pub spec_digest: u64,
    /// The parent, for display.
    pub parent: String,
    /// The directory of the outcome.
    pub output: String,
    /// Higher went first.
    pub priority: i32,
    /// How it ended.
    pub ended: Ended,
    /// Why it failed or was cancelled; empty when it succeeded.
    pub message: String,
    /// Tasks it had.
    pub tasks: u64,
    /// Those that ended well.
    pub tasks_done: u64,
    /// Milliseconds since 1970.
    pub submitted_at: i64,
    /// When its first task started.
    pub started_at: Option<i64>,
    /// When it ended.
    pub ended_at: i64,
}
