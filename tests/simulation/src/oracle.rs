//! The truth as seen from outside, and what no run may show.
//!
//! It knows what each worker was told, what each user was told, and every event that a coordinator made
//! durable, in the order it did. A *history* is the life of one journal: the first begins with an empty
//! disk, and another where a coordinator starts on another disk from what was shipped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use espalier_coordinator::scheduler::{
    AttemptId, Event, Failures, JobId, Payload, State, Task, TaskId, TaskPhase, check, check_touched,
};
use espalier_coordinator::service::surroundings::Witness;
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::{CoordinatorMessage, Lease};

use crate::clock::Time;
use crate::planner;

/// A full check comes every so many events.
const FULL_CHECK: u64 = 1000;

/// Term and number of an attempt: unique over all coordinators.
pub type Attempt = (u64, u64);

/// An event, with what only the state at its moment can tell.
#[derive(Debug, Clone)]
struct Seen {
    event: Event,
    /// Attempts that it is about.
    attempts: Vec<(AttemptId, Attempt)>,
    task: Option<TaskId>,
    budget: Option<Budget>,
    /// Who did the task, if it is done.
    done_by: Option<AttemptId>,
    /// Of a retried job: its tasks that are left.
    left: Option<(JobId, BTreeSet<TaskId>)>,
}

/// What a task has used up: the count of the job's retries, and failures since the last.
type Budget = (u32, Failures);

fn budget(task: &Task) -> Budget {
    (task.era(), task.failures())
}

fn is_below(now: &Budget, before: &Budget) -> bool {
    now.0 < before.0 || (now.0 == before.0 && !now.1.covers(&before.1))
}

/// Watches one coordinator's events as they are applied.
#[derive(Debug, Default)]
pub struct Eye(Mutex<Watched>);

#[derive(Debug, Default)]
struct Watched {
    seen: Vec<Seen>,
    events: u64,
    /// Leases of attempts that held a device.
    attempts: BTreeMap<AttemptId, Attempt>,
    broken: Option<String>,
}

impl Eye {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Witness for Eye {
    fn applied(&self, state: &State, event: &Event) {
        let mut watched = self.watched();
        watched.events += 1;
        let checked = if watched.events.is_multiple_of(FULL_CHECK) {
            check(state)
        } else {
            check_touched(state, event)
        };
        if let Err(broken) = checked
            && watched.broken.is_none()
        {
            watched.broken = Some(format!("after {event:?}: {broken}"));
        }
        let seen = look(&mut watched, state, event);
        watched.seen.push(seen);
    }
}

fn look(watched: &mut Watched, state: &State, event: &Event) -> Seen {
    let (ids, task) = about(event);
    let attempts = ids.into_iter().filter_map(|id| {
        if let Some(held) = state.attempt(id) {
            watched.attempts.insert(id, (held.lease.term.0, id.0));
        }
        watched.attempts.get(&id).map(|attempt| (id, *attempt))
    });
    let attempts = attempts.collect();
    let known = task.and_then(|task| state.task(task));
    let left = match event {
        Event::JobRetried { job, .. } => {
            let tasks = state.tasks().filter(|task| task.job == *job).map(|task| task.id);
            Some((*job, tasks.collect()))
        }
        _ => None,
    };
    Seen {
        event: event.clone(),
        attempts,
        task,
        budget: known.map(budget),
        done_by: known.and_then(done_by),
        left,
    }
}

fn done_by(task: &Task) -> Option<AttemptId> {
    match &task.phase {
        TaskPhase::Done { attempt, .. } => Some(*attempt),
        _ => None,
    }
}

/// Attempts and the task that an event is about.
fn about(event: &Event) -> (Vec<AttemptId>, Option<TaskId>) {
    match event {
        Event::AttemptStarted { attempt, task, .. }
        | Event::AttemptCompleted { attempt, task, .. }
        | Event::AttemptFailed { attempt, task, .. }
        | Event::AttemptLost { attempt, task, .. }
        | Event::AttemptHandedBack { attempt, task, .. }
        | Event::AttemptStopped { attempt, task }
        | Event::RankCompleted { attempt, task, .. } => (vec![*attempt], Some(*task)),
        Event::GangFormed { task, ranks, .. } => {
            (ranks.iter().map(|rank| rank.attempt).collect(), Some(*task))
        }
        Event::GangEnded { task, .. } => (Vec::new(), Some(*task)),
        _ => (Vec::new(), None),
    }
}

/// What became of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Promoted,
    /// A rank ended well; the task is done when all have.
    RankDone,
    Failed,
    Lost,
    HandedBack,
    Stopped,
}

