//! What workers say of attempts, and what it means for tasks, gangs and jobs.

use std::collections::HashSet;

use espalier_proto::task::{Failure, FailureKind};

use super::Decision;
use crate::scheduler::retry::is_evidence;
use crate::scheduler::{
    Attempt, AttemptId, Budget, Event, Gang, JobId, Lease, Now, Payload, RankPhase, Rejection, State, Task,
    TaskId, Token, Worker, WorkerId,
};

/// Distinct tasks in a row whose failure cordons a worker.
const CORDON_AFTER: usize = 3;

pub fn complete(state: &State, worker: WorkerId, lease: Lease, output: Payload, now: Now) -> Decision {
    let held = held(state, worker, lease);
    #[cfg(feature = "planted-bugs")]
    let held = match crate::scheduler::planted::stale_promotion(state, lease.attempt, &output, now) {
        Some(promoted) if held.is_err() => return Ok(promoted),
        _ => held,
    };
    let Some(attempt) = held? else {
        return Ok(Vec::new());
    };
    let (id, at) = (attempt.lease.attempt, now.unix_ms);
    if attempt.cancelled {
        return Ok(Endings::new(state, now).stop(attempt).into());
    }
    let task = attempt.task;
    let Some(gang) = state.task(task).and_then(Task::gang) else {
        return Ok(vec![Event::AttemptCompleted {
            attempt: id,
            task,
            output,
            at,
        }]);
    };
    if !gang.released {
        // It began under a coordinator that lost the end of its journal, the release with it. What the other
        // ranks did cannot be known: the gang forms anew, and nobody is to blame.
        let mut endings = Endings::new(state, now);
        endings.hand_back(attempt);
        return Ok(endings.into());
    }
    let is_first = gang.ranks.first().is_some_and(|first| first.attempt == id);
    let is_last = gang.live().all(|live| live == id);
    let mut events = vec![Event::RankCompleted {
        attempt: id,
        task,
        output: if is_first { output } else { "".into() },
        at,
    }];
    if is_last {
        events.push(Event::GangEnded {
            task,
            generation: gang.generation,
            completed: true,
            at,
        });
    }
    Ok(events)
}

pub fn fail(state: &State, worker: WorkerId, lease: Lease, failure: Failure, now: Now) -> Decision {
    let Some(attempt) = held(state, worker, lease)? else {
        return Ok(Vec::new());
    };
    let mut endings = Endings::new(state, now);
    if attempt.cancelled {
        return Ok(endings.stop(attempt).into());
    }
    let bad_worker = cordon(state, attempt, &failure, now);
    endings.fail(attempt, failure);
    endings.events.extend(bad_worker);
    Ok(endings.into())
}

pub fn stopped(state: &State, worker: WorkerId, lease: Lease, now: Now) -> Decision {
    let Some(attempt) = held(state, worker, lease)? else {
        return Ok(Vec::new());
    };
    let mut endings = Endings::new(state, now);
    if attempt.cancelled {
        return Ok(endings.stop(attempt).into());
    }
    endings.hand_back(attempt);
    Ok(endings.into())
}

pub fn prepared(
    state: &State,
    worker: WorkerId,
    lease: Lease,
    (address, token): (String, Token),
    now: Now,
) -> Decision {
    let Some(attempt) = held(state, worker, lease)? else {
        return Ok(Vec::new());
    };
    let (id, task) = (attempt.lease.attempt, attempt.task);
    let Some(gang) = state.task(task).and_then(Task::gang) else {
        let what = format!("attempt {id} belongs to no gang: it has nothing to prepare");
        return Err(Rejection::Invalid(what));
    };
    if address.is_empty() {
        return Err(Rejection::Invalid("a rank's address is empty".to_owned()));
    }
    let waits = |rank: &&crate::scheduler::Rank| rank.phase == RankPhase::Preparing;
    if attempt.cancelled || !gang.ranks.iter().any(|rank| rank.attempt == id && waits(&rank)) {
        return Ok(Vec::new());
    }
    let mut events = vec![Event::RankPrepared {
        attempt: id,
        task,
        address: address.clone(),
    }];
    let missing = gang.ranks.iter().filter(waits).count();
    let address_of = |rank: &crate::scheduler::Rank| {
        if rank.attempt == id {
            address.clone()
        } else {
            rank.address.clone()
        }
    };
    let is_whole = missing == 1;
    #[cfg(feature = "planted-bugs")]
    let is_whole = is_whole || crate::scheduler::planted::releases_half(gang, missing);
    if is_whole {
        events.push(Event::GangReleased {
            task,
            generation: gang.generation,
            addresses: gang.ranks.iter().map(address_of).collect(),
            token,
            at: now.unix_ms,
        });
    }
    Ok(events)
}

