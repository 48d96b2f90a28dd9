//! What happens to an attempt.

use espalier_proto::task::{Failure, FailureKind};

use super::gang;
use super::job::{line_up, step_out};
use crate::scheduler::retry::is_evidence;
use crate::scheduler::{
    Attempt, AttemptId, Evidence, GangPlace, Lease, Name, Payload, State, TaskId, TaskPhase, WorkerId,
};

/// Tasks in a row that a worker is remembered to have failed.
const ROW_KEPT: usize = 8;
/// Bytes of a failure's message that are kept as evidence.
const EVIDENCE_BYTES: usize = 400;

pub fn started(
    state: &mut State,
    attempt: AttemptId,
    task_id: TaskId,
    worker: WorkerId,
    device: &Name,
    at: i64,
) {
    if !state.tasks.contains_key(&task_id) || !state.workers.contains_key(&worker) {
        return;
    }
    step_out(state, task_id);
    if let Some(task) = state.task_mut(task_id) {
        task.phase = TaskPhase::Running { attempt };
    }
    mark_started(state, task_id, at);
    seize(state, attempt, task_id, worker, device, None, at);
}

/// Notes the first start of a task's stage and job.
pub fn mark_started(state: &mut State, task: TaskId, at: i64) {
    let Some(task) = state.tasks.get(&task) else {
        return;
    };
    let Some(job) = state.jobs.get_mut(&task.job) else {
        return;
    };
    job.started_at.get_or_insert(at);
    if let Some(stage) = job.stages.get_mut(task.stage) {
        stage.started_at.get_or_insert(at);
    }
}

/// Gives a device to an attempt.
pub fn seize(
    state: &mut State,
    attempt: AttemptId,
    task_id: TaskId,
    worker_id: WorkerId,
    device: &Name,
    place: Option<GangPlace>,
    at: i64,
) {
    state.last_attempt = state.last_attempt.max(attempt);
    let Some(task) = state.tasks.get(&task_id) else {
        return;
    };
    let Some(worker) = state.workers.get_mut(&worker_id) else {
        return;
    };
    let named = |candidate: &crate::scheduler::Device| candidate.info.id == *device;
    if let Some(index) = worker.devices.iter().position(named)
        && let Some(device) = worker.devices.get_mut(index)
    {
        device.attempt = Some(attempt);
        device.last = Some((task.job, task.kind.clone()));
        state.index.withdraw_device(&device.info.kind, worker_id, index);
    }
    let running = Attempt {
        lease: Lease {
            term: state.term,
            epoch: worker.epoch,
            attempt,
        },
        task: task_id,
        job: task.job,
        worker: worker_id,
        device: device.clone(),
        exclusive: task.exclusive,
        cancelled: false,
        let_go: false,
        place,
        started_at: at,
    };
    state.index.begin(&running, worker.host.clone());
    state.attempts.insert(attempt, running);
}

/// Takes the attempt from its device.
pub fn release(state: &mut State, attempt: AttemptId) -> Option<Attempt> {
    let ended = state.attempts.remove(&attempt)?;
    let Some(worker) = state.workers.get_mut(&ended.worker) else {
        return Some(ended);
    };
    state.index.end(&ended, &worker.host);
    let usable = worker.is_usable();
    let holds = |device: &crate::scheduler::Device| device.attempt == Some(attempt);
    if let Some(place) = worker.devices.iter().position(holds)
        && let Some(device) = worker.devices.get_mut(place)
    {
        device.attempt = None;
        if usable {
            state.index.offer_device(&device.info.kind, ended.worker, place);
        }
    }
    Some(ended)
}

pub fn completed(state: &mut State, attempt: AttemptId, output: &Payload, at: i64) {
    let Some(ended) = release(state, attempt) else {
        return;
    };
    if let Some(worker) = state.workers.get_mut(&ended.worker) {
        worker.failed_in_a_row.clear();
    }
    let is_its_own =
        |phase: &TaskPhase| matches!(phase, TaskPhase::Running { attempt: running } if *running == attempt);
    let Some(task) = state.task_mut(ended.task).filter(|task| is_its_own(&task.phase)) else {
        return;
    };
    task.phase = TaskPhase::Done {
        attempt,
        output: output.clone(),
    };
    state.index.completed.insert(attempt, ended.task);
    count_done(state, ended.task, at);
}

