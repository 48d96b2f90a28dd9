//! What must hold in every state that [`super::apply`] can reach. Tests and the simulation call it: after
//! every event for what it touched, and now and then for the whole.

mod one;

use super::index::Index;
use super::{Event, JobId, State, TaskId, WorkerId};

/// Checks a whole state.
///
/// # Errors
/// The first rule that is broken, with its evidence.
pub fn check(state: &State) -> Result<(), String> {
    for job in state.jobs() {
        one::job(state, job)?;
    }
    for task in state.tasks() {
        one::task(state, task)?;
    }
    for attempt in state.attempts() {
        one::attempt(state, attempt)?;
    }
    for worker in state.workers() {
        one::worker(state, worker)?;
    }
    for host in state.index.hosts.keys() {
        one::host(state, host)?;
    }
    index(state)
}

/// Checks what an event, already applied, touched. Costs as much as that.
///
/// # Errors
/// The first rule that is broken, with its evidence.
pub fn check_touched(state: &State, event: &Event) -> Result<(), String> {
    let (tasks, workers) = touched(state, event);
    if let Some(job) = job_of(event).and_then(|job| state.job(job)) {
        one::job(state, job)?;
    }
    for task in tasks.iter().filter_map(|task| state.task(*task)) {
        one::task(state, task)?;
        if let Some(job) = state.job(task.job) {
            one::job(state, job)?;
        }
    }
    for worker in workers.iter().filter_map(|worker| state.worker(*worker)) {
        one::worker(state, worker)?;
        one::host(state, &worker.host)?;
        for attempt in state.attempts_on(worker.id) {
            one::attempt(state, attempt)?;
        }
    }
    Ok(())
}

/// The job that an event is about as a whole.
fn job_of(event: &Event) -> Option<JobId> {
    match event {
        Event::JobSubmitted { job, .. }
        | Event::JobPaused { job, .. }
        | Event::JobResumed { job, .. }
        | Event::JobRetried { job, .. }
        | Event::StagesPlanned { job, .. }
        | Event::OutcomeReached { job, .. }
        | Event::JobSucceeded { job, .. }
        | Event::JobFailed { job, .. }
        | Event::JobCancelled { job, .. }
        | Event::PartialRemoved { job }
        | Event::JobArchived { job, .. } => Some(*job),
        _ => None,
    }
}

fn touched(state: &State, event: &Event) -> (Vec<TaskId>, Vec<WorkerId>) {
    let worker_of = |attempt| state.attempt(attempt).map(|held| held.worker);
    match event {
        Event::WorkerJoined { worker, .. }
        | Event::WorkerReturned { worker }
        | Event::WorkerLeaving { worker, .. }
        | Event::WorkerLost { worker }
        | Event::WorkerLeft { worker }
        | Event::WorkerForgotten { worker }
        | Event::WorkerCordoned { worker, .. }
        | Event::WorkerUncordoned { worker, .. }
        | Event::WorkerRestartAsked { worker, .. } => (Vec::new(), vec![*worker]),
        Event::AttemptStarted { task, worker, .. } => (vec![*task], vec![*worker]),
        Event::GangFormed { task, ranks, .. } => {
            let workers = ranks.iter().map(|rank| rank.worker);
            (vec![*task], workers.collect())
        }
        Event::RankPrepared { attempt, task, .. } => (vec![*task], worker_of(*attempt).into_iter().collect()),
        Event::AttemptCompleted { task, .. }
        | Event::AttemptFailed { task, .. }
        | Event::AttemptLost { task, .. }
        | Event::AttemptHandedBack { task, .. }
        | Event::AttemptStopped { task, .. }
        | Event::RankCompleted { task, .. }
        | Event::TaskWentOn { task, .. }
        | Event::RankLetGo { task, .. }
        | Event::GangReleased { task, .. }
        | Event::GangLate { task, .. }
        | Event::GangEnded { task, .. } => (vec![*task], Vec::new()),
        Event::StagesPlanned { stages, .. } => {
            let first = stages.iter().filter_map(|stage| stage.tasks.first());
            (first.map(|task| task.id).collect(), Vec::new())
        }
        Event::JobFailed { job, .. } | Event::JobCancelled { job, .. } => {
            let workers = state.attempts_of(*job).map(|attempt| attempt.worker);
            (Vec::new(), workers.collect())
        }
        Event::TermBegan { .. }
        | Event::JobSubmitted { .. }
        | Event::JobPaused { .. }
        | Event::JobResumed { .. }
        | Event::JobRetried { .. }
        | Event::OutcomeReached { .. }
        | Event::JobSucceeded { .. }
        | Event::PartialRemoved { .. }
        | Event::JobArchived { .. } => (Vec::new(), Vec::new()),
    }
}

/// What is derived equals its definition.
fn index(state: &State) -> Result<(), String> {
    let defined = Index::of(state);
    if defined == state.index {
        return Ok(());
    }
    let differing = [
        ("waiting", defined.waiting != state.index.waiting),
        ("held", defined.held != state.index.held),
        ("free", defined.free != state.index.free),
        ("hosts", defined.hosts != state.index.hosts),
        ("of_job", defined.of_job != state.index.of_job),
        ("of_worker", defined.of_worker != state.index.of_worker),
        ("completed", defined.completed != state.index.completed),
        ("worker_names", defined.worker_names != state.index.worker_names),
        ("request_ids", defined.request_ids != state.index.request_ids),
    ];
    let names = differing.iter().filter(|(_, differs)| *differs);
    let names: Vec<&str> = names.map(|(name, _)| *name).collect();
    Err(format!(
        "the index differs from its definition in {}",
        names.join(", ")
    ))
}