/// What one journal has made durable.
#[derive(Debug, Clone, Default)]
struct History {
    promoted: BTreeMap<TaskId, (Attempt, Time)>,
    fates: BTreeMap<Attempt, Fate>,
    budgets: BTreeMap<TaskId, Budget>,
    job_of: BTreeMap<TaskId, JobId>,
    jobs: BTreeMap<String, (JobId, Time)>,
    /// Leases of ranks that ended well.
    ranks: BTreeMap<AttemptId, Attempt>,
    /// When what it goes on from was shipped, until it has begun to.
    shipped_at: Option<Time>,
}

impl History {
    /// A job is tried again: tasks that it forgets may be done anew.
    fn forget(&mut self, job: JobId, left: &BTreeSet<TaskId>) {
        let job_of = &self.job_of;
        let stays = |task: &TaskId| job_of.get(task) != Some(&job) || left.contains(task);
        self.promoted.retain(|task, _| stays(task));
        self.budgets.retain(|task, _| stays(task));
    }

    fn spend(&mut self, task: TaskId, seen: &Seen) -> Result<(), String> {
        let Some(now) = seen.budget else { return Ok(()) };
        match self
            .budgets
            .insert(task, now)
            .filter(|before| is_below(&now, before))
        {
            Some(before) => Err(format!(
                "the budget of task {task} went back from {before:?} to {now:?}"
            )),
            None => Ok(()),
        }
    }

    fn promote(&mut self, now: Time, task: TaskId, attempt: Attempt) -> Result<(), String> {
        match self.promoted.insert(task, (attempt, now)) {
            Some((before, _)) => Err(format!(
                "task {task} was promoted twice: {before:?} and {attempt:?}"
            )),
            None => Ok(()),
        }
    }

    fn end(&mut self, seen: &Seen, fate: Fate) -> Result<Attempt, String> {
        let Some((_, attempt)) = seen.attempts.first().copied() else {
            return Err(format!(
                "{:?} is about an attempt that was never made",
                seen.event
            ));
        };
        match self.fates.insert(attempt, fate) {
            Some(before) => Err(format!(
                "attempt {attempt:?} ended twice: {before:?} and {fate:?}"
            )),
            None => Ok(attempt),
        }
    }
}

/// Whether an output is this attempt's own.
fn is_of(output: &Payload, attempt: Attempt) -> Result<(), String> {
    match planner::made_by(output) {
        Some(made_by) if made_by == attempt => Ok(()),
        made_by => Err(format!(
            "attempt {attempt:?} was promoted with the result of {made_by:?}"
        )),
    }
}

/// A coordinator that runs.
#[derive(Debug)]
struct Running {
    term: u64,
    eye: Arc<Eye>,
    served: bool,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Oracle {
    histories: Vec<History>,
    /// Which history is on which machine's disk.
    on_disk: BTreeMap<usize, usize>,
    running: BTreeMap<usize, Running>,
    /// Events of a turn that was cut short, by machine: durable or not.
    doubtful: BTreeMap<usize, Vec<Seen>>,
    highest_served: u64,
    /// Attempts whose devices ended well.
    completed: BTreeMap<Attempt, u64>,
    /// Completions that workers were told are durable.
    acknowledged: BTreeSet<Attempt>,
    /// What users were told.
    accepted: BTreeMap<String, JobId>,
    /// Events that were made durable.
    pub events: u64,
    /// Acknowledged completions that a lost disk took along.
    pub lost_with_disk: u64,
}

impl Oracle {
    /// What watches the coordinator that is about to start on a machine.
    pub fn open_eye(&mut self, machine: usize) -> Arc<Eye> {
        let eye = Arc::new(Eye::default());
        self.running.insert(
            machine,
            Running {
                term: 0,
                eye: Arc::clone(&eye),
                served: false,
            },
        );
        eye
    }

    /// A coordinator will start on a machine from what was shipped of another's journal by then.
    pub fn takes_over(&mut self, from: usize, to: usize, shipped_at: Time) {
        let history = self
            .on_disk
            .get(&from)
            .and_then(|index| self.histories.get(*index));
        let mut history = history.cloned().unwrap_or_default();
        history.shipped_at = Some(shipped_at);
        self.histories.push(history);
        self.on_disk.insert(to, self.histories.len() - 1);
    }

