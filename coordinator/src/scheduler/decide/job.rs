//! What users and the planner may do with a job.

use std::collections::HashSet;

use espalier_proto::PAYLOAD_LIMIT_BYTES;

use super::Decision;
use crate::scheduler::{
    Command, Ended, Event, Job, JobId, JobPhase, Now, Payload, Rejection, Stage, StagePlan, StageRecord,
    State, TaskId, TaskPhase, TaskPlan, TaskRecord,
};

/// How far a priority may be from 0.
const PRIORITY_LIMIT: i32 = 100;
/// The executor of stages that measure whether a job may go on as planned, and those of the first stages after them.
const CHECK: &str = "check";
const AFTER_CHECKS: [&str; 2] = ["recover", "evaluate"];

pub fn decide(state: &State, command: Command, now: Now) -> Decision {
    let at = now.unix_ms;
    match command {
        command @ Command::Submit { .. } => submit(state, command, now),
        Command::Cancel { job, reason } => cancel(state, job, reason, now),
        Command::Pause { job, reason } => pause(state, job, reason, now),
        Command::Resume { job } => {
            let known = job_of(state, job)?;
            if known.phase.is_terminal() {
                let phase = known.phase.name();
                return Err(Rejection::JobEnded { job, phase });
            }
            Ok(if known.paused.is_some() {
                vec![Event::JobResumed { job, at }]
            } else {
                Vec::new()
            })
        }
        Command::Retry { job, request_id } => retry(state, job, request_id, now),
        Command::Archived { job } => Ok(match state.job(job) {
            Some(ended) if state.is_archivable(ended) => vec![Event::JobArchived { job, at }],
            _ => Vec::new(),
        }),
        Command::StagesPlanned {
            job,
            revision,
            stages,
        } => planned(state, job, revision, &stages, now),
        Command::OutcomeReached {
            job,
            revision,
            outcome,
        } => Ok(outcome_reached(state, job, revision, outcome, now)),
        Command::OutcomeWritten { job } => Ok(match job_of(state, job)?.phase {
            JobPhase::Finishing { .. } => vec![Event::JobSucceeded { job, at }],
            _ => Vec::new(),
        }),
        Command::JobBroken { job, message } => Ok(if job_of(state, job)?.phase.is_terminal() {
            Vec::new()
        } else {
            vec![Event::JobFailed { job, message, at }]
        }),
        Command::PartialRemoved { job } => Ok(match state.job(job) {
            Some(ended) if ended.wants_removal() => vec![Event::PartialRemoved { job }],
            _ => Vec::new(),
        }),
        _ => Ok(Vec::new()),
    }
}

fn job_of(state: &State, job: JobId) -> Result<&Job, Rejection> {
    if let Some(known) = state.job(job) {
        return Ok(known);
    }
    Err(match state.summary(job) {
        Some(archived) => Rejection::JobEnded {
            job,
            phase: archived.ended.name(),
        },
        None => Rejection::NoSuchJob(job),
    })
}

fn submit(state: &State, command: Command, now: Now) -> Decision {
    let Command::Submit {
        request_id,
        spec,
        parent,
        output,
        device_kind,
        priority,
    } = command
    else {
        return Ok(Vec::new());
    };
    if !(-PRIORITY_LIMIT..=PRIORITY_LIMIT).contains(&priority) {
        return Err(Rejection::Invalid(format!(
            "priority {priority} is out of range: choose one from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}"
        )));
    }
    submitted_before(state, request_id.as_deref(), &spec, priority)?;
    output_is_free(state, &output)?;
    Ok(vec![Event::JobSubmitted {
        job: state.last_job.next(),
        request_id,
        spec,
        parent,
        output,
        device_kind,
        priority,
        at: now.unix_ms,
    }])
}

fn submitted_before(
    state: &State,
    request_id: Option<&str>,
    spec: &Payload,
    priority: i32,
) -> Result<(), Rejection> {
    let Some(request_id) = request_id else {
        return Ok(());
    };
    let Some(job) = state.index.request_ids.get(request_id).copied() else {
        return Ok(());
    };
    let same = match (state.job(job), state.summary(job)) {
        (Some(earlier), _) => earlier.spec == *spec && earlier.priority == priority,
        (None, Some(archived)) => archived.spec_digest == spec.digest() && archived.priority == priority,
        (None, None) => false,
    };
    Err(if same {
        Rejection::SubmittedBefore(job)
    } else {
        Rejection::RequestIdTaken {
            request_id: request_id.to_owned(),
            job,
        }
    })
}

fn output_is_free(state: &State, output: &str) -> Result<(), Rejection> {
    let writes = |job: &&Job| job.output == output && (!job.phase.is_terminal() || job.wants_removal());
    match state.jobs().rev().find(writes) {
        Some(rival) => Err(Rejection::OutputTaken {
            output: output.to_owned(),
            job: rival.id,
        }),
        None => Ok(()),
    }
}

fn cancel(state: &State, job: JobId, reason: String, now: Now) -> Decision {
    match &job_of(state, job)?.phase {
        JobPhase::Active => Ok(vec![Event::JobCancelled {
            job,
            reason,
            at: now.unix_ms,
        }]),
        JobPhase::Cancelled { .. } => Ok(Vec::new()),
        phase => Err(Rejection::JobEnded {
            job,
            phase: phase.name(),
        }),
    }
}

