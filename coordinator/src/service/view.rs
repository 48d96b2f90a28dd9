//! The state as clients see it. No view costs more for a job of more tasks.

use std::collections::{BTreeMap, BTreeSet};

use espalier_proto::task::Progress;
use espalier_proto::v1;

use crate::scheduler::{
    AttemptId, Ended, Job, JobId, JobPhase, Stage, State, Summary, Task, TaskId, TaskPhase, WorkerId,
};

mod task;
mod worker;

pub use task::{attempts, detail, done, merged, output, task_state};
pub use worker::worker;

/// Tasks of a stage that are listed at the most.
const TASKS_SHOWN: usize = 32;

/// What a view needs beside the state.
#[derive(Debug, Clone, Copy)]
pub struct Beside<'a> {
    /// How far attempts have come.
    pub progress: &'a BTreeMap<AttemptId, Progress>,
    /// Tasks that failed and are not done since.
    pub troubled: &'a BTreeSet<(JobId, TaskId)>,
    /// Workers that cannot be told at the moment.
    pub absent: &'a BTreeSet<WorkerId>,
    /// Tasks that rest after a failure.
    pub resting: &'a BTreeSet<TaskId>,
    /// Milliseconds since 1970.
    pub now: i64,
}

/// A job without its stages, spec and outcome.
pub fn summary(state: &State, job: &Job, revision: u64, beside: Beside<'_>) -> v1::Job {
    let (message, finished) = reason(state, job, beside);
    v1::Job {
        id: job.id.to_string(),
        request_id: job.request_id.clone().unwrap_or_default(),
        state: job_state(job).into(),
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
        priority: job.priority,
    }
}

/// Where a job stands, whose tasks have left the state.
pub fn archived_state(job: &Summary) -> v1::JobState {
    match job.ended {
        Ended::Succeeded => v1::JobState::Succeeded,
        Ended::Failed => v1::JobState::Failed,
        Ended::Cancelled => v1::JobState::Cancelled,
    }
}

/// Where a job stands.
pub fn job_state(job: &Job) -> v1::JobState {
    use v1::JobState as Shown;
    match &job.phase {
        JobPhase::Active if job.paused.is_some() => Shown::Paused,
        JobPhase::Active if job.started_at.is_none() => Shown::Queued,
        JobPhase::Active | JobPhase::Finishing { .. } => Shown::Running,
        JobPhase::Succeeded { .. } => Shown::Succeeded,
        // Until it has stopped.
        JobPhase::Failed { removed: false, .. } | JobPhase::Cancelled { removed: false, .. } => {
            Shown::Running
        }
        JobPhase::Failed { .. } => Shown::Failed,
        JobPhase::Cancelled { .. } => Shown::Cancelled,
    }
}

/// A job whose tasks have left the state.
pub fn archived(job: &Summary, revision: u64) -> v1::Job {
    v1::Job {
        id: job.id.to_string(),
        request_id: job.request_id.clone().unwrap_or_default(),
        state: archived_state(job).into(),
        message: job.message.clone(),
        revision,
        submitted_unix_ms: job.submitted_at,
        started_unix_ms: job.started_at.unwrap_or(0),
        finished_unix_ms: job.ended_at,
        output: job.output.clone(),
        parent: job.parent.clone(),
        priority: job.priority,
        ..v1::Job::default()
    }
}

/// A whole job.
pub fn job(state: &State, job: &Job, revision: u64, beside: Beside<'_>) -> v1::Job {
    let mut whole = snapshot(state, job, revision, beside);
    job.spec.as_str().clone_into(&mut whole.spec_json);
    whole
}

/// A job without its spec, for those who follow it.
pub fn snapshot(state: &State, job: &Job, revision: u64, beside: Beside<'_>) -> v1::Job {
    let ended = job.phase.is_terminal();
    let mut whole = summary(state, job, revision, beside);
    let now = match whole.finished_unix_ms {
        0 => beside.now,
        finished => finished,
    };
    let mut active = active(state, job, beside);
    let stages = job.stages.iter().enumerate().map(|(index, shown)| {
        let active = active.remove(&index).unwrap_or_default();
        let active = active.iter().take(TASKS_SHOWN);
        let active = active.filter_map(|task| state.task(*task));
        let active = active.map(|shown| self::task(state, shown, beside.progress, now));
        stage(shown, ended, active.collect(), now)
    });
    whole.stages = stages.collect();
    if let JobPhase::Succeeded { outcome, .. } = &job.phase {
        outcome.as_str().clone_into(&mut whole.outcome_json);
    }
    whole
}

/// Tasks that run or have failed, by the index of their stage.
fn active(state: &State, job: &Job, beside: Beside<'_>) -> BTreeMap<usize, BTreeSet<TaskId>> {
    let running = state.attempts_of(job.id).map(|attempt| attempt.task);
    let all = (job.id, TaskId(0))..=(job.id, TaskId(u64::MAX));
    let troubled = beside.troubled.range(all).map(|(_, task)| *task);
    let mut active: BTreeMap<usize, BTreeSet<TaskId>> = BTreeMap::new();
    for task in running.chain(troubled).filter_map(|task| state.task(task)) {
        active.entry(task.stage).or_default().insert(task.id);
    }
    active
}

/// Why it stands where it does, and when it ended.
fn reason(state: &State, job: &Job, beside: Beside<'_>) -> (String, Option<i64>) {
    match &job.phase {
        JobPhase::Active => {
            let waits = state.why_waiting_beside(job.id, beside.absent, beside.resting);
            (waits.unwrap_or_default(), None)
        }
        JobPhase::Finishing { .. } => ("writing the outcome".to_owned(), None),
        JobPhase::Succeeded { at, .. } => (String::new(), Some(*at)),
        JobPhase::Failed {
            message,
            removed: false,
            ..
        } => (format!("stopping: {message}"), None),
        JobPhase::Failed { message, at, .. } => (message.clone(), Some(*at)),
        JobPhase::Cancelled {
            reason,
            removed: false,
            ..
        } => (format!("stopping: cancelled: {reason}"), None),
        JobPhase::Cancelled { reason, at, .. } => (reason.clone(), Some(*at)),
    }
}

fn stage(stage: &Stage, job_ended: bool, active: Vec<v1::Task>, now: i64) -> v1::Stage {
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
    v1::Stage {
        name: stage.name.clone(),
        kind: stage.kind.to_string(),
        state: shown.into(),
        tasks: count(stage.tasks.len()),
        tasks_done: count(stage.done),
        active,
        decision: stage.note.clone(),
        elapsed_ms: u64::try_from(stage.elapsed_ms(now)).unwrap_or(0),
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
