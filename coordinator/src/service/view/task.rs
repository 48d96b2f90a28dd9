//! Tasks and their attempts as people see them.

use std::collections::BTreeMap;

use espalier_proto::task::Progress;
use espalier_proto::v1;

use crate::scheduler::{AttemptId, State, Task, TaskPhase};
use crate::service::history::History;
use crate::tables::{AttemptOutcome, AttemptRow};

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

/// The attempt that a task is done by, for who knows no more of it; of a gang, its ranks'.
pub fn done(task: &Task) -> Vec<v1::AttemptDetail> {
    let TaskPhase::Done { attempt, .. } = &task.phase else {
        return Vec::new();
    };
    let ranks = u64::from(task.needs.ranks.max(1));
    let shown = |rank| v1::AttemptDetail {
        id: attempt.0.saturating_add(rank),
        outcome: "completed".to_owned(),
        ..v1::AttemptDetail::default()
    };
    (0..ranks).map(shown).collect()
}

/// The newest attempts at a task, the oldest of them first: what the loop remembers, and where that is less, what
/// the tables know. They follow the loop, so that what runs for them may have ended.
pub fn merged(remembered: Vec<v1::AttemptDetail>, rows: &[&AttemptRow]) -> Vec<v1::AttemptDetail> {
    let mut attempts: BTreeMap<u64, v1::AttemptDetail> = rows.iter().map(|row| shown(row)).collect();
    for mut attempt in remembered {
        let Some(row) = attempts.get_mut(&attempt.id) else {
            attempts.insert(attempt.id, attempt);
            continue;
        };
        if !row.outcome.is_empty() && attempt.outcome != "running" {
            continue;
        }
        if attempt.worker.is_empty() {
            attempt.worker = std::mem::take(&mut row.worker);
        }
        if attempt.device.is_empty() {
            attempt.device = std::mem::take(&mut row.device);
        }
        if attempt.started_unix_ms == 0 {
            attempt.started_unix_ms = row.started_unix_ms;
        }
        *row = attempt;
    }
    let older = attempts.len().saturating_sub(ATTEMPTS_SHOWN);
    attempts.into_values().skip(older).collect()
}

/// A row, whose outcome is left open while it runs: only the loop knows whether it still does.
fn shown(row: &AttemptRow) -> (u64, v1::AttemptDetail) {
    let outcome = match row.outcome {
        AttemptOutcome::Running => String::new(),
        ended => ended.name().to_owned(),
    };
    let attempt = v1::AttemptDetail {
        id: row.attempt.0,
        worker: row.worker.clone(),
        device: row.device.clone(),
        started_unix_ms: row.started_unix_ms,
        ended_unix_ms: row.ended_unix_ms.unwrap_or(0),
        outcome,
        message: row.message.clone(),
        progress: String::new(),
    };
    (row.attempt.0, attempt)
}

/// The attempts at a task that the loop remembers, the oldest first.
pub fn attempts(
    state: &State,
    task: &Task,
    history: &History,
    progress: &BTreeMap<AttemptId, Progress>,
) -> Vec<v1::AttemptDetail> {
    let done = done(task).into_iter().map(|done| (AttemptId(done.id), done));
    let mut attempts: BTreeMap<AttemptId, v1::AttemptDetail> = done.collect();
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
            "attempt_stopped" => "stopped",
            "attempt_handed_back" => "handed_back",
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
    attempts.into_values().collect()
}

fn far(progress: &Progress) -> String {
    let Progress {
        done,
        total,
        unit,
        note,
        went_on_from: _,
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
