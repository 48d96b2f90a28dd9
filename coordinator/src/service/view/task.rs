//! Tasks and their attempts as people see them.

use std::collections::BTreeMap;

use espalier_proto::task::Progress;
use espalier_proto::v1;

use crate::scheduler::{AttemptId, State, Task, TaskPhase};
use crate::service::history::History;

/// Attempts of a task that are listed at the most.
const ATTEMPTS_SHOWN: usize = 32;

/// Where a task stands.
pub fn task_state(task: &Task) -> v1::TaskState {
    match task.phase {
        TaskPhase::Waiting => v1::TaskState::Waiting,
        TaskPhase::Running { .. } | TaskPhase::Gang(_) => v1::TaskState::Running,
        TaskPhase::Done { .. } => v1::TaskState::Done,
        TaskPhase::Failed => v1::TaskState::Failed,
        TaskPhase::Abandoned => v1::TaskState::Abandoned,
    }
}

/// What a task gave, JSON.
pub fn output(task: &Task) -> Option<&str> {
    match &task.phase {
        TaskPhase::Done { output, .. } => Some(output.as_str()),
        _ => None,
    }
}

/// A task without its attempts, spec and output.
pub fn detail(state: &State, task: &Task, rests: bool) -> v1::TaskDetail {
    let job = state.job(task.job);
    let stage = job.and_then(|job| job.stages.get(task.stage));
    let failure = task.last_failure().unwrap_or_default();
    let message = match task.phase {
        TaskPhase::Waiting if rests => format!("rests after a failure: {failure}"),
        TaskPhase::Waiting if job.is_some_and(|job| job.paused.is_some()) => "its job is paused".to_owned(),
        _ => failure.to_owned(),
    };
    v1::TaskDetail {
        id: task.id.0,
        job_id: task.job.to_string(),
        stage: stage.map(|stage| stage.name.clone()).unwrap_or_default(),
        kind: task.kind.to_string(),
        name: task.name.to_string(),
        state: task_state(task).into(),
        message,
        ranks: task.needs.ranks.max(1),
        attempts: Vec::new(),
        spec_json: String::new(),
        output_json: String::new(),
    }
}

/// The newest attempts at a task, the oldest of them first, as far as they are remembered.
pub fn attempts(
    state: &State,
    task: &Task,
    history: &History,
    progress: &BTreeMap<AttemptId, Progress>,
) -> Vec<v1::AttemptDetail> {
    let mut attempts: BTreeMap<AttemptId, v1::AttemptDetail> = BTreeMap::new();
    for entry in history.of_task(task.job, task.id) {
        let Some(attempt) = entry.attempt else { continue };
        let shown = attempts.entry(attempt).or_insert_with(|| v1::AttemptDetail {
            id: attempt.0,
            ..v1::AttemptDetail::default()
        });
        if let Some(worker) = entry.worker.and_then(|worker| state.worker(worker)) {
            shown.worker.clone_from(&worker.name);
        }
        let outcome = match entry.kind {
            "attempt_started" => {
                shown.started_unix_ms = entry.at;
                continue;
            }
            "attempt_completed" | "rank_completed" => "completed",
            "attempt_failed" => "failed",
            "attempt_lost" => "lost",
            "attempt_stopped" | "attempt_handed_back" => "stopped",
            _ => continue,
        };
        outcome.clone_into(&mut shown.outcome);
        shown.ended_unix_ms = entry.at;
        shown.message = entry.message.to_string();
    }
    for held in state.attempts_of(task.job).filter(|held| held.task == task.id) {
        let worker = state.worker(held.worker).map(|worker| worker.name.clone());
        let shown = v1::AttemptDetail {
            id: held.lease.attempt.0,
            worker: worker.unwrap_or_default(),
            device: held.device.to_string(),
            started_unix_ms: held.started_at,
            outcome: "running".to_owned(),
            progress: progress.get(&held.lease.attempt).map(far).unwrap_or_default(),
            ..v1::AttemptDetail::default()
        };
        attempts.insert(held.lease.attempt, shown);
    }
    let older = attempts.len().saturating_sub(ATTEMPTS_SHOWN);
    attempts.into_values().skip(older).collect()
}

fn far(progress: &Progress) -> String {
    let Progress {
        done,
        total,
        unit,
        note,
    } = progress;
    let of = if *total == 0 {
        String::new()
    } else {
        format!(" of {total}")
    };
    let note = if note.is_empty() {
        String::new()
    } else {
        format!(", {note}")
    };
    format!("{done}{of} {unit}{note}")
}