    /// What was shipped must be there; what was not is gone with the disk.
    fn inherit(&mut self, index: usize, state: &State) -> Result<(), String> {
        let Some(history) = self.histories.get_mut(index) else {
            return Ok(());
        };
        let Some(shipped_at) = history.shipped_at.take() else {
            return Ok(());
        };
        let kept = |task: TaskId, attempt: Attempt| match state.task(task) {
            Some(known) => done_by(known).is_some_and(|by| by.0 == attempt.1),
            None => history
                .job_of
                .get(&task)
                .is_some_and(|job| state.summary(*job).is_some()),
        };
        let mut lost = Vec::new();
        for (task, (attempt, at)) in &history.promoted {
            if kept(*task, *attempt) {
                continue;
            }
            if *at <= shipped_at {
                return Err(format!(
                    "the completion of {attempt:?} of task {task} was durable at {at}, shipped by {shipped_at}, \
                     and is lost"
                ));
            }
            lost.push(*task);
        }
        for task in &lost {
            history.promoted.remove(task);
        }
        // What had ended since goes on as far as this journal knows.
        for attempt in state.attempts() {
            history
                .fates
                .remove(&(attempt.lease.term.0, attempt.lease.attempt.0));
        }
        self.lost_with_disk += lost.len() as u64;
        history.budgets.retain(|task, before| {
            let known = state.task(*task).map(budget);
            known.is_some_and(|known| !is_below(&known, before))
        });
        let mut forgotten = Vec::new();
        for (request_id, (job, at)) in &history.jobs {
            let there = state.job(*job).is_some() || state.summary(*job).is_some();
            if !there && *at <= shipped_at {
                return Err(format!(
                    "{job} was taken at {at}, shipped by {shipped_at}, and is lost"
                ));
            }
            if !there {
                forgotten.push(request_id.clone());
            }
        }
        for request_id in forgotten {
            history.jobs.remove(&request_id);
            self.accepted.remove(&request_id);
        }
        Ok(())
    }

    /// A coordinator has replayed its journal: what was durable must be there.
    ///
    /// # Errors
    /// What was lost, or came back twice.
    pub fn started(&mut self, now: Time, machine: usize, state: &State) -> Result<(), String> {
        let Some(running) = self.running.get_mut(&machine) else {
            return Ok(());
        };
        running.term = state.term().0;
        for attempt in state.attempts() {
            let lease = (attempt.lease.term.0, attempt.lease.attempt.0);
            running
                .eye
                .watched()
                .attempts
                .insert(attempt.lease.attempt, lease);
        }
        check(state).map_err(|broken| format!("after a start: {broken}"))?;
        let index = match self.on_disk.get(&machine) {
            Some(index) => *index,
            None => {
                self.histories.push(History::default());
                let index = self.histories.len() - 1;
                self.on_disk.insert(machine, index);
                index
            }
        };
        self.inherit(index, state)?;
        for seen in self.doubtful.remove(&machine).unwrap_or_default() {
            if is_durable(state, &seen) {
                self.keep(now, index, &seen)?;
            }
        }
        for seen in running_events(&self.running, machine) {
            self.keep(now, index, &seen)?;
        }
        let Some(history) = self.histories.get(index) else {
            return Ok(());
        };
        compare(history, state)
    }

    /// A turn's events were applied, and may be durable or not.
    ///
    /// # Errors
    /// The first invariant that one of them broke.
    pub fn witnessed(&mut self, machine: usize) -> Result<(), String> {
        let Some(running) = self.running.get(&machine) else {
            return Ok(());
        };
        let broken = running.eye.watched().broken.take();
        broken.map_or(Ok(()), Err)
    }

    /// A turn is durable.
    ///
    /// # Errors
    /// What must not have happened.
    pub fn committed(&mut self, now: Time, machine: usize) -> Result<(), String> {
        let Some(index) = self.on_disk.get(&machine).copied() else {
            return Ok(());
        };
        for seen in running_events(&self.running, machine) {
            self.keep(now, index, &seen)?;
        }
        Ok(())
    }

    /// A turn was undone: nothing of it has happened.
    pub fn undone(&mut self, machine: usize) {
        drop(running_events(&self.running, machine));
    }

    /// A coordinator has ended; what it had not said to be durable may be or not.
    pub fn ended(&mut self, machine: usize) {
        let events = running_events(&self.running, machine);
        self.doubtful.entry(machine).or_default().extend(events);
        self.running.remove(&machine);
    }

