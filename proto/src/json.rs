//! The messages as JSON, for people's programs: the same names as in the protocol, states in one word, embedded
//! JSON as JSON. The HTTP API and the command line show the same.

use serde_json::{Value, json};

use crate::v1::{
    self, AttemptDetail, Job, JobEvent, JobState, Stage, StageState, Task, TaskDetail, TaskState, Worker,
    WorkerDevice, WorkerState,
};

/// A job; `whole` with its stages, spec and outcome.
pub fn job(job: &Job, whole: bool) -> Value {
    let mut value = json!({
        "id": job.id,
        "request_id": job.request_id,
        "state": job_state(job.state()),
        "message": job.message,
        "priority": job.priority,
        "revision": job.revision,
        "submitted_unix_ms": job.submitted_unix_ms,
        "started_unix_ms": job.started_unix_ms,
        "finished_unix_ms": job.finished_unix_ms,
        "parent": job.parent,
        "output": job.output,
    });
    if whole {
        value["stages"] = job.stages.iter().map(stage).collect();
        value["spec"] = embedded(&job.spec_json);
        value["outcome"] = embedded(&job.outcome_json);
    }
    value
}

fn stage(stage: &Stage) -> Value {
    json!({
        "name": stage.name,
        "kind": stage.kind,
        "state": stage_state(stage.state()),
        "tasks": stage.tasks,
        "tasks_done": stage.tasks_done,
        "active": stage.active.iter().map(active).collect::<Value>(),
        "decision": stage.decision,
        "elapsed_ms": stage.elapsed_ms,
    })
}

fn active(task: &Task) -> Value {
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

/// Something that happened to a job.
pub fn event(event: &JobEvent) -> Value {
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

/// A task; `whole` with its attempts, spec and output.
pub fn task(task: &TaskDetail, whole: bool) -> Value {
    let mut value = json!({
        "id": task.id,
        "job": task.job_id,
        "stage": task.stage,
        "kind": task.kind,
        "name": task.name,
        "state": task_state(task.state()),
        "message": task.message,
        "ranks": task.ranks,
    });
    if whole {
        value["attempts"] = task.attempts.iter().map(attempt).collect();
        value["spec"] = embedded(&task.spec_json);
        value["output"] = embedded(&task.output_json);
    }
    value
}

fn attempt(attempt: &AttemptDetail) -> Value {
    json!({
        "id": attempt.id,
        "worker": attempt.worker,
        "device": attempt.device,
        "started_unix_ms": attempt.started_unix_ms,
        "ended_unix_ms": attempt.ended_unix_ms,
        "outcome": attempt.outcome,
        "message": attempt.message,
        "progress": attempt.progress,
    })
}

/// A worker.
pub fn worker(worker: &Worker) -> Value {
    json!({
        "name": worker.name,
        "state": worker_state(worker.state()),
        "message": worker.message,
        "host": worker.host,
        "version": worker.version,
        "epoch": worker.epoch,
        "silent_ms": worker.silent_ms,
        "failures_in_a_row": worker.failures_in_a_row,
        "devices": worker.devices.iter().map(device).collect::<Value>(),
    })
}

fn device(device: &WorkerDevice) -> Value {
    let described = device.device.clone().unwrap_or_default();
    json!({
        "id": described.id,
        "kind": described.kind,
        "name": described.name,
        "memory_bytes": described.memory_bytes,
        "threads": described.threads,
        "engines": described.engines.iter().map(engine).collect::<Value>(),
        "attempt": device.attempt,
        "task": device.task,
        "job": device.job_id,
        "stage": device.stage,
    })
}

fn engine(engine: &v1::Engine) -> Value {
    json!({ "name": engine.name, "version": engine.version })
}

fn embedded(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or(Value::Null)
}

/// In one word.
pub fn job_state(state: JobState) -> &'static str {
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

/// In one word.
pub fn stage_state(state: StageState) -> &'static str {
    match state {
        StageState::Unspecified => "unknown",
        StageState::Waiting => "waiting",
        StageState::Running => "running",
        StageState::Done => "done",
        StageState::Stopped => "stopped",
    }
}

/// In one word.
pub fn task_state(state: TaskState) -> &'static str {
    match state {
        TaskState::Unspecified => "unknown",
        TaskState::Waiting => "waiting",
        TaskState::Running => "running",
        TaskState::Done => "done",
        TaskState::Failed => "failed",
        TaskState::Abandoned => "abandoned",
    }
}

/// In one word.
pub fn worker_state(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Unspecified => "unknown",
        WorkerState::Ready => "ready",
        WorkerState::Away => "away",
        WorkerState::Cordoned => "cordoned",
        WorkerState::Leaving => "leaving",
        WorkerState::Lost => "lost",
        WorkerState::Left => "left",
    }
}
