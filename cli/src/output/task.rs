//! Tasks and their attempts.

use espalier_proto::json;
use espalier_proto::v1::{AttemptDetail, TaskDetail};

use super::{Listing, seconds};

/// Tasks, one a row.
pub(crate) fn tasks(tasks: &[TaskDetail]) -> Listing {
    let row = |task: &TaskDetail| {
        vec![
            task.id.to_string(),
            task.stage.clone(),
            task.name.clone(),
            json::task_state(task.state()).to_owned(),
            task.message.clone(),
            task.kind.clone(),
            task.ranks.to_string(),
        ]
    };
    Listing {
        heads: vec!["TASK", "STAGE", "NAME", "STATE", "MESSAGE", "KIND", "RANKS"],
        narrow: 5,
        rows: tasks.iter().map(row).collect(),
        values: tasks.iter().map(|task| json::task(task, true)).collect(),
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
