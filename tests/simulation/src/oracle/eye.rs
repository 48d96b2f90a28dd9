//! What sees every event of one coordinator as it is applied, with what only the state at that moment can
//! tell, and checks the scheduler's own invariants: for what the event touched, and in full now and then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use espalier_coordinator::scheduler::{
    AttemptId, Event, Failures, JobId, State, Task, TaskId, TaskPhase, check, check_touched,
};
use espalier_coordinator::service::surroundings::Witness;

/// A full check comes every so many events.
const FULL_CHECK: u64 = 1000;

/// Term and number of an attempt: unique over all coordinators.
pub type Attempt = (u64, u64);

/// What a task has used up: the count of the job's retries, and failures since the last.
pub type Budget = (u32, Failures);

/// An event, with what only the state at its moment can tell.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The event.
    pub event: Event,
    /// The journal's frame that holds it, if it became durable.
    pub frame: u64,
    /// Attempts that it is about.
    pub attempts: Vec<(AttemptId, Attempt)>,
    /// The task that it is about.
    pub task: Option<TaskId>,
    /// What that task has used up.
    pub budget: Option<Budget>,
    /// Who did the task, if it is done.
    pub done_by: Option<AttemptId>,
    /// Of a retried job: its tasks that are left.
    pub left: Option<(JobId, BTreeSet<TaskId>)>,
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

    /// Attempts that held a device before there was anything to see.
    pub fn knows(&self, state: &State) {
        let mut watched = self.watched();
        for attempt in state.attempts() {
            let lease = (attempt.lease.term.0, attempt.lease.attempt.0);
            watched.attempts.insert(attempt.lease.attempt, lease);
        }
    }

    /// What was seen since this was last asked.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.watched().seen)
    }

    /// The first invariant that was broken since this was last asked.
    pub fn take_broken(&self) -> Option<String> {
        self.watched().broken.take()
    }
}

impl Witness for Eye {
    fn applied(&self, state: &State, event: &Event, frame: u64) {
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
        let seen = look(&mut watched, state, event, frame);
        watched.seen.push(seen);
    }
}

fn look(watched: &mut Watched, state: &State, event: &Event, frame: u64) -> Seen {
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
        frame,
        attempts,
        task,
        budget: known.map(budget),
        done_by: known.and_then(done_by),
        left,
    }
}

/// What a task has used up.
pub fn budget(task: &Task) -> Budget {
    (task.era(), task.failures())
}

/// Who did a task, if it is done.
pub fn done_by(task: &Task) -> Option<AttemptId> {
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
        | Event::AttemptStopped { attempt, task, .. }
        | Event::TaskWentOn { attempt, task, .. }
        | Event::RankLetGo { attempt, task, .. }
        | Event::RankCompleted { attempt, task, .. } => (vec![*attempt], Some(*task)),
        Event::GangFormed { task, ranks, .. } => {
            (ranks.iter().map(|rank| rank.attempt).collect(), Some(*task))
        }
        Event::GangEnded { task, .. } | Event::GangLate { task, .. } => (Vec::new(), Some(*task)),
        _ => (Vec::new(), None),
    }
}
