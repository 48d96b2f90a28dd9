//! All that the scheduler knows. Only [`super::apply`] changes it.
//!
//! It is serde: a snapshot is its JSON. What can be derived ([`Index`]) is left out and built again.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::index::{Class, Index, Turn};
use super::{
    Attempt, AttemptId, Device, Job, JobId, Lease, Name, Stage, Summary, Task, TaskId, TaskPhase, Term,
    Token, Worker, WorkerId,
};

/// Jobs, tasks, attempts and workers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default)]
pub struct State {
    pub(super) term: Term,
    pub(super) last_job: JobId,
    pub(super) last_task: TaskId,
    pub(super) last_attempt: AttemptId,
    /// The last attempt before each term: numbers that a lost disk forgot are given again by its successor, so
    /// that an attempt's number alone does not say whose it is.
    #[serde(default)]
    pub(super) term_starts: BTreeMap<Term, AttemptId>,
    pub(super) jobs: BTreeMap<JobId, Job>,
    /// Tasks of jobs that are not archived. Shared with copies of the state, so that copying one costs little.
    #[serde(with = "super::shared")]
    pub(super) tasks: BTreeMap<TaskId, Arc<Task>>,
    /// Attempts that hold a device.
    pub(super) attempts: BTreeMap<AttemptId, Attempt>,
    pub(super) workers: BTreeMap<WorkerId, Worker>,
    /// Jobs whose tasks have left.
    pub(super) archived: BTreeMap<JobId, Summary>,
    #[serde(skip)]
    pub(super) index: Index,
}

impl Serialize for State {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for State {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut state = Self::deserialize(deserializer)?;
        state.reindex();
        Ok(state)
    }
}

/// What every rank of a gang is told when it begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// Names the communicator, a fresh one for every generation, and is known to its ranks alone.
    pub communicator: Token,
    /// Addresses of all ranks, in their order.
    pub addresses: Vec<String>,
}

impl State {
    /// The incarnation of the coordinator that owns this state.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Every job that is not archived, the oldest first.
    pub fn jobs(&self) -> impl DoubleEndedIterator<Item = &Job> {
        self.jobs.values()
    }