/// Counts a task that is done; the stage's last one is a result for the planner.
pub fn count_done(state: &mut State, task: TaskId, at: i64) {
    let Some(task) = state.tasks.get(&task) else {
        return;
    };
    let Some(job) = state.jobs.get_mut(&task.job) else {
        return;
    };
    let Some(stage) = job.stages.get_mut(task.stage) else {
        return;
    };
    stage.done = stage.done.saturating_add(1);
    if stage.done == stage.tasks.len() {
        stage.finished_at = Some(at);
        job.results = job.results.saturating_add(1);
    }
}

pub fn failed(state: &mut State, attempt: AttemptId, failure: &Failure, retry: bool) {
    let Some(ended) = release(state, attempt) else {
        return;
    };
    if is_evidence(failure.kind)
        && let Some(worker) = state.workers.get_mut(&ended.worker)
    {
        worker.failed_in_a_row.retain(|task| *task != ended.task);
        if worker.failed_in_a_row.len() >= ROW_KEPT {
            worker.failed_in_a_row.remove(0);
        }
        worker.failed_in_a_row.push(ended.task);
    }
    if let Some(task) = state.task_mut(ended.task) {
        let trouble = task.trouble_mut();
        trouble.failures.count(failure.kind);
        trouble.last_failure = Some(failure.message.clone());
        if failure.kind != FailureKind::RankLost {
            trouble.failed_on = Some(ended.worker);
        }
        let known = trouble.evidence.iter().any(|known| known.worker == ended.worker);
        if is_evidence(failure.kind) && !known {
            trouble.evidence.push(Evidence {
                worker: ended.worker,
                message: shortened(&failure.message),
            });
        }
    }
    wait_or_fail(state, attempt, ended.task, retry);
}

fn shortened(message: &str) -> String {
    let longest = message.len().min(EVIDENCE_BYTES);
    let end = (0..=longest).rev().find(|end| message.is_char_boundary(*end));
    message.get(..end.unwrap_or(0)).unwrap_or_default().to_owned()
}

pub fn went_on(state: &mut State, id: TaskId, done: u64) {
    if let Some(trouble) = state.task_mut(id).and_then(|task| task.trouble.as_mut()) {
        trouble.begin_again();
        trouble.went_on_from = done;
    }
}

pub fn lost(state: &mut State, attempt: AttemptId, retry: bool) {
    let Some(ended) = release(state, attempt) else {
        return;
    };
    #[cfg(feature = "planted-bugs")]
    crate::scheduler::planted::remember_lost(attempt, ended.task);
    if let Some(task) = state.task_mut(ended.task) {
        let trouble = task.trouble_mut();
        trouble.failures.worker_lost = trouble.failures.worker_lost.saturating_add(1);
        trouble.last_failure = Some("the worker was lost".to_owned());
    }
    wait_or_fail(state, attempt, ended.task, retry);
}

pub fn handed_back(state: &mut State, attempt: AttemptId) {
    let Some(ended) = release(state, attempt) else {
        return;
    };
    if let Some(task) = state.task_mut(ended.task) {
        let trouble = task.trouble_mut();
        trouble.failures.handed_back = trouble.failures.handed_back.saturating_add(1);
    }
    wait_or_fail(state, attempt, ended.task, true);
}

pub fn stopped(state: &mut State, attempt: AttemptId) {
    if let Some(ended) = release(state, attempt) {
        gang::rank_ended(state, attempt, ended.task);
    }
}

/// What becomes of a task that an attempt at it did not complete.
fn wait_or_fail(state: &mut State, attempt: AttemptId, id: TaskId, retry: bool) {
    gang::rank_ended(state, attempt, id);
    let Some(task) = state.task_mut(id) else {
        return;
    };
    match (&task.phase, retry) {
        (TaskPhase::Running { .. }, true) => {
            task.phase = TaskPhase::Waiting;
            line_up(state, id);
        }
        (TaskPhase::Running { .. }, false) => task.phase = TaskPhase::Failed,
        (TaskPhase::Gang(_), _) => gang::break_up(state, id, retry),
        _ => {}
    }
}
