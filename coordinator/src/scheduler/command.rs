//! What the state machine can be asked.

use std::collections::BTreeSet;

use espalier_proto::task::Failure;

use super::{AttemptId, DeviceInfo, Epoch, JobId, Lease, Needs, Payload, TaskId, Term, Token, WorkerId};

/// The time a decision is made at. Wall clock, for display only: no decision hangs on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds since 1970.
    pub unix_ms: i64,
}

/// A stage that became ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagePlan {
    /// Unique within the job.
    pub name: String,
    /// Its executor.
    pub kind: String,
    /// JSON of what was decided before it, for the planner; none when nothing was.
    pub decision: Option<Payload>,
    /// The same for people, one line; empty when nothing was.
    pub note: String,
    /// Whether what it makes lies in the job's output: it is forgotten when a failed job is retried, with
    /// every stage after it.
    pub in_output: bool,
    /// Its tasks, at least one.
    pub tasks: Vec<TaskPlan>,
}

/// A task of a stage that became ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskPlan {
    /// Names it within its stage.
    pub name: String,
    /// JSON of its spec.
    pub payload: Payload,
    /// Whether nothing else may run on its host meanwhile, because it measures time.
    pub exclusive: bool,
    /// What it runs on.
    pub needs: Needs,
}

/// A worker as it introduced itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Introduction {
    /// Stable over restarts.
    pub name: String,
    /// Its incarnation.
    pub epoch: Epoch,
    /// Workers of one host share it.
    pub host: String,
    /// What it can run on.
    pub devices: Vec<DeviceInfo>,
}

/// A request or an occurrence.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// A coordinator starts on this state.
    BeginTerm,
    /// The same with a term that was claimed, which is above every other.
    BeginTermAt {
        /// The term.
        term: Term,
    },
    /// A user submits a job.
    Submit {
        /// So that a submission sent twice runs once.
        request_id: Option<String>,
        /// JSON of the spec.
        spec: Payload,
        /// The parent, for display.
        parent: String,
        /// The directory of the outcome.
        output: String,
        /// The kind of device its tasks need.
        device_kind: String,
        /// Higher goes first; −100 to 100.
        priority: i32,
    },
    /// A user holds a job: what runs is let end, nothing more starts.
    Pause {
        /// Which.
        job: JobId,
        /// One line.
        reason: String,
    },
    /// A user lets a paused job go on.
    Resume {
        /// Which.
        job: JobId,
    },
    /// A user lets a failed job go on from where it failed.
    Retry {
        /// Which.
        job: JobId,
        /// So that a retry sent twice is one.
        request_id: Option<String>,
    },
    /// The archive of an ended job is durable.
    Archived {
        /// Which.
        job: JobId,
    },
    /// A user cancels a job.
    Cancel {
        /// Which.
        job: JobId,
        /// One line.
        reason: String,
    },
    /// The planner named the stages that are ready.
    StagesPlanned {
        /// Of which job.
        job: JobId,
        /// The job's count of results that the planner saw.
        revision: u64,
        /// The stages. Those the job has already are left alone.
        stages: Vec<StagePlan>,
    },
    /// The planner found the job complete.
    OutcomeReached {
        /// Which job.
        job: JobId,
        /// The job's count of results that the planner saw.
        revision: u64,
        /// JSON of the outcome.
        outcome: Payload,
    },
    /// The outcome lies in its directory.
    OutcomeWritten {
        /// Of which job.
        job: JobId,
    },
    /// The job cannot go on: planning, or writing its outcome, failed.
    JobBroken {
        /// Which.
        job: JobId,
        /// One line.
        message: String,
    },
    /// What an ended job had half-written is gone.
    PartialRemoved {
        /// Of which job.
        job: JobId,
    },
    /// A worker opened a stream.
    Introduce(Introduction),
    /// A worker wants to leave.
    Leave {
        /// Which.
        worker: WorkerId,
        /// Its incarnation.
        epoch: Epoch,
    },
    /// A user gives a worker nothing more.
    Cordon {
        /// Which.
        worker: WorkerId,
        /// One line.
        reason: String,
    },
    /// A user gives a worker work again.
    Uncordon {
        /// Which.
        worker: WorkerId,
    },
    /// A user asks a worker to hand back what it runs and to leave.
    Drain {
        /// Which.
        worker: WorkerId,
        /// One line.
        reason: String,
    },
    /// A user wants a worker's children replaced.
    RestartWorker {
        /// Which.
        worker: WorkerId,
        /// One line.
        reason: String,
    },
    /// Nothing was heard from a worker for too long.
    WorkerSilent {
        /// Which.
        worker: WorkerId,
        /// Its incarnation.
        epoch: Epoch,
    },
    /// A worker has been gone for long: it need not be remembered.
    Forget {
        /// Which.
        worker: WorkerId,
    },
    /// An attempt ended well.
    Complete {
        /// By whom.
        worker: WorkerId,
        /// Which attempt.
        lease: Lease,
        /// JSON of its output.
        output: Payload,
    },
    /// An attempt failed.
    Fail {
        /// By whom.
        worker: WorkerId,
        /// Which attempt.
        lease: Lease,
        /// Why.
        failure: Failure,
    },
    /// A rank of a gang stands ready.
    Prepared {
        /// By whom.
        worker: WorkerId,
        /// Which attempt.
        lease: Lease,
        /// Where the other ranks reach it: `host:port`.
        address: String,
        /// Never used before: the gang's, if this is the last of its ranks.
        token: Token,
    },
    /// A gang has not become ready for too long.
    GangLate {
        /// Its task.
        task: TaskId,
        /// Which formation.
        generation: u64,
    },
    /// A rank is gone and its worker's connection is closed: its gang, if it is ending, need not wait for it.
    LetGo {
        /// Which attempt.
        attempt: AttemptId,
    },
    /// An attempt goes on from what earlier ones have left.
    WentOn {
        /// By whom.
        worker: WorkerId,
        /// Which attempt.
        lease: Lease,
        /// In units of its progress.
        done: u64,
    },
    /// An attempt stopped: it was cancelled, or the worker gave it up by itself, as when it drains.
    Stopped {
        /// By whom.
        worker: WorkerId,
        /// Which attempt.
        lease: Lease,
    },
    /// Hand waiting tasks to free devices.
    Dispatch {
        /// Workers that cannot be told at the moment, and so get nothing new.
        absent: BTreeSet<WorkerId>,
        /// Tasks that rest after a failure: see [`super::retry_pause`].
        resting: BTreeSet<TaskId>,
    },
}

