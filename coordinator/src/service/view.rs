//! The state as clients see it.

use std::collections::BTreeMap;

use espalier_proto::task::Progress;
use espalier_proto::v1;

use crate::scheduler::{AttemptId, Job, JobPhase, Stage, State, Task, TaskPhase};

/// Tasks of a stage that are listed at the most.
const TASKS_SHOWN: usize = 32;

/// A job without its stages, spec and outcome.
pub fn summary(state: &State, job: &Job, revision: u64) -> v1::Job {
    let (shown, message, finished) = phase(state, job);
    v1::Job {
        id: job.id.to_string(),
        request_id: job.request_id.clone().unwrap_or_default(),
        state: shown.into(),
        message,
        revision,
        submitted_unix_ms: job.submitted_at,
        started_unix_ms: job.started_at.unwrap_or(0),
        finished_unix_ms: finished.unwrap_or(0),
        stages: Vec::new(),
        spec_json: String::new(),
        output: job.output.clone(),
        outcome_json: String::new(),
        parent: job.parent.clone(),
        priority: 0,
    }
}

/// A whole job.
pub fn job(
    state: &State,
    job: &Job,
    revision: u64,
    progress: &BTreeMap<AttemptId, Progress>,
    now: i64,
) -> v1::Job {
    let ended = job.phase.is_terminal();
    let now = phase(state, job).2.unwrap_or(now);
    let mut whole = summary(state, job, revision);
    job.spec.as_str().clone_into(&mut whole.spec_json);
    whole.stages = job
        .stages
        .iter()
        .map(|shown| stage(state, shown, ended, progress, now))
        .collect();
    if let JobPhase::Succeeded { outcome, .. } = &job.phase {
        outcome.as_str().clone_into(&mut whole.outcome_json);
    }
    whole
}

fn phase(state: &State, job: &Job) -> (v1::JobState, String, Option<i64>) {
    use v1::JobState as Shown;
    match &job.phase {
        JobPhase::Active if job.started_at.is_none() => (Shown::Queued, waits(state, job), None),
        JobPhase::Active => (Shown::Running, waits(state, job), None),
        JobPhase::Finishing { .. } => (Shown::Running, "writing the outcome".to_owned(), None),
        JobPhase::Succeeded { at, .. } => (Shown::Succeeded, String::new(), Some(*at)),
        JobPhase::Failed {
            message,
            removed: false,
            ..
        } => (Shown::Running, format!("stopping: {message}"), None),
        JobPhase::Failed { message, at, .. } => (Shown::Failed, message.clone(), Some(*at)),
        JobPhase::Cancelled {
            reason,
            removed: false,
            ..
        } => (Shown::Running, format!("stopping: cancelled: {reason}"), None),
        JobPhase::Cancelled { reason, at, .. } => (Shown::Cancelled, reason.clone(), Some(*at)),
    }
}

/// Why nothing of the job runs, when nothing does.
fn waits(state: &State, job: &Job) -> String {
    state.why_waiting(job.id).unwrap_or_default()
}

fn stage(
    state: &State,
    stage: &Stage,
    job_ended: bool,
    progress: &BTreeMap<AttemptId, Progress>,
    now: i64,
) -> v1::Stage {
    let done = stage.done == stage.tasks.len();
    let shown = if done {
        v1::StageState::Done
    } else if job_ended {
        v1::StageState::Stopped
    } else if stage.started_at.is_some() {
        v1::StageState::Running
    } else {
        v1::StageState::Waiting
    };
    let matters = |task: &&Task| match task.phase {
        TaskPhase::Running { .. } | TaskPhase::Gang(_) | TaskPhase::Failed => true,
        TaskPhase::Waiting => task.failures() != crate::scheduler::Failures::default(),
        TaskPhase::Done { .. } | TaskPhase::Abandoned => false,
    };
    let active = if done {
        Vec::new()
    } else {
        state
            .stage_tasks(stage)
            .filter(matters)
            .take(TASKS_SHOWN)
            .map(|shown| task(state, shown, progress, now))
            .collect()
    };
    let elapsed = stage
        .started_at
        .map_or(0, |start| stage.finished_at.unwrap_or(now) - start);
    v1::Stage {
        name: stage.name.clone(),
        kind: stage.kind.to_string(),
        state: shown.into(),
        tasks: count(stage.tasks.len()),
        tasks_done: count(stage.done),
        active,
        decision: stage.note.clone(),
        elapsed_ms: u64::try_from(elapsed).unwrap_or(0),
    }
}

fn task(state: &State, task: &Task, progress: &BTreeMap<AttemptId, Progress>, now: i64) -> v1::Task {
    let attempt = match &task.phase {
        TaskPhase::Running { attempt } => state.attempt(*attempt),
        // The first rank speaks for its gang.
        TaskPhase::Gang(gang) => gang.live().next().and_then(|first| state.attempt(first)),
        _ => None,
    };
    let worker = attempt.and_then(|attempt| state.worker(attempt.worker));
    let progress = attempt.and_then(|attempt| progress.get(&attempt.lease.attempt));
    let elapsed = attempt.map_or(0, |attempt| now - attempt.started_at);
    v1::Task {
        id: task.id.0,
        name: task.name.to_string(),
        worker: worker.map(|worker| worker.name.clone()).unwrap_or_default(),
        device: attempt
            .map(|attempt| attempt.device.to_string())
            .unwrap_or_default(),
        attempt: attempt.map_or(0, |attempt| attempt.lease.attempt.0),
        failures: task.failures().own().saturating_add(task.failures().worker_lost),
        last_failure: task.last_failure().unwrap_or_default().to_owned(),
        done: progress.map_or(0, |progress| progress.done),
        total: progress.map_or(0, |progress| progress.total),
        unit: progress.map(|progress| progress.unit.clone()).unwrap_or_default(),
        note: progress.map(|progress| progress.note.clone()).unwrap_or_default(),
        elapsed_ms: u64::try_from(elapsed).unwrap_or(0),
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