    /// One job that is not archived.
    pub fn job(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job)
    }

    /// The newest job ever submitted; 0 before the first.
    pub fn last_job(&self) -> JobId {
        self.last_job
    }

    /// Jobs whose tasks have left the state, the oldest first.
    pub fn archived(&self) -> impl DoubleEndedIterator<Item = &Summary> {
        self.archived.values()
    }

    /// What is left of an archived job.
    pub fn summary(&self, job: JobId) -> Option<&Summary> {
        self.archived.get(&job)
    }

    /// Jobs that are over, of which nothing runs or lies about: they can be archived. The oldest first.
    pub fn archivable(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values().filter(|job| self.is_archivable(job))
    }

    pub(super) fn is_archivable(&self, job: &Job) -> bool {
        job.phase.is_terminal() && !job.wants_removal() && self.attempts_of(job.id).next().is_none()
    }

    /// Every task that is not archived.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.tasks.values().map(AsRef::as_ref)
    }

    /// One task that is not archived.
    pub fn task(&self, task: TaskId) -> Option<&Task> {
        self.tasks.get(&task).map(AsRef::as_ref)
    }

    /// The tasks of a stage that exist, in order.
    pub fn stage_tasks<'a>(&'a self, stage: &'a Stage) -> impl Iterator<Item = &'a Task> {
        stage.tasks.iter().filter_map(|task| self.task(*task))
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
        let ids = self.index.of_job.get(&job).into_iter().flatten();
        ids.filter_map(|attempt| self.attempts.get(attempt))
    }

    /// Attempts that hold a device of this worker.
    pub fn attempts_on(&self, worker: WorkerId) -> impl Iterator<Item = &Attempt> {
        let ids = self.index.of_worker.get(&worker).into_iter().flatten();
        ids.filter_map(|attempt| self.attempts.get(attempt))
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
        let worker = self.index.worker_names.get(name)?;
        self.workers.get(worker)
    }

    /// Whether a submission with this request id was taken.
    pub fn knows_request(&self, request_id: &str) -> bool {
        self.index.request_ids.contains_key(request_id)
    }

    /// Tasks that wait for a device, those of paused jobs left out.
    pub fn waiting(&self) -> usize {
        self.index.waiting.values().map(|queue| queue.len()).sum()
    }

    /// The task of an attempt that holds a device, or that ended well.
    pub fn task_of(&self, attempt: AttemptId) -> Option<TaskId> {
        self.attempts
            .get(&attempt)
            .map(|held| held.task)
            .or_else(|| self.index.completed.get(&attempt).copied())
    }

    /// The kind of device a task needs.
    pub fn device_kind<'a>(&'a self, task: &'a Task) -> &'a str {
        let own = task.needs.device_kind.as_ref();
        own.or_else(|| self.jobs.get(&task.job).map(|job| &job.device_kind))
            .map_or("", Name::as_str)
    }

    /// What to tell a rank of a gang that has been released; none before.
    pub fn release_of(&self, attempt: AttemptId) -> Option<Release> {
        let held = self.attempts.get(&attempt).filter(|held| !held.cancelled)?;
        let gang = self.task(held.task)?.gang().filter(|gang| gang.released)?;
        Some(Release {
            communicator: gang.token.clone(),
            addresses: gang.addresses()?,
        })
    }

    /// Whether a device is one that no gang can count on: what holds it was let go, and its worker's connection is closed.
    pub(super) fn is_cut_off(&self, device: &Device) -> bool {
        let held = device.attempt.and_then(|attempt| self.attempts.get(&attempt));
        held.is_some_and(|held| held.let_go)
    }

    /// Gangs that are formed and have not begun: the task and the generation. Who keeps time says
    /// `GangLate` of one that stays here.
    pub fn forming(&self) -> impl Iterator<Item = (TaskId, u64)> {
        let firsts = self.attempts.values().filter(|held| !held.cancelled);
        let firsts = firsts.filter(|held| held.place.is_some_and(|place| place.rank == 0));
        let gangs = firsts.filter_map(|held| Some((held.task, self.task(held.task)?.gang()?)));
        gangs
            .filter(|(_, gang)| !gang.released)
            .map(|(task, gang)| (task, gang.generation))
    }

    /// Why a cancelled attempt has to stop, one line.
    pub fn stop_reason(&self, attempt: &Attempt) -> String {
        match self.jobs.get(&attempt.job) {
            Some(job) if job.phase.is_terminal() => format!("{} has {}", job.id, job.phase.name()),
            _ => "another rank of its gang ended".to_owned(),
        }
    }

    /// The state without what is derived: for whoever only writes it down.
    #[must_use]
    pub fn bare(&self) -> Self {
        Self {
            term: self.term,
            last_job: self.last_job,
            last_task: self.last_task,
            last_attempt: self.last_attempt,
            term_starts: self.term_starts.clone(),
            jobs: self.jobs.clone(),
            tasks: self.tasks.clone(),
            attempts: self.attempts.clone(),
            workers: self.workers.clone(),
            archived: self.archived.clone(),
            index: Index::default(),
        }
    }

    /// A state that knows nothing but this job and its tasks, as an archive holds it.
    pub fn alone(&self, job: JobId) -> Option<Self> {
        let known = self.jobs.get(&job)?;
        let task = |id: &TaskId| Some((*id, self.tasks.get(id)?.clone()));
        let mut alone = Self {
            term: self.term,
            jobs: BTreeMap::from([(job, known.clone())]),
            tasks: known
                .stages
                .iter()
                .flat_map(|stage| &stage.tasks)
                .filter_map(task)
                .collect(),
            ..Self::default()
        };
        alone.reindex();
        Some(alone)
    }

    /// Builds what is derived. [`super::apply`] keeps it; only who reads a state from elsewhere needs this.
    pub fn reindex(&mut self) {
        for task in self.tasks.values_mut() {
            let job = self.jobs.get(&task.job);
            let stage = job.and_then(|job| job.stages.get(task.stage));
            let kind = stage.map(|stage| stage.kind.clone()).unwrap_or_default();
            if task.kind != kind {
                Arc::make_mut(task).kind = kind;
            }
        }
        self.index = Index::of(self);
    }

    pub(super) fn task_mut(&mut self, task: TaskId) -> Option<&mut Task> {
        self.tasks.get_mut(&task).map(Arc::make_mut)
    }

    /// Where a waiting task stands in line, and in which.
    pub(super) fn turn(&self, task: &Task) -> Option<(Class, Turn)> {
        let job = self.jobs.get(&task.job)?;
        Some((Class::of(job, task), Turn::of(job, task)))
    }

    /// Whether a waiting task of this job may be handed out.
    pub(super) fn is_held(&self, job: JobId) -> bool {
        self.jobs.get(&job).is_some_and(|job| job.paused.is_some())
    }

    /// How many of a job's tasks there are, and how many ended well.
    pub(super) fn counts(&self, job: &Job) -> (u64, u64) {
        let all = job.stages.iter().map(|stage| stage.tasks.len()).sum::<usize>();
        let done = job.stages.iter().map(|stage| stage.done).sum::<usize>();
        let wide = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        (wide(all), wide(done))
    }

    /// Whether the completion of the lease's attempt, or its rank's, was taken and stands.
    pub fn completed_before(&self, lease: Lease) -> bool {
        let task = self.index.completed.get(&lease.attempt);
        let stands = task
            .and_then(|task| self.task(*task))
            .is_some_and(|task| matches!(task.phase, TaskPhase::Done { .. } | TaskPhase::Gang(_)));
        stands && self.term_of(lease.attempt) == Some(lease.term)
    }

    /// The term in which this history gave the attempt out.
    pub fn term_of(&self, attempt: AttemptId) -> Option<Term> {
        let before = self.term_starts.iter().rev().find(|(_, last)| **last < attempt);
        before.map(|(term, _)| *term)
    }
}