    fn keep(&mut self, now: Time, index: usize, seen: &Seen) -> Result<(), String> {
        self.events += 1;
        let Some(history) = self.histories.get_mut(index) else {
            return Ok(());
        };
        if let Event::JobSubmitted { job, request_id, .. } = &seen.event
            && let Some(request_id) = request_id
            && let Some((other, _)) = history.jobs.insert(request_id.clone(), (*job, now))
        {
            return Err(format!("request {request_id} made {other} and {job}"));
        }
        if let Event::StagesPlanned { job, stages, .. } = &seen.event {
            let tasks = stages.iter().flat_map(|stage| &stage.tasks);
            history.job_of.extend(tasks.map(|task| (task.id, *job)));
        }
        if let Some((job, left)) = &seen.left {
            history.forget(*job, left);
        }
        let Some(task) = seen.task else { return Ok(()) };
        history.spend(task, seen)?;
        match &seen.event {
            Event::AttemptStarted { .. } | Event::GangFormed { .. } => match history.promoted.get(&task) {
                Some((by, _)) => Err(format!(
                    "task {task} is done by {by:?} and begins again: {:?}",
                    seen.event
                )),
                None => Ok(()),
            },
            Event::GangEnded { completed: false, .. } => Ok(()),
            Event::GangEnded { .. } => {
                let by = seen
                    .done_by
                    .ok_or_else(|| format!("task {task} is not done by its gang"))?;
                let attempt = history.ranks.get(&by).copied();
                let attempt =
                    attempt.ok_or_else(|| format!("task {task} is done by {by}, no rank of its"))?;
                history.promote(now, task, attempt)
            }
            Event::AttemptCompleted { output, .. } => {
                let attempt = history.end(seen, Fate::Promoted)?;
                is_of(output, attempt)?;
                history.promote(now, task, attempt)
            }
            Event::RankCompleted { attempt, output, .. } => {
                let lease = history.end(seen, Fate::RankDone)?;
                history.ranks.insert(*attempt, lease);
                if output.as_str().is_empty() {
                    Ok(())
                } else {
                    is_of(output, lease)
                }
            }
            Event::AttemptFailed { .. } => history.end(seen, Fate::Failed).map(drop),
            Event::AttemptLost { .. } => history.end(seen, Fate::Lost).map(drop),
            Event::AttemptHandedBack { .. } => history.end(seen, Fate::HandedBack).map(drop),
            Event::AttemptStopped { .. } => history.end(seen, Fate::Stopped).map(drop),
            _ => Ok(()),
        }
    }

    /// A coordinator sends to a worker.
    ///
    /// # Errors
    /// What it must not send.
    pub fn sent(&mut self, machine: usize, message: &CoordinatorMessage) -> Result<(), String> {
        let Some(running) = self.running.get_mut(&machine) else {
            return Ok(());
        };
        if let Some(FromCoordinator::Welcome(_)) = &message.message
            && !running.served
        {
            running.served = true;
            self.highest_served = self.highest_served.max(running.term);
        }
        if let Some(FromCoordinator::Release(release)) = &message.message
            && release.addresses.iter().any(String::is_empty)
        {
            return Err(format!(
                "a gang is released that is not whole: {:?}",
                release.addresses
            ));
        }
        if let Some(FromCoordinator::Acknowledged(acknowledged)) = &message.message
            && let Some(lease) = &acknowledged.lease
            && running.term < self.highest_served
            && self.completed.contains_key(&(lease.term, lease.attempt))
        {
            return Err(format!(
                "term {} promotes attempt {} of term {} although term {} serves",
                running.term, lease.attempt, lease.term, self.highest_served
            ));
        }
        Ok(())
    }

    /// A device completed an attempt.
    pub fn completed(&mut self, lease: &Lease, task: u64) {
        self.completed.insert((lease.term, lease.attempt), task);
    }

    /// A worker was told that an end is durable, and forgets it.
    ///
    /// # Errors
    /// When no journal has taken it.
    pub fn acknowledged(&mut self, worker: usize, lease: &Lease) -> Result<(), String> {
        let attempt = (lease.term, lease.attempt);
        if !self.completed.contains_key(&attempt) {
            return Ok(());
        }
        let fates: Vec<Fate> = self
            .histories
            .iter()
            .filter_map(|history| history.fates.get(&attempt).copied())
            .collect();
        if fates.contains(&Fate::Promoted) || fates.contains(&Fate::RankDone) {
            self.acknowledged.insert(attempt);
            return Ok(());
        }
        // Its job had ended, and nobody wants the result.
        if fates.contains(&Fate::Stopped) {
            return Ok(());
        }
        // After a disk was lost: the release of a gang is not known any more, or a completion that came once
        // more has the number of another attempt that is done.
        let after_loss = self.histories.len() > 1;
        if after_loss && (fates.is_empty() || fates.contains(&Fate::HandedBack)) {
            return Ok(());
        }
        Err(format!(
            "worker {worker} was told that its completion of {attempt:?} is durable, but its fates are {fates:?}"
        ))
    }

