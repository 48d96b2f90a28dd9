//! What happened: the only thing that changes the state, and what the journal holds.
//!
//! Names and fields are a file format: add, never rename. The journal's schema version goes up when an
//! old reader would misread.

use espalier_proto::task::Failure;
use serde::{Deserialize, Serialize};

use super::{AttemptId, DeviceInfo, Epoch, JobId, Payload, TaskId, Term, WorkerId};

/// A stage as it was planned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageRecord {
    /// Unique within the job.
    pub name: String,
    /// Its executor.
    pub kind: String,
    /// JSON of what was decided before it.
    pub decision: Option<Payload>,
    /// The same for people.
    pub note: String,
    /// Its tasks.
    pub tasks: Vec<TaskRecord>,
}

/// A task as it was planned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRecord {
    /// Its id.
    pub id: TaskId,
    /// Names it within its stage.
    pub name: String,
    /// JSON of its spec.
    pub payload: Payload,
    /// Whether nothing else may run on its host meanwhile.
    pub exclusive: bool,
}

/// Something that happened. Times are milliseconds since 1970, for display.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum Event {
    /// A coordinator took over.
    TermBegan { term: Term },
    /// A job was taken.
    JobSubmitted {
        job: JobId,
        request_id: Option<String>,
        spec: Payload,
        parent: String,
        output: String,
        device_kind: String,
        at: i64,
    },
    /// Stages became ready, after the planner had seen `revision` results.
    StagesPlanned {
        job: JobId,
        revision: u64,
        stages: Vec<StageRecord>,
    },
    /// The outcome is known and will be written.
    OutcomeReached { job: JobId, outcome: Payload },
    /// The outcome lies in its directory.
    JobSucceeded { job: JobId, at: i64 },
    /// The job ended without an outcome.
    JobFailed { job: JobId, message: String, at: i64 },
    /// A user ended the job.
    JobCancelled { job: JobId, reason: String, at: i64 },
    /// What an ended job had half-written is gone.
    PartialRemoved { job: JobId },
    /// A worker came, or came back as a new incarnation.
    WorkerJoined {
        worker: WorkerId,
        name: String,
        epoch: Epoch,
        host: String,
        devices: Vec<DeviceInfo>,
    },
    /// A worker that was lost or leaving came back as the same incarnation.
    WorkerReturned { worker: WorkerId },
    /// A worker gets nothing more.
    WorkerLeaving { worker: WorkerId },
    /// A worker was given up.
    WorkerLost { worker: WorkerId },
    /// A task was handed to a device.
    AttemptStarted {
        attempt: AttemptId,
        task: TaskId,
        worker: WorkerId,
        device: String,
        at: i64,
    },
    /// A result was taken.
    AttemptCompleted {
        attempt: AttemptId,
        output: Payload,
        at: i64,
    },
    /// A failure was taken; with `retry` the task waits again.
    AttemptFailed {
        attempt: AttemptId,
        failure: Failure,
        retry: bool,
        at: i64,
    },
    /// The attempt went down with its worker; with `retry` the task waits again.
    AttemptLost {
        attempt: AttemptId,
        retry: bool,
        at: i64,
    },
    /// An attempt of an ended job is over.
    AttemptStopped { attempt: AttemptId },
}
