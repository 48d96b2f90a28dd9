//! What is derived from the rest of the state, so that no turn costs more for more tasks.
//!
//! [`Index::of`] is the definition; [`super::apply`] keeps it as it folds events in.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::{Attempt, AttemptId, Job, JobId, Name, State, Task, TaskId, TaskPhase, Worker, WorkerId};

/// Tasks that ask for the same: where one of them finds no place, none does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    /// The kind of device.
    pub device_kind: Name,
    /// Memory it has to have.
    pub memory_bytes: u64,
    /// How many of them, at the most.
    pub ranks: u32,
    /// Of which their number is a multiple.
    pub rank_multiple: u32,
    /// Whether nothing else may run on their hosts.
    pub exclusive: bool,
    /// What has to measure on them beside the built-in engine.
    pub engine: Option<Name>,
}

impl Class {
    /// What a task of this job asks for.
    pub fn of(job: &Job, task: &Task) -> Self {
        let own = task.needs.device_kind.as_ref();
        Self {
            device_kind: own.unwrap_or(&job.device_kind).clone(),
            memory_bytes: task.needs.memory_bytes,
            ranks: task.needs.ranks.max(1),
            rank_multiple: task.needs.rank_multiple.max(1),
            exclusive: task.exclusive,
            engine: task.needs.engine.clone(),
        }
    }

    /// Whether several devices run it together.
    pub fn is_gang(&self) -> bool {
        self.ranks > 1
    }

    /// Ranks of a gang where there are so many devices; none where they are too few for any.
    pub fn ranks_of(&self, devices: u32) -> Option<u32> {
        let most = self.ranks.min(devices);
        let ranks = most - most.checked_rem(self.rank_multiple)?;
        (ranks > 0).then_some(ranks)
    }
}

/// A place in line: the higher priority first, then the older job, then the older task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    priority: Reverse<i32>,
    job: JobId,
    /// Who stands there.
    pub task: TaskId,
}

impl Turn {
    /// A task's place.
    pub fn of(job: &Job, task: &Task) -> Self {
        Self {
            priority: Reverse(job.priority),
            job: job.id,
            task: task.id,
        }
    }

    /// The places of a whole job.
    pub fn range(job: &Job) -> std::ops::RangeInclusive<Self> {
        let at = |task| Self {
            priority: Reverse(job.priority),
            job: job.id,
            task,
        };
        at(TaskId(0))..=at(TaskId(u64::MAX))
    }
}

/// What runs on a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostUse {
    /// Attempts.
    pub running: usize,
    /// Those of them that want it for themselves.
    pub exclusive: usize,
}

/// Everything derived. No set in a map is empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Index {
    /// Waiting tasks of jobs that are not paused, in line by what they ask for.
    pub waiting: BTreeMap<Class, BTreeSet<Turn>>,
    /// Waiting tasks of paused jobs.
    pub held: BTreeMap<JobId, BTreeSet<TaskId>>,
    /// Devices by kind that nothing holds, of workers that get work: the worker and the device's place.
    pub free: BTreeMap<Name, BTreeSet<(WorkerId, usize)>>,
    /// What runs on each host.
    pub hosts: BTreeMap<Name, HostUse>,
    /// Attempts that hold a device, by job.
    pub of_job: BTreeMap<JobId, BTreeSet<AttemptId>>,
    /// The same, by worker.
    pub of_worker: BTreeMap<WorkerId, BTreeSet<AttemptId>>,
    /// Attempts that ended well: of tasks that are done, and of gangs that are formed.
    pub completed: BTreeMap<AttemptId, TaskId>,
    /// Workers by name.
    pub worker_names: BTreeMap<String, WorkerId>,
    /// Jobs, archived ones too, by the id of their submission.
    pub request_ids: BTreeMap<String, JobId>,
}

impl Index {
    /// What is derived from this state.
    pub fn of(state: &State) -> Self {
        let mut index = Self::default();
        for task in state.tasks() {
            index.add_completed(task);
            if !matches!(task.phase, TaskPhase::Waiting) {
                continue;
            }
            if state.is_held(task.job) {
                index.hold(task.job, task.id);
            } else if let Some((class, turn)) = state.turn(task) {
                index.line_up(class, turn);
            }
        }
        for worker in state.workers() {
            index.worker_names.insert(worker.name.clone(), worker.id);
            index.offer(worker);
        }
        for attempt in state.attempts() {
            let host = state.worker(attempt.worker).map(|worker| worker.host.clone());
            index.begin(attempt, host.unwrap_or_default());
        }
        let jobs = state.jobs().map(|job| (&job.request_id, job.id));
        let archived = state.archived().map(|job| (&job.request_id, job.id));
        for (request_id, job) in jobs.chain(archived) {
            if let Some(request_id) = request_id {
                index.request_ids.insert(request_id.clone(), job);
            }
        }
        index
    }