    /// A user was told which job a submission made.
    ///
    /// # Errors
    /// When it was told otherwise before, or no journal has it.
    pub fn accepted(&mut self, request_id: &str, job: JobId) -> Result<(), String> {
        let known = self
            .histories
            .iter()
            .any(|history| history.jobs.get(request_id).is_some_and(|(made, _)| *made == job));
        if !known {
            return Err(format!(
                "request {request_id} was said to have made {job}, which is not durable"
            ));
        }
        let before = self.accepted.insert(request_id.to_owned(), job);
        match before.filter(|before| *before != job) {
            Some(before) => Err(format!(
                "request {request_id} was said to have made {before}, and now {job}"
            )),
            None => Ok(()),
        }
    }

    /// A device begins an attempt.
    ///
    /// # Errors
    /// When its result is acknowledged already.
    pub fn begins(&mut self, worker: usize, lease: &Lease, task: u64) -> Result<(), String> {
        let attempt = (lease.term, lease.attempt);
        if self.acknowledged.contains(&attempt) {
            return Err(format!(
                "worker {worker} begins {attempt:?} of task {task} after its acknowledgement"
            ));
        }
        Ok(())
    }

    /// Looks at everything once more.
    ///
    /// # Errors
    /// What is broken.
    pub fn at_the_end(&self, machine: usize, state: &State) -> Result<(), String> {
        check(state).map_err(|broken| format!("at the end: {broken}"))?;
        let history = self
            .on_disk
            .get(&machine)
            .and_then(|index| self.histories.get(*index));
        let Some(history) = history else { return Ok(()) };
        compare(history, state)?;
        for (request_id, job) in &self.accepted {
            if history.jobs.get(request_id).is_none_or(|(made, _)| made != job) {
                return Err(format!("{job} of request {request_id} is gone at the end"));
            }
        }
        Ok(())
    }

    /// How many completions workers were told are durable.
    pub fn acknowledged_count(&self) -> usize {
        self.acknowledged.len()
    }
}

/// Takes what a coordinator's eye has seen since it was last asked.
fn running_events(running: &BTreeMap<usize, Running>, machine: usize) -> Vec<Seen> {
    let Some(running) = running.get(&machine) else {
        return Vec::new();
    };
    std::mem::take(&mut running.eye.watched().seen)
}

/// Whether an event of a turn that was cut short is in the journal.
fn is_durable(state: &State, seen: &Seen) -> bool {
    let (ids, task) = about(&seen.event);
    let known = task.and_then(|task| state.task(task));
    match &seen.event {
        Event::JobSubmitted { job, .. } => state.job(*job).is_some(),
        Event::StagesPlanned { stages, .. } => {
            let first = stages.iter().find_map(|stage| stage.tasks.first());
            first.is_some_and(|task| state.task(task.id).is_some())
        }
        Event::AttemptCompleted { attempt, .. } => known.and_then(done_by) == Some(*attempt),
        Event::GangEnded { completed: true, .. } => known.and_then(done_by).is_some(),
        // Nothing hangs on whether these were made durable, or the state no longer tells.
        Event::AttemptStarted { .. } | Event::GangFormed { .. } | Event::GangEnded { .. } => false,
        _ => ids.first().is_some_and(|id| state.attempt(*id).is_none()) && known.is_some(),
    }
}

/// Whether a state that was replayed has everything that its journal made durable.
fn compare(history: &History, state: &State) -> Result<(), String> {
    for (task, (attempt, _)) in &history.promoted {
        // Of an archived job nothing is left but a summary.
        let Some(known) = state.task(*task) else {
            if history
                .job_of
                .get(task)
                .is_some_and(|job| state.summary(*job).is_some())
            {
                continue;
            }
            return Err(format!("task {task} was lost, which {attempt:?} had done"));
        };
        match done_by(known) {
            Some(by) if by.0 == attempt.1 => {}
            by => {
                return Err(format!(
                    "the completion of {attempt:?} was lost: task {task} is done by {by:?}"
                ));
            }
        }
    }
    for (task, before) in &history.budgets {
        let Some(known) = state.task(*task) else { continue };
        let now = budget(known);
        if is_below(&now, before) {
            return Err(format!(
                "the budget of task {task} was {before:?}, and after a start {now:?}"
            ));
        }
    }
    for (request_id, (job, _)) in &history.jobs {
        let active = state.job(*job).map(|known| known.request_id.as_ref());
        let archived = state.summary(*job).map(|known| known.request_id.as_ref());
        if active.or(archived) != Some(Some(request_id)) {
            return Err(format!("{job} of request {request_id} was lost"));
        }
    }
    Ok(())
}
