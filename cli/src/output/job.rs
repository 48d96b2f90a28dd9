//! Jobs, their stages and what happened to them.

use espalier_proto::v1::{Job, JobEvent, JobState, Stage, StageState, Task};
use serde_json::{Value, json};

use super::{Listing, seconds};

/// Jobs, one a row.
pub(crate) fn jobs(jobs: &[Job]) -> Listing {
    let row = |job: &Job| {
        vec![
            job.id.clone(),
            state(job.state()).to_owned(),
            job.parent.clone(),
            job.message.clone(),
            job.output.clone(),
            job.priority.to_string(),
            job.request_id.clone(),
        ]
    };
    Listing {
        heads: vec![
            "JOB", "STATE", "PARENT", "MESSAGE", "OUTPUT", "PRIORITY", "REQUEST",
        ],
        narrow: 4,
        rows: jobs.iter().map(row).collect(),
        values: jobs.iter().map(job_json).collect(),
        below: None,
    }
}

/// One job, its stages below.
pub(crate) fn job(job: &Job) -> Listing {
    let row = |stage: &Stage| {
        vec![
            stage.name.clone(),
            stage_state(stage.state()).to_owned(),
            format!("{}/{}", stage.tasks_done, stage.tasks),
            seconds(stage.elapsed_ms),
            stage.decision.clone(),
        ]
    };
    let stages = Listing {
        heads: vec!["STAGE", "STATE", "TASKS", "TIME", "DECISION"],
        narrow: 5,
        rows: job.stages.iter().map(row).collect(),
        values: Vec::new(),
        below: None,
    };
    Listing {
        below: Some(Box::new(stages)),
        ..jobs(std::slice::from_ref(job))
    }
}

/// What happened, one a row; the id is the task's.
pub(crate) fn events(events: &[JobEvent]) -> Listing {
    let some = |id: u64| if id == 0 { String::new() } else { id.to_string() };
    let row = |event: &JobEvent| {
        vec![
            some(event.task),
            event.kind.clone(),
            some(event.attempt),
            event.worker.clone(),
            event.message.clone(),
            event.unix_ms.to_string(),
        ]
    };
    Listing {
        heads: vec!["TASK", "EVENT", "ATTEMPT", "WORKER", "MESSAGE", "UNIX_MS"],
        narrow: 5,
        rows: events.iter().map(row).collect(),
        values: events.iter().map(event_json).collect(),
        below: None,
    }
}

fn event_json(event: &JobEvent) -> Value {
    json!({
        "unix_ms": event.unix_ms,
        "kind": event.kind,
        "task": event.task,
        "attempt": event.attempt,
        "worker": event.worker,
        "message": event.message,
        "lagged": event.lagged,
    })
}

fn job_json(job: &Job) -> Value {
    let embedded = |text: &str| serde_json::from_str::<Value>(text).unwrap_or(Value::Null);
    json!({
        "id": job.id,
        "request_id": job.request_id,
        "state": state(job.state()),
        "message": job.message,
        "revision": job.revision,
        "submitted_unix_ms": job.submitted_unix_ms,
        "started_unix_ms": job.started_unix_ms,
        "finished_unix_ms": job.finished_unix_ms,
        "parent": job.parent,
        "priority": job.priority,
        "output": job.output,
        "stages": job.stages.iter().map(stage_json).collect::<Vec<_>>(),
        "spec": embedded(&job.spec_json),
        "outcome": embedded(&job.outcome_json),
    })
}

fn stage_json(stage: &Stage) -> Value {
    json!({
        "name": stage.name,
        "kind": stage.kind,
        "state": stage_state(stage.state()),
        "tasks": stage.tasks,
        "tasks_done": stage.tasks_done,
        "active": stage.active.iter().map(active_json).collect::<Vec<_>>(),
        "decision": stage.decision,
        "elapsed_ms": stage.elapsed_ms,
    })
}

fn active_json(task: &Task) -> Value {
    json!({
        "id": task.id,
        "name": task.name,
        "worker": task.worker,
        "device": task.device,
        "attempt": task.attempt,
        "failures": task.failures,
        "last_failure": task.last_failure,
        "done": task.done,
        "total": task.total,
        "unit": task.unit,
        "note": task.note,
        "elapsed_ms": task.elapsed_ms,
    })
}

/// A job's state in one word.
pub(crate) fn state(state: JobState) -> &'static str {
    match state {
        JobState::Unspecified => "unknown",
        JobState::Queued => "queued",
        JobState::Running => "running",
        JobState::Succeeded => "succeeded",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
        JobState::Paused => "paused",
    }
}

/// A stage's state in one word.
pub(crate) fn stage_state(state: StageState) -> &'static str {
    match state {
        StageState::Unspecified => "unknown",
        StageState::Waiting => "waiting",
        StageState::Running => "running",
        StageState::Done => "done",
        StageState::Stopped => "stopped",
    }
}

/// Whether a job can still change.
pub(crate) fn has_ended(job: &Job) -> bool {
    matches!(
        job.state(),
        JobState::Succeeded | JobState::Failed | JobState::Cancelled
    )
}