/// Why a command was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The job does not exist.
    #[error("there is no {0}")]
    NoSuchJob(JobId),
    /// The worker does not exist.
    #[error("there is no worker {0}")]
    NoSuchWorker(WorkerId),
    /// The worker is not there to be asked.
    #[error("worker `{name}` {standing}")]
    WorkerGone {
        /// Its name.
        name: String,
        /// What became of it.
        standing: &'static str,
    },
    /// The request id was used before.
    #[error("request id `{request_id}` was used for {job} with another spec or priority: choose a new one")]
    RequestIdTaken {
        /// The id.
        request_id: String,
        /// The job it made.
        job: JobId,
    },
    /// The same submission was taken before.
    #[error("this submission made {0} before")]
    SubmittedBefore(JobId),
    /// Another unfinished job writes there.
    #[error("output `{output}` is where {job} will write: choose another directory")]
    OutputTaken {
        /// The directory.
        output: String,
        /// The job that has it.
        job: JobId,
    },
    /// The job has ended.
    #[error("{job} has {phase}")]
    JobEnded {
        /// Which.
        job: JobId,
        /// How.
        phase: &'static str,
    },
    /// Only a job that failed can be retried.
    #[error("{job} has {phase}: only a job that failed, and has stopped, can be retried")]
    NotFailed {
        /// Which.
        job: JobId,
        /// Where it stands.
        phase: &'static str,
    },
    /// The worker was started anew since, or its clock ran ahead once.
    #[error(
        "worker `{name}` has been started anew since (epoch {known} after {said}): stop the older one, or give it \
         another name"
    )]
    StaleEpoch {
        /// The worker's name.
        name: String,
        /// The epoch it is known by.
        known: Epoch,
        /// The epoch it said.
        said: Epoch,
    },
    /// The job failed, but what it had done is no longer at hand.
    #[error("{job} has failed and was archived since: submit it again")]
    Archived {
        /// Which.
        job: JobId,
    },
    /// Said by somebody who no longer has the right to.
    #[error("stale: {0}")]
    Stale(String),
    /// A malformed command.
    #[error("{0}")]
    Invalid(String),
}
