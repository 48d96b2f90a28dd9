//! The line that `job events` shows for an event.

use super::keys;
use super::rows::{AttemptRow, EventRow, TaskRow};
use super::store::Change;
use crate::scheduler::{AttemptId, Event, JobId, TaskId, WorkerId};

/// One event's place in the journal.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Its frame.
    pub frame: u64,
    /// Its place in the frame.
    pub index: u64,
}

/// The line, and whose job it is; none for what is not shown.
pub fn event_row(
    change: &Change<'_>,
    place: Place,
    event: &Event,
) -> Result<Option<(JobId, EventRow)>, String> {
    let Some(told) = tell(event) else {
        return Ok(None);
    };
    let row = change.get::<TaskRow>(&keys::task(told.task))?;
    let Some(job) = told.job.or_else(|| row.as_ref().map(|row| row.job)) else {
        return Ok(None);
    };
    let worker = match told.worker {
        Some(worker) => worker_name(change, worker)?,
        None => {
            let key = keys::attempt(told.task, told.attempt);
            change
                .get::<AttemptRow>(&key)?
                .map(|row| row.worker)
                .unwrap_or_default()
        }
    };
    let message = match row {
        Some(row) if told.message.is_empty() => format!("{}: {}", row.stage, row.name),
        Some(row) => format!("{}: {}: {}", row.stage, row.name, told.message),
        None => told.message,
    };
    Ok(Some((
        job,
        EventRow {
            frame: place.frame,
            unix_ms: told.at,
            kind: told.kind.to_owned(),
            task: told.task.0,
            attempt: told.attempt.0,
            worker,
            message,
        },
    )))
}

#[derive(Default)]
struct Told {
    kind: &'static str,
    job: Option<JobId>,
    task: TaskId,
    attempt: AttemptId,
    worker: Option<WorkerId>,
    message: String,
    at: i64,
}

fn tell(event: &Event) -> Option<Told> {
    tell_of_job(event).or_else(|| tell_of_task(event))
}

fn tell_of_job(event: &Event) -> Option<Told> {
    let (kind, job, message, at) = match event {
        Event::JobSubmitted { job, parent, at, .. } => ("job_submitted", job, parent.clone(), *at),
        Event::JobPaused { job, reason, at } => ("job_paused", job, reason.clone(), *at),
        Event::JobResumed { job, at } => ("job_resumed", job, String::new(), *at),
        Event::JobRetried { job, at, .. } => ("job_retried", job, String::new(), *at),
        Event::StagesPlanned { job, stages, .. } => {
            let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
            ("stages_planned", job, names.join(", "), 0)
        }
        Event::OutcomeReached { job, .. } => ("outcome_reached", job, String::new(), 0),
        Event::JobSucceeded { job, at } => ("job_succeeded", job, String::new(), *at),
        Event::JobFailed { job, message, at } => ("job_failed", job, message.clone(), *at),
        Event::JobCancelled { job, reason, at } => ("job_cancelled", job, reason.clone(), *at),
        _ => return None,
    };
    Some(Told {
        kind,
        job: Some(*job),
        message,
        at,
        ..Told::default()
    })
}

fn tell_of_task(event: &Event) -> Option<Told> {
    let (kind, task, attempt, worker, at) = match event {
        Event::AttemptStarted {
            attempt,
            task,
            worker,
            at,
            ..
        } => ("attempt_started", task, *attempt, Some(*worker), *at),
        Event::AttemptCompleted {
            attempt, task, at, ..
        } => ("attempt_completed", task, *attempt, None, *at),
        Event::AttemptFailed {
            attempt, task, at, ..
        } => ("attempt_failed", task, *attempt, None, *at),
        Event::AttemptLost {
            attempt, task, at, ..
        } => ("attempt_lost", task, *attempt, None, *at),
        Event::AttemptHandedBack { attempt, task, at } => ("attempt_handed_back", task, *attempt, None, *at),
        Event::RankCompleted {
            attempt, task, at, ..
        } => ("rank_completed", task, *attempt, None, *at),
        Event::GangLate { task, at, .. } => ("gang_late", task, AttemptId(0), None, *at),
        Event::AttemptStopped { attempt, task } => ("attempt_stopped", task, *attempt, None, 0),
        Event::GangFormed { task, at, .. } => ("gang_formed", task, AttemptId(0), None, *at),
        Event::GangReleased { task, .. } => ("gang_released", task, AttemptId(0), None, 0),
        Event::GangEnded { task, at, .. } => ("gang_ended", task, AttemptId(0), None, *at),
        _ => return None,
    };
    let message = match event {
        Event::AttemptFailed { failure, .. } => failure.message.clone(),
        _ => String::new(),
    };
    Some(Told {
        kind,
        task: *task,
        attempt,
        worker,
        message,
        at,
        ..Told::default()
    })
}

/// As it introduced itself.
pub fn worker_name(change: &Change<'_>, worker: WorkerId) -> Result<String, String> {
    Ok(change
        .get(&keys::worker(worker))?
        .unwrap_or_else(|| format!("worker {worker}")))
}
