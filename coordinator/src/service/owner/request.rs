//! What the loop can be asked and told.

use espalier_proto::task::{Failure, Progress};
use espalier_proto::v1;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::journal;
use crate::scheduler::{Epoch, Introduction, JobId, Lease, Payload, TaskId, Term, WorkerId};
use crate::service::watch::Following;
use crate::service::{Planned, StageSnapshot};

/// Answers one request.
pub type Reply<T> = oneshot::Sender<Result<T, Status>>;
/// Messages to one worker.
pub type Outbox = mpsc::Sender<Result<v1::CoordinatorMessage, Status>>;

/// A job as it was checked outside the loop.
#[derive(Debug)]
pub struct Submission {
    /// JSON of the spec, defaults filled in.
    pub spec: Payload,
    /// The parent, for display.
    pub parent: String,
    /// The directory of the outcome.
    pub output: String,
    /// The kind of device its tasks need.
    pub device_kind: String,
    /// Higher goes first.
    pub priority: i32,
    /// Whether the output is free; counts only if this is not a submission sent again.
    pub free: Result<(), String>,
}

/// A page of jobs.
#[derive(Debug)]
pub struct Listing {
    /// Only those before this one.
    pub before: Option<JobId>,
    /// At most so many.
    pub size: usize,
    /// Only in these states, unless empty.
    pub states: Vec<i32>,
}

/// A page of a job's tasks.
#[derive(Debug)]
pub struct TaskListing {
    /// Whose.
    pub job: JobId,
    /// Only those after this one.
    pub after: TaskId,
    /// At most so many.
    pub size: usize,
    /// Only in these states, unless empty.
    pub states: Vec<i32>,
    /// Only of this stage, unless empty.
    pub stage: String,
}

/// What a user can do with a job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum JobOrder {
    /// End it.
    Cancel { reason: String },
    /// Start nothing more of it.
    Pause { reason: String },
    /// Let it go on.
    Resume,
    /// Let it go on from where it failed.
    Retry { request_id: Option<String> },
}

/// What a keeper can do with a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum WorkerOrder {
    /// Give it nothing more.
    Cordon { reason: String },
    /// Give it work again.
    Uncordon,
    /// Ask it to hand back what it runs and to leave.
    Drain { reason: String },
    /// Replace its children.
    Restart { reason: String },
}

/// A question that changes nothing.
#[derive(Debug)]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum Query {
    /// A job.
    Job { job: JobId, reply: Reply<v1::Job> },
    /// The spec of a job that is not archived, and what its stages have found out.
    Findings {
        job: JobId,
        reply: Reply<(Payload, Vec<StageSnapshot>)>,
    },
    /// Jobs, the newest first.
    Jobs {
        listing: Listing,
        reply: Reply<Vec<v1::Job>>,
    },
    /// What happened to a job after the entry of this number, and whether it has ended.
    Events {
        job: JobId,
        after: u64,
        reply: Reply<(Vec<(u64, v1::JobEvent)>, bool)>,
    },
    /// Tasks of a job, and after which one the next page begins.
    Tasks {
        listing: TaskListing,
        reply: Reply<(Vec<v1::TaskDetail>, Option<TaskId>)>,
    },
    /// A task and its attempts.
    Task {
        task: TaskId,
        reply: Reply<v1::TaskDetail>,
    },
    /// Every worker.
    Workers { reply: Reply<Vec<v1::Worker>> },
    /// The worker of this name.
    Worker { name: String, reply: Reply<v1::Worker> },
}

/// A worker that opened a stream.
#[derive(Debug)]
pub struct Greeting {
    /// Who it is.
    pub introduction: Introduction,
    /// Of its build, for display.
    pub build: String,
    /// The protocol version spoken on this stream.
    pub version: u32,
    /// The highest term it has been welcomed by.
    pub highest_term: Term,
    /// What it runs or holds results of.
    pub attempts: Vec<Lease>,
    /// Messages to it.
    pub outbox: Outbox,
    /// Cancelled when the loop lets go of the stream.
    pub stop: CancellationToken,
}

/// Names a stream of a worker.
#[derive(Debug, Clone, Copy)]
pub struct WorkerHandle {
    /// The worker.
    pub worker: WorkerId,
    /// Its incarnation.
    pub epoch: Epoch,
    /// The stream.
    pub link: u64,
}

/// What a worker says of an attempt.
#[derive(Debug)]
pub enum Report {
    /// How far it has come.
    Progress(Progress),
    /// Lines of its log.
    Log {
        /// The number of the first of them, from 1; 0 when the worker does not count.
        first_line: u64,
        /// The lines.
        lines: Vec<String>,
    },
    /// It ended well.
    Completed(Payload),
    /// It failed.
    Failed(Failure),
    /// It was cancelled and has stopped.
    Stopped,
    /// A rank of a gang stands ready at this address.
    Prepared(String),
}

/// What the loop can be asked and told.
#[derive(Debug)]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum Request {
    /// Take a job.
    Submit {
        request_id: Option<String>,
        submission: Box<Submission>,
        reply: Reply<(v1::Job, bool)>,
    },
    /// Answer a question.
    Query(Query),
    /// Follow a job.
    Watch { job: JobId, reply: Reply<Following> },
    /// Do something with a job, for a user.
    KeepJob {
        job: JobId,
        order: JobOrder,
        reply: Reply<v1::Job>,
    },
    /// Do something with a worker, for its keeper.
    KeepWorker {
        name: String,
        order: WorkerOrder,
        reply: Reply<v1::Worker>,
    },
    /// A worker opened a stream.
    Greet {
        greeting: Box<Greeting>,
        reply: Reply<WorkerHandle>,
    },
    /// A worker says something of an attempt.
    Report {
        from: WorkerHandle,
        lease: Lease,
        report: Report,
    },
    /// A worker wants to leave.
    Leave { from: WorkerHandle },
    /// A worker's stream has ended.
    Closed { from: WorkerHandle },
    /// A worker lives; `term` as it was welcomed.
    Heartbeat {
        term: Term,
        worker: WorkerId,
        epoch: Epoch,
        attempts: Vec<Lease>,
        reply: Reply<v1::HeartbeatResponse>,
    },
    /// The planner has answered.
    Planned {
        job: JobId,
        revision: u64,
        planned: Result<Planned, String>,
    },
    /// The outcome was written, or could not be.
    Written { job: JobId, written: Result<(), String> },
    /// What a job had half-written was removed, or could not be.
    Removed { job: JobId, removed: Result<(), String> },
    /// A snapshot was written, or could not be.
    SnapshotEnded(Result<u64, journal::Error>),
    /// The archive of a job was written, or could not be.
    Archived { job: JobId, written: Result<(), String> },
    /// A question was answered beside the loop.
    Answered,
    /// Time has passed.
    Tick,
    /// End the loop.
    Stop,
}
