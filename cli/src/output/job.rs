//! Jobs, their stages and what happened to them.

use espalier_proto::json;
use espalier_proto::v1::{Job, JobEvent, JobState, Stage};

use super::{Listing, seconds};

/// Jobs, one a row.
pub(crate) fn jobs(jobs: &[Job]) -> Listing {
    let row = |job: &Job| {
        vec![
            job.id.clone(),
            json::job_state(job.state()).to_owned(),
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
        values: jobs.iter().map(|job| json::job(job, true)).collect(),
        below: None,
    }
}

/// One job, its stages below.
pub(crate) fn job(job: &Job) -> Listing {
    let row = |stage: &Stage| {
        vec![
            stage.name.clone(),
            json::stage_state(stage.state()).to_owned(),
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
            at(event.unix_ms),
        ]
    };
    Listing {
        heads: vec!["TASK", "EVENT", "ATTEMPT", "WORKER", "MESSAGE", "AT"],
        narrow: 6,
        rows: events.iter().map(row).collect(),
        values: events.iter().map(json::event).collect(),
        below: None,
    }
}

/// A time of the wall clock as people read it; empty where nobody noted it.
pub(crate) fn at(unix_ms: i64) -> String {
    let Some(since) = u64::try_from(unix_ms).ok().filter(|since| *since > 0) else {
        return String::new();
    };
    let time = std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_millis(since));
    // Past the year 9999 there is no such format.
    let known = time.filter(|_| since < 253_402_300_800_000);
    known.map_or_else(
        || unix_ms.to_string(),
        |time| humantime::format_rfc3339_millis(time).to_string(),
    )
}

/// Whether a job can still change.
pub(crate) fn has_ended(job: &Job) -> bool {
    matches!(
        job.state(),
        JobState::Succeeded | JobState::Failed | JobState::Cancelled
    )
}