    /// Puts a task in line.
    pub fn line_up(&mut self, class: Class, turn: Turn) {
        self.waiting.entry(class).or_default().insert(turn);
    }

    /// Takes a task out of its line.
    pub fn step_out(&mut self, class: &Class, turn: Turn) {
        if let Some(queue) = self.waiting.get_mut(class) {
            queue.remove(&turn);
            if queue.is_empty() {
                self.waiting.remove(class);
            }
        }
    }

    /// Keeps a waiting task of a paused job.
    pub fn hold(&mut self, job: JobId, task: TaskId) {
        self.held.entry(job).or_default().insert(task);
    }

    /// Forgets a waiting task of a paused job.
    pub fn let_go(&mut self, job: JobId, task: TaskId) {
        remove(&mut self.held, job, task);
    }

    /// Offers the free devices of a worker, if it gets work.
    pub fn offer(&mut self, worker: &Worker) {
        if !worker.is_usable() {
            return;
        }
        for (place, device) in worker.devices.iter().enumerate() {
            if device.attempt.is_none() {
                let kind = device.info.kind.clone();
                self.free.entry(kind).or_default().insert((worker.id, place));
            }
        }
    }

    /// Offers one device that became free.
    pub fn offer_device(&mut self, kind: &Name, worker: WorkerId, place: usize) {
        match self.free.get_mut(kind) {
            Some(free) => {
                free.insert((worker, place));
            }
            None => {
                self.free.insert(kind.clone(), BTreeSet::from([(worker, place)]));
            }
        }
    }

    /// Withdraws one device.
    pub fn withdraw_device(&mut self, kind: &Name, worker: WorkerId, place: usize) {
        if let Some(free) = self.free.get_mut(kind) {
            free.remove(&(worker, place));
            if free.is_empty() {
                self.free.remove(kind);
            }
        }
    }

    /// Withdraws every device of a worker.
    pub fn withdraw(&mut self, worker: &Worker) {
        for (place, device) in worker.devices.iter().enumerate() {
            self.withdraw_device(&device.info.kind, worker.id, place);
        }
    }

    /// An attempt took its device.
    pub fn begin(&mut self, attempt: &Attempt, host: Name) {
        let id = attempt.lease.attempt;
        self.of_job.entry(attempt.job).or_default().insert(id);
        self.of_worker.entry(attempt.worker).or_default().insert(id);
        let used = self.hosts.entry(host).or_default();
        used.running = used.running.saturating_add(1);
        used.exclusive = used.exclusive.saturating_add(usize::from(attempt.exclusive));
    }

    /// An attempt gave its device back.
    pub fn end(&mut self, attempt: &Attempt, host: &Name) {
        let id = attempt.lease.attempt;
        remove(&mut self.of_job, attempt.job, id);
        remove(&mut self.of_worker, attempt.worker, id);
        if let Some(used) = self.hosts.get_mut(host) {
            used.running = used.running.saturating_sub(1);
            used.exclusive = used.exclusive.saturating_sub(usize::from(attempt.exclusive));
            if used.running == 0 {
                self.hosts.remove(host);
            }
        }
    }

    /// Remembers who completed a task.
    pub fn add_completed(&mut self, task: &Task) {
        for attempt in completed(task) {
            self.completed.insert(attempt, task.id);
        }
    }

    /// Forgets who completed a task.
    pub fn remove_completed(&mut self, task: &Task) {
        for attempt in completed(task) {
            self.completed.remove(&attempt);
        }
    }
}

/// The attempts whose completion stands.
fn completed(task: &Task) -> Vec<AttemptId> {
    use super::RankPhase;
    match &task.phase {
        TaskPhase::Done { attempt, .. } => {
            let ranks = u64::from(task.formed_ranks.max(1));
            (0..ranks)
                .map(|rank| AttemptId(attempt.0.saturating_add(rank)))
                .collect()
        }
        TaskPhase::Gang(gang) => {
            let completed = gang
                .ranks
                .iter()
                .filter(|rank| rank.phase == RankPhase::Completed);
            completed.map(|rank| rank.attempt).collect()
        }
        TaskPhase::Waiting | TaskPhase::Running { .. } | TaskPhase::Failed | TaskPhase::Abandoned => {
            Vec::new()
        }
    }
}

fn remove<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: K, value: V) {
    if let Some(set) = sets.get_mut(&key) {
        set.remove(&value);
        if set.is_empty() {
            sets.remove(&key);
        }
    }
}
