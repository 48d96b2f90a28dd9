//! All that the scheduler knows. Only [`super::apply`] changes it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{AttemptId, Epoch, Failures, JobId, Lease, Payload, TaskId, Term, WorkerId};

/// Jobs, tasks, attempts and workers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct State {
    pub(super) term: Term,
    pub(super) jobs: BTreeMap<JobId, Job>,
    pub(super) tasks: BTreeMap<TaskId, Task>,
    /// Attempts that hold a device.
    pub(super) attempts: BTreeMap<AttemptId, Attempt>,
    /// The task of every attempt ever made: attempt n at n − 1.
    pub(super) attempt_tasks: Vec<TaskId>,
    pub(super) workers: BTreeMap<WorkerId, Worker>,
    pub(super) worker_names: BTreeMap<String, WorkerId>,
    pub(super) request_ids: BTreeMap<String, JobId>,
    /// Tasks that wait for a device, in the order they are handed out.
    pub(super) ready: BTreeSet<TaskId>,
}

impl State {
    /// The incarnation of the coordinator that owns this state.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Every job, the oldest first.
    pub fn jobs(&self) -> impl DoubleEndedIterator<Item = &Job> {
        self.jobs.values()
    }

    /// One job.
    pub fn job(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job)
    }

    /// One task.
    pub fn task(&self, task: TaskId) -> Option<&Task> {
        self.tasks.get(&task)
    }

    /// The tasks of a stage that exist, in order.
    pub fn stage_tasks<'a>(&'a self, stage: &'a Stage) -> impl Iterator<Item = &'a Task> {
        stage.tasks.iter().filter_map(|task| self.tasks.get(task))
    }

    /// Attempts that hold a device.
    pub fn attempts(&self) -> impl Iterator<Item = &Attempt> {
        self.attempts.values()
    }

    /// One attempt that holds a device.
    pub fn attempt(&self, attempt: AttemptId) -> Option<&Attempt> {
        self.attempts.get(&attempt)
    }

    /// Attempts that hold a device for this job.
    pub fn attempts_of(&self, job: JobId) -> impl Iterator<Item = &Attempt> {
        self.attempts.values().filter(move |attempt| attempt.job == job)
    }

    /// Every worker ever seen.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// One worker.
    pub fn worker(&self, worker: WorkerId) -> Option<&Worker> {
        self.workers.get(&worker)
    }

    /// The worker of this name.
    pub fn worker_named(&self, name: &str) -> Option<&Worker> {
        self.worker_names
            .get(name)
            .and_then(|worker| self.workers.get(worker))
    }

    /// Whether a submission with this request id was taken.
    pub fn knows_request(&self, request_id: &str) -> bool {
        self.request_ids.contains_key(request_id)
    }

    /// Tasks that wait for a device.
    pub fn waiting(&self) -> usize {
        self.ready.len()
    }

    /// The task an attempt was made at, however it ended.
    pub fn task_of(&self, attempt: AttemptId) -> Option<TaskId> {
        let index = usize::try_from(attempt.0.checked_sub(1)?).ok()?;
        self.attempt_tasks.get(index).copied()
    }

    pub(super) fn next_attempt(&self) -> AttemptId {
        AttemptId(u64::try_from(self.attempt_tasks.len()).unwrap_or(u64::MAX)).next()
    }
}

/// A user's request.
#[derive(Debug, Clone, PartialEq)]
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
    pub device_kind: String,
    /// Where it stands.
    pub phase: JobPhase,
    /// The stages known so far.
    pub stages: Vec<Stage>,
    /// Stages that ended, and one for the submission: what a planner can know.
    pub results: u64,
    /// What the planner had seen when it last answered.
    pub planned: u64,
    /// Milliseconds since 1970.
    pub submitted_at: i64,
    /// When its first task started.
    pub started_at: Option<i64>,
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
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Unique within the job.
    pub name: String,
    /// Its executor.
    pub kind: String,
    /// JSON of what was decided before it.
    pub decision: Option<Payload>,
    /// The same for people.
    pub note: String,
    /// Its tasks.
    pub tasks: Vec<TaskId>,
    /// How many of them are done.
    pub done: usize,
    /// When its first task started, milliseconds since 1970.
    pub started_at: Option<i64>,
    /// When its last task ended.
    pub finished_at: Option<i64>,
}

/// The unit handed to a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// Its job.
    pub job: JobId,
    /// Index into the job's stages.
    pub stage: usize,
    /// Names it within its stage.
    pub name: String,
    /// Its executor.
    pub kind: String,
    /// JSON of its spec.
    pub payload: Payload,
    /// Whether nothing else may run on its host meanwhile.
    pub exclusive: bool,
    /// Where it stands.
    pub phase: TaskPhase,
    /// How often it failed.
    pub failures: Failures,
    /// Why it last failed.
    pub last_failure: Option<String>,
    /// Where it last failed: elsewhere is tried first.
    pub failed_on: Option<WorkerId>,
}

/// Where a task stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskPhase {
    /// For a device.
    Waiting,
    /// On a device.
    Running {
        /// By this attempt.
        attempt: AttemptId,
    },
    /// It ended well.
    Done {
        /// By this attempt.
        attempt: AttemptId,
        /// JSON of its output.
        output: Payload,
    },
    /// It failed for good.
    Failed,
    /// Its job ended before it did.
    Abandoned,
}

/// One try at a task that holds a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The right to run it.
    pub lease: Lease,
    /// Its task.
    pub task: TaskId,
    /// The task's job.
    pub job: JobId,
    /// Where it runs.
    pub worker: WorkerId,
    /// On which of that worker's devices.
    pub device: String,
    /// Whether nothing else may run on its host.
    pub exclusive: bool,
    /// Whether the worker was told to stop it: its job has ended.
    pub cancelled: bool,
    /// Milliseconds since 1970.
    pub started_at: i64,
}

/// A process that owns devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// Its name.
    pub name: String,
    /// Its incarnation.
    pub epoch: Epoch,
    /// Workers of one host share it.
    pub host: String,
    /// What it can run on.
    pub devices: Vec<Device>,
    /// Whether it gets work.
    pub standing: Standing,
}

/// Whether a worker gets work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It does.
    Present,
    /// It keeps what it has and gets nothing more.
    Leaving,
    /// It was given up; its attempts were handed on.
    Lost,
}

/// A device as its worker describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Unique within the worker.
    pub id: String,
    /// `cpu` or `cuda`.
    pub kind: String,
    /// For display.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Threads an attempt may use.
    pub threads: u32,
}

/// A device and what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// As its worker describes it.
    pub info: DeviceInfo,
    /// The attempt that holds it.
    pub attempt: Option<AttemptId>,
    /// What its child last ran: the job and the executor.
    pub last: Option<(JobId, String)>,
}
