//! Tasks and their attempts.

use espalier_proto::v1::{AttemptDetail, TaskDetail, TaskState};
use serde_json::{Value, json};

use super::{Listing, seconds};

/// Tasks, one a row.
pub(crate) fn tasks(tasks: &[TaskDetail]) -> Listing {
    let row = |task: &TaskDetail| {
        vec![
            task.id.to_string(),
            task.stage.clone(),
            task.name.clone(),
            state(task.state()).to_owned(),
            task.message.clone(),
            task.kind.clone(),
            task.ranks.to_string(),
        ]
    };
    Listing {
        heads: vec!["TASK", "STAGE", "NAME", "STATE", "MESSAGE", "KIND", "RANKS"],
        narrow: 5,
        rows: tasks.iter().map(row).collect(),
        values: tasks.iter().map(task_json).collect(),
        below: None,
    }
}

/// One task, its attempts below.
pub(crate) fn task(task: &TaskDetail) -> Listing {
    let row = |attempt: &AttemptDetail| {
        let ran = attempt.ended_unix_ms - attempt.started_unix_ms;
        vec![
            attempt.id.to_string(),
            attempt.outcome.clone(),
            attempt.worker.clone(),
            attempt.device.clone(),
            u64::try_from(ran).map_or_else(|_| String::new(), seconds),
            if attempt.message.is_empty() {
                attempt.progress.clone()
            } else {
                attempt.message.clone()
            },
        ]
    };
    let attempts = Listing {
        heads: vec!["ATTEMPT", "OUTCOME", "WORKER", "DEVICE", "TIME", "MESSAGE"],
        narrow: 6,
        rows: task.attempts.iter().map(row).collect(),
        values: Vec::new(),
        below: None,
    };
    Listing {
        below: Some(Box::new(attempts)),
        ..tasks(std::slice::from_ref(task))
    }
}

fn task_json(task: &TaskDetail) -> Value {
    let embedded = |text: &str| serde_json::from_str::<Value>(text).unwrap_or(Value::Null);
    json!({
        "id": task.id,
        "job": task.job_id,
        "stage": task.stage,
        "kind": task.kind,
        "name": task.name,
        "state": state(task.state()),
        "message": task.message,
        "ranks": task.ranks,
        "attempts": task.attempts.iter().map(attempt_json).collect::<Vec<_>>(),
        "spec": embedded(&task.spec_json),
        "output": embedded(&task.output_json),
    })
}

fn attempt_json(attempt: &AttemptDetail) -> Value {
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

fn state(state: TaskState) -> &'static str {
    match state {
        TaskState::Unspecified => "unknown",
        TaskState::Waiting => "waiting",
        TaskState::Running => "running",
        TaskState::Done => "done",
        TaskState::Failed => "failed",
        TaskState::Abandoned => "abandoned",
    }
}