/// Lets the budgets of a task begin again that goes on from further than ever. The first rank speaks for its gang.
pub fn went_on(state: &State, worker: WorkerId, lease: Lease, done: u64, now: Now) -> Decision {
    let Some(attempt) = held(state, worker, lease)? else {
        return Ok(Vec::new());
    };
    let is_first = attempt.place.is_none_or(|place| place.rank == 0);
    let trouble = state.task(attempt.task).and_then(|task| task.trouble.as_ref());
    let is_further =
        trouble.is_some_and(|trouble| trouble.is_held_against_it() && done > trouble.went_on_from);
    if attempt.cancelled || !is_first || !is_further {
        return Ok(Vec::new());
    }
    Ok(vec![Event::TaskWentOn {
        task: attempt.task,
        attempt: lease.attempt,
        done,
        at: now.unix_ms,
    }])
}

/// Lets a gang that is ending end without this rank; nothing where it does not wait for it.
pub fn let_go(state: &State, id: AttemptId, now: Now) -> Vec<Event> {
    let is_awaited = |held: &&Attempt| {
        let gang = state.task(held.task).and_then(Task::gang);
        gang.is_some_and(|gang| gang.ending && gang.live().any(|live| live == id))
    };
    let Some(attempt) = state.attempt(id).filter(is_awaited) else {
        return Vec::new();
    };
    let mut endings = Endings::new(state, now);
    endings.events.push(Event::RankLetGo {
        attempt: id,
        task: attempt.task,
        at: now.unix_ms,
    });
    endings.close_gang(attempt);
    endings.into()
}

/// Ends a generation that has not become ready; nothing where it has, or is over.
pub fn gang_late(state: &State, id: TaskId, generation: u64, now: Now) -> Vec<Event> {
    let Some(task) = state.task(id) else {
        return Vec::new();
    };
    let waits = |gang: &&Gang| gang.generation == generation && !gang.released && !gang.ending;
    if task.gang().filter(waits).is_none() {
        return Vec::new();
    }
    let retry = Budget::allows(&task.failures(), FailureKind::Hung);
    let mut endings = Endings::new(state, now);
    endings.events.push(Event::GangLate {
        task: id,
        generation,
        retry,
        at: now.unix_ms,
    });
    if !retry {
        let what = format!("its ranks were not ready in time, in generation {generation} again");
        endings.break_job(task, &what);
    }
    endings.into()
}

/// Gives up a worker and what it ran.
pub fn lose(state: &State, worker: WorkerId, now: Now) -> Vec<Event> {
    let mut endings = Endings::new(state, now);
    for attempt in state.attempts_on(worker) {
        endings.lose(attempt);
    }
    let given_up = state
        .worker(worker)
        .is_some_and(|known| !known.standing.is_gone());
    if given_up {
        endings.events.push(Event::WorkerLost { worker });
    }
    endings.events
}

/// The attempt that a lease stands for; none when its completion was taken before.
fn held(state: &State, worker: WorkerId, lease: Lease) -> Result<Option<&Attempt>, Rejection> {
    if lease.term > state.term {
        return Err(Rejection::Stale(format!(
            "term {} is above this coordinator's {}: another one has taken over",
            lease.term, state.term
        )));
    }
    if let Some(attempt) = state.attempt(lease.attempt) {
        if attempt.lease == lease && attempt.worker == worker {
            return Ok(Some(attempt));
        }
        return Err(Rejection::Stale(format!(
            "attempt {} is another's",
            lease.attempt
        )));
    }
    if state.completed_before(lease) {
        return Ok(None);
    }
    Err(Rejection::Stale(format!("attempt {} has ended", lease.attempt)))
}

/// Attempts that end otherwise than well, one after another in one decision.
struct Endings<'a> {
    state: &'a State,
    now: Now,
    /// Those that have ended in this decision.
    gone: HashSet<AttemptId>,
    /// Gangs that it breaks up.
    broken_gangs: HashSet<TaskId>,
    /// Jobs that it ends.
    broken_jobs: HashSet<JobId>,
    events: Vec<Event>,
}

impl From<Endings<'_>> for Vec<Event> {
    fn from(endings: Endings<'_>) -> Self {
        endings.events
    }
}

impl<'a> Endings<'a> {
    fn new(state: &'a State, now: Now) -> Self {
        Self {
            state,
            now,
            gone: HashSet::new(),
            broken_gangs: HashSet::new(),
            broken_jobs: HashSet::new(),
            events: Vec::new(),
        }
    }

    /// A cancelled attempt is over.
    fn stop(mut self, attempt: &Attempt) -> Self {
        self.stopped(attempt);
        self
    }

    fn stopped(&mut self, attempt: &Attempt) {
        self.events.push(Event::AttemptStopped {
            attempt: attempt.lease.attempt,
            task: attempt.task,
            at: self.now.unix_ms,
        });
        self.close_gang(attempt);
    }

