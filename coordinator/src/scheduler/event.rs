//! What happened: the only thing that changes the state, and what the journal holds.
//!
//! Names and fields are a file format: add, never rename. The journal's schema version goes up when an
//! old reader would misread.

use espalier_proto::task::Failure;
use serde::{Deserialize, Serialize};

use super::{AttemptId, DeviceInfo, Epoch, JobId, Name, Needs, Payload, TaskId, Term, Token, WorkerId};

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
    /// Whether what it makes lies in the job's output.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_output: bool,
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
    /// What it runs on.
    #[serde(default, skip_serializing_if = "Needs::is_default")]
    pub needs: Needs,
}

/// A rank's attempt and where it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRecord {
    /// Its attempt.
    pub attempt: AttemptId,
    /// Where it runs.
    pub worker: WorkerId,
    /// On which of that worker's devices.
    pub device: Name,
}

/// Something that happened. Times are milliseconds since 1970, for display. Events of an attempt name its
/// task too; 0 in journals of builds before.
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
        #[serde(default)]
        priority: i32,
        at: i64,
    },
    /// Nothing more of the job starts.
    JobPaused { job: JobId, reason: String, at: i64 },
    /// A paused job goes on.
    JobResumed { job: JobId, at: i64 },
    /// A failed job goes on: what is done stays done, budgets begin again, and stages that wrote to its
    /// output are forgotten, to be planned anew, and so are those named in `anew`.
    JobRetried {
        job: JobId,
        request_id: Option<String>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        anew: Vec<String>,
        at: i64,
    },
    /// Stages became ready, after the planner had seen `revision` results.
    StagesPlanned {
        job: JobId,
        revision: u64,
        stages: Vec<StageRecord>,
        #[serde(default)]
        at: i64,
    },
    /// The outcome is known and will be written.
    OutcomeReached {
        job: JobId,
        outcome: Payload,
        #[serde(default)]
        at: i64,
    },
    /// The outcome lies in its directory.
    JobSucceeded { job: JobId, at: i64 },
    /// The job ended without an outcome.
    JobFailed { job: JobId, message: String, at: i64 },
    /// A user ended the job.
    JobCancelled { job: JobId, reason: String, at: i64 },
    /// What an ended job had half-written is gone.
    PartialRemoved { job: JobId },
    /// The archive of an ended job is durable: its tasks leave the state.
    JobArchived { job: JobId, at: i64 },
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
    /// A worker gets nothing more: it wants to leave, or a user asked it to, with a reason.
    WorkerLeaving {
        worker: WorkerId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drain: Option<String>,
    },
    /// A worker was given up.
    WorkerLost { worker: WorkerId },
    /// A worker that was leaving and ran nothing more is gone.
    WorkerLeft { worker: WorkerId },
    /// A worker that was gone for long is no longer remembered.
    WorkerForgotten { worker: WorkerId },
    /// A worker gets nothing more until it is uncordoned.
    WorkerCordoned {
        worker: WorkerId,
        reason: String,
        by_rule: bool,
        at: i64,
    },
    /// A worker gets work again.
    WorkerUncordoned { worker: WorkerId, at: i64 },
    /// A user wants a worker's children replaced.
    WorkerRestartAsked {
        worker: WorkerId,
        reason: String,
        at: i64,
    },
    /// A task was handed to a device.
    AttemptStarted {
        attempt: AttemptId,
        task: TaskId,
        worker: WorkerId,
        device: Name,
        at: i64,
    },
    /// A result was taken: the task is done.
    AttemptCompleted {
        attempt: AttemptId,
        #[serde(default)]
        task: TaskId,
        output: Payload,
        at: i64,
    },
    /// A failure was taken; with `retry` the task waits again, of a gang once all its ranks have stopped.
    AttemptFailed {
        attempt: AttemptId,
        #[serde(default)]
        task: TaskId,
        failure: Failure,
        retry: bool,
        at: i64,
    },
    /// The attempt went down with its worker; `retry` as for a failure.
    AttemptLost {
        attempt: AttemptId,
        #[serde(default)]
        task: TaskId,
        retry: bool,
        at: i64,
    },
    /// The worker gave the attempt up by itself, as when it drains: nobody's fault, the task waits again.
    AttemptHandedBack {
        attempt: AttemptId,
        task: TaskId,
        at: i64,
    },
    /// A cancelled attempt is over: of an ended job, or of a gang that another rank ended.
    AttemptStopped {
        attempt: AttemptId,
        #[serde(default)]
        task: TaskId,
        #[serde(default)]
        at: i64,
    },
    /// A task was handed to as many devices as it has ranks, in their order.
    GangFormed {
        task: TaskId,
        generation: u64,
        ranks: Vec<RankRecord>,
        at: i64,
    },
    /// A rank can be reached.
    RankPrepared {
        attempt: AttemptId,
        task: TaskId,
        address: String,
    },
    /// Every rank can be reached, and begins.
    GangReleased {
        task: TaskId,
        generation: u64,
        addresses: Vec<String>,
        #[serde(default)]
        token: Token,
        #[serde(default)]
        at: i64,
    },
    /// Ranks were not ready in time: it counts as a hang, every rank is to stop, `retry` as for a failure.
    GangLate {
        task: TaskId,
        generation: u64,
        retry: bool,
        at: i64,
    },
    /// An attempt at a task that has failed begins further on than any attempt before, as from a newer checkpoint: what
    /// stood in the way is behind, and its budgets begin again. `done`: where it begins, in units of its progress.
    TaskWentOn {
        task: TaskId,
        attempt: AttemptId,
        done: u64,
        at: i64,
    },
    /// A gang that is ending does not wait for this rank any more, of which another told that it is gone and whose worker's
    /// connection is closed. It keeps its device until its worker says that it has stopped, or is given up.
    RankLetGo {
        attempt: AttemptId,
        task: TaskId,
        at: i64,
    },
    /// A rank ended well; rank 0's output is the task's, the others' are empty.
    RankCompleted {
        attempt: AttemptId,
        task: TaskId,
        output: Payload,
        at: i64,
    },
    /// No rank of the generation holds a device any more. `completed`: all ended well and the task is done;
    /// else it waits again.
    GangEnded {
        task: TaskId,
        generation: u64,
        completed: bool,
        at: i64,
    },
}