fn pause(state: &State, job: JobId, reason: String, now: Now) -> Decision {
    let known = job_of(state, job)?;
    if !matches!(known.phase, JobPhase::Active) {
        return Err(Rejection::JobEnded {
            job,
            phase: known.phase.name(),
        });
    }
    if known.paused.is_some() {
        return Ok(Vec::new());
    }
    let at = now.unix_ms;
    Ok(vec![Event::JobPaused { job, reason, at }])
}

fn retry(state: &State, job: JobId, request_id: Option<String>, now: Now) -> Decision {
    let archived = state.summary(job).map(|archived| archived.ended);
    if archived == Some(Ended::Failed) {
        return Err(Rejection::Archived { job });
    }
    let known = job_of(state, job)?;
    let sent_before =
        request_id.is_some() && known.retries.iter().any(|retry| retry.request_id == request_id);
    if sent_before {
        return Ok(Vec::new());
    }
    let has_stopped = state.is_archivable(known);
    if !matches!(known.phase, JobPhase::Failed { .. }) || !has_stopped {
        return Err(Rejection::NotFailed {
            job,
            phase: known.phase.name(),
        });
    }
    output_is_free(state, &known.output)?;
    Ok(vec![Event::JobRetried {
        job,
        request_id,
        anew: doubtful_checks(state, known),
        at: now.unix_ms,
    }])
}

/// The checks of a job that its planner gave up for what they measured: it would for ever, and measured again they may say
/// otherwise. None of a job that had gone on by them, or that a task ended: it goes on from there.
fn doubtful_checks(state: &State, job: &Job) -> Vec<String> {
    let went_on = |stage: &Stage| AFTER_CHECKS.contains(&stage.kind.as_str());
    let mut tasks = job.stages.iter().flat_map(|stage| &stage.tasks);
    let has_failed = |id: &TaskId| {
        let task = state.task(*id);
        task.is_some_and(|task| matches!(task.phase, TaskPhase::Failed))
    };
    if job.stages.iter().any(went_on) || tasks.any(has_failed) {
        return Vec::new();
    }
    let checks = job.stages.iter().filter(|stage| stage.kind == *CHECK);
    checks.map(|stage| stage.name.clone()).collect()
}

fn planned(state: &State, job: JobId, revision: u64, stages: &[StagePlan], now: Now) -> Decision {
    let known = job_of(state, job)?;
    if !matches!(known.phase, JobPhase::Active) || revision <= known.planned {
        return Ok(Vec::new());
    }
    let mut names: HashSet<&str> = known.stages.iter().map(|stage| stage.name.as_str()).collect();
    let mut last = state.last_task;
    let mut records = Vec::new();
    for stage in stages {
        if !names.insert(&stage.name) {
            continue;
        }
        if stage.tasks.is_empty() {
            let message = format!("stage {} was planned without tasks", stage.name);
            return Ok(broken(job, message, now));
        }
        if let Some(message) = too_large(stage) {
            return Ok(broken(job, message, now));
        }
        records.push(record(stage, &mut last));
    }
    let all_done = known.stages.iter().all(|stage| stage.done == stage.tasks.len());
    if records.is_empty() && all_done && known.results == revision {
        let message = "the planner named neither a stage nor an outcome".to_owned();
        return Ok(broken(job, message, now));
    }
    Ok(vec![Event::StagesPlanned {
        job,
        revision,
        stages: records,
        at: now.unix_ms,
    }])
}

/// A task that could not be sent to a worker.
fn too_large(stage: &StagePlan) -> Option<String> {
    let bytes = |task: &&TaskPlan| task.payload.as_str().len();
    let task = stage
        .tasks
        .iter()
        .find(|task| bytes(task) > PAYLOAD_LIMIT_BYTES)?;
    Some(format!(
        "{}, {}: its spec takes {} bytes: {PAYLOAD_LIMIT_BYTES} are taken at the most",
        stage.name,
        task.name,
        bytes(&task)
    ))
}

fn broken(job: JobId, message: String, now: Now) -> Vec<Event> {
    let at = now.unix_ms;
    vec![Event::JobFailed { job, message, at }]
}

fn record(stage: &StagePlan, last: &mut TaskId) -> StageRecord {
    let task = |plan: &TaskPlan| {
        *last = last.next();
        TaskRecord {
            id: *last,
            name: plan.name.clone(),
            payload: plan.payload.clone(),
            exclusive: plan.exclusive,
            needs: plan.needs.clone(),
        }
    };
    StageRecord {
        name: stage.name.clone(),
        kind: stage.kind.clone(),
        decision: stage.decision.clone(),
        note: stage.note.clone(),
        in_output: stage.in_output,
        tasks: stage.tasks.iter().map(task).collect(),
    }
}

fn outcome_reached(state: &State, job: JobId, revision: u64, outcome: Payload, now: Now) -> Vec<Event> {
    let Some(known) = state.job(job) else {
        return Vec::new();
    };
    if !matches!(known.phase, JobPhase::Active) || revision <= known.planned {
        return Vec::new();
    }
    let at = now.unix_ms;
    vec![Event::OutcomeReached { job, outcome, at }]
}