    /// The attempt went down with its worker.
    fn lose(&mut self, attempt: &Attempt) {
        let over = attempt.cancelled
            || self.broken_jobs.contains(&attempt.job)
            || self.broken_gangs.contains(&attempt.task);
        if over {
            return self.stopped(attempt);
        }
        let Some(task) = self.state.task(attempt.task) else {
            return;
        };
        let retry = Budget::allows_loss(&task.failures());
        self.events.push(Event::AttemptLost {
            attempt: attempt.lease.attempt,
            task: task.id,
            retry,
            at: self.now.unix_ms,
        });
        if !retry {
            let losses = task.failures().worker_lost.saturating_add(1);
            self.break_job(task, &format!("its worker was lost {losses} times"));
        }
        self.close_gang(attempt);
    }

    /// The worker gave the attempt up by itself.
    fn hand_back(&mut self, attempt: &Attempt) {
        self.events.push(Event::AttemptHandedBack {
            attempt: attempt.lease.attempt,
            task: attempt.task,
            at: self.now.unix_ms,
        });
        self.close_gang(attempt);
    }

    /// The attempt failed. Its task is tried again within its budget, unless it failed on two workers.
    fn fail(&mut self, attempt: &Attempt, failure: Failure) {
        let Some(task) = self.state.task(attempt.task) else {
            return;
        };
        let in_budget = Budget::allows(&task.failures(), failure.kind);
        let quarantine = quarantine(self.state, task, attempt.worker, &failure);
        let retry = in_budget && quarantine.is_none();
        let what = match (quarantine, task.failures().own()) {
            (Some(evidence), _) => evidence,
            (None, 0) => failure.message.clone(),
            (None, earlier) => format!("{} (after {earlier} earlier failures)", failure.message),
        };
        self.events.push(Event::AttemptFailed {
            attempt: attempt.lease.attempt,
            task: task.id,
            failure,
            retry,
            at: self.now.unix_ms,
        });
        if !retry {
            self.break_job(task, &what);
        }
        self.close_gang(attempt);
    }

    fn break_job(&mut self, task: &Task, what: &str) {
        self.broken_jobs.insert(task.job);
        let job = self.state.job(task.job);
        let stage = job.and_then(|job| job.stages.get(task.stage));
        let stage = stage.map_or("", |stage| stage.name.as_str());
        let place = if task.name.is_empty() || &*task.name == stage {
            stage.to_owned()
        } else {
            format!("{stage}, {}", task.name)
        };
        self.events.push(Event::JobFailed {
            job: task.job,
            message: format!("{place}: {what}"),
            at: self.now.unix_ms,
        });
    }

    /// Ends the attempt's generation once none of its ranks holds a device, so that the task waits again.
    fn close_gang(&mut self, attempt: &Attempt) {
        if attempt.let_go {
            // Its generation has ended without it, and the next is not concerned.
            return;
        }
        self.gone.insert(attempt.lease.attempt);
        self.broken_gangs.insert(attempt.task);
        if self.broken_jobs.contains(&attempt.job) {
            return;
        }
        let gang: Option<&Gang> = self.state.task(attempt.task).and_then(Task::gang);
        let Some(gang) = gang else {
            return;
        };
        if gang.live().all(|live| self.gone.contains(&live)) {
            self.events.push(Event::GangEnded {
                task: attempt.task,
                generation: gang.generation,
                completed: false,
                at: self.now.unix_ms,
            });
        }
    }
}

/// The evidence of two workers against a task; none while it has failed on one at the most.
fn quarantine(state: &State, task: &Task, worker: WorkerId, failure: &Failure) -> Option<String> {
    if !is_evidence(failure.kind) {
        return None;
    }
    let trouble = task.trouble.as_ref()?;
    let elsewhere = trouble.evidence.iter().find(|known| known.worker != worker)?;
    let name = |worker: WorkerId| state.worker(worker).map_or("?", |worker| worker.name.as_str());
    Some(format!(
        "it failed on two workers: on `{}`: {}; on `{}`: {}",
        name(elsewhere.worker),
        elsewhere.message,
        name(worker),
        failure.message
    ))
}

/// Gives a worker nothing more when one distinct task after another failed on it, unless it is the last
/// of its kind: a slow cluster is better than none.
fn cordon(state: &State, attempt: &Attempt, failure: &Failure, now: Now) -> Option<Event> {
    let worker = state.worker(attempt.worker)?;
    if !is_evidence(failure.kind) || worker.cordon.is_some() {
        return None;
    }
    let others = worker.failed_in_a_row.iter();
    let others = others.filter(|task| **task != attempt.task).count();
    let in_a_row = others.saturating_add(1);
    if in_a_row < CORDON_AFTER || is_last_of_a_kind(state, worker) {
        return None;
    }
    Some(Event::WorkerCordoned {
        worker: worker.id,
        reason: format!(
            "{in_a_row} tasks in a row failed on it, the last with: {}",
            failure.message
        ),
        by_rule: true,
        at: now.unix_ms,
    })
}

fn is_last_of_a_kind(state: &State, worker: &Worker) -> bool {
    let elsewhere = |kind: &str| {
        state
            .workers()
            .any(|other| other.id != worker.id && other.is_usable() && other.has_kind(kind))
    };
    worker.devices.iter().any(|device| !elsewhere(&device.info.kind))
}
