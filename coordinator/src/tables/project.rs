//! What an event, an archive or a snapshot means for the tables. Lenient: what does not parse, or is about
//! something unknown, is left out.

use espalier_proto::task::TaskOutput;

use super::keys;
use super::rows::{
    ArchivedRange, AttemptOutcome, AttemptRow, CostEntry, DecisionRow, ImportanceRow, ScoreEntry, TaskRow,
    TaskStanding,
};
use super::store::Change;
use super::tell::{Place, event_row, worker_name};
use crate::archive::Archive;
use crate::scheduler::{
    AttemptId, Event, JobId, Payload, StageRecord, State, Task, TaskId, TaskPhase, WorkerId,
};

/// Larger decisions are left to the journal: small values only.
const DECISION_LIMIT_BYTES: usize = 64 << 10;

/// How an attempt ended.
struct End<'a> {
    attempt: AttemptId,
    task: TaskId,
    at: Option<i64>,
    outcome: AttemptOutcome,
    message: &'a str,
    /// Where that leaves the task; none when others still run for it.
    standing: Option<TaskStanding>,
}

/// Takes one event.
pub fn event(change: &mut Change<'_>, place: Place, event: &Event) -> Result<(), String> {
    if let Some((job, row)) = event_row(change, place, event)? {
        change.put(keys::event(job, place.frame, place.index), &row)?;
    }
    match event {
        Event::WorkerJoined { worker, name, .. } => change.put(keys::worker(*worker), name),
        Event::StagesPlanned { job, stages, .. } => planned(change, *job, stages),
        Event::JobFailed { job, .. } | Event::JobCancelled { job, .. } => abandon(change, *job),
        Event::JobArchived { job, .. } => archived(change, *job),
        Event::AttemptStarted {
            attempt,
            task,
            worker,
            device,
            at,
        } => started(change, *attempt, *task, *worker, device, *at),
        Event::GangFormed { task, ranks, at, .. } => {
            for rank in ranks {
                started(change, rank.attempt, *task, rank.worker, &rank.device, *at)?;
            }
            Ok(())
        }
        Event::AttemptCompleted { task, output, .. } => {
            found(change, *task, output)?;
            ended(change, event)
        }
        Event::RankCompleted { task, output, .. } => {
            found(change, *task, output)?;
            ended(change, event)
        }
        Event::GangEnded { task, completed, .. } => {
            let standing = if *completed {
                TaskStanding::Done
            } else {
                TaskStanding::Waiting
            };
            set_standing(change, *task, standing)
        }
        _ => ended(change, event),
    }
}

/// Takes a job that is archived already: where its tasks went, and what it found. What the tables had of it
/// from the time before goes.
pub fn archive(change: &mut Change<'_>, archive: &Archive) -> Result<(), String> {
    let tasks: Vec<TaskId> = archive.state.tasks().map(|task| task.id).collect();
    for job in archive.state.jobs() {
        archived(change, job.id)?;
        ranges(change, job.id, &tasks)?;
    }
    state(change, &archive.state, false)
}

/// Takes what a snapshot knows.
pub fn snapshot(change: &mut Change<'_>, snapshot: &State) -> Result<(), String> {
    for worker in snapshot.workers() {
        change.put(keys::worker(worker.id), &worker.name)?;
        change.ease()?;
    }
    state(change, snapshot, true)
}

fn state(change: &mut Change<'_>, state: &State, with_tasks: bool) -> Result<(), String> {
    for job in state.jobs() {
        for stage in &job.stages {
            if let (Some(first), Some(decision)) = (stage.tasks.first(), &stage.decision) {
                decided(change, job.id, *first, &stage.name, &stage.note, decision)?;
            }
        }
    }
    for task in state.tasks() {
        if let TaskPhase::Done { output, .. } = &task.phase {
            found_by(change, task.job, task.id, &task.kind, output)?;
        }
        let stage = state.job(task.job).and_then(|job| job.stages.get(task.stage));
        if let (true, Some(stage)) = (with_tasks, stage) {
            put_task(change, &row_of(task, &stage.name))?;
        }
        change.ease()?;
    }
    Ok(())
}

fn row_of(task: &Task, stage: &str) -> TaskRow {
    TaskRow {
        task: task.id,
        job: task.job,
        stage: stage.to_owned(),
        kind: task.kind.to_string(),
        name: task.name.to_string(),
        standing: match &task.phase {
            TaskPhase::Waiting => TaskStanding::Waiting,
            TaskPhase::Running { .. } | TaskPhase::Gang(_) => TaskStanding::Running,
            TaskPhase::Done { .. } => TaskStanding::Done,
            TaskPhase::Failed => TaskStanding::Failed,
            TaskPhase::Abandoned => TaskStanding::Abandoned,
        },
    }
}

fn put_task(change: &mut Change<'_>, row: &TaskRow) -> Result<(), String> {
    change.put(keys::task_of(row.job, row.task), &())?;
    change.put(keys::task(row.task), row)
}

fn planned(change: &mut Change<'_>, job: JobId, stages: &[StageRecord]) -> Result<(), String> {
    for stage in stages {
        if let (Some(first), Some(decision)) = (stage.tasks.first(), &stage.decision) {
            decided(change, job, first.id, &stage.name, &stage.note, decision)?;
        }
        for task in &stage.tasks {
            let row = TaskRow {
                task: task.id,
                job,
                stage: stage.name.clone(),
                kind: stage.kind.clone(),
                name: task.name.to_string(),
                standing: TaskStanding::Waiting,
            };
            put_task(change, &row)?;
            change.ease()?;
        }
    }
    Ok(())
}

fn decided(
    change: &mut Change<'_>,
    job: JobId,
    first: TaskId,
    stage: &str,
    note: &str,
    decision: &Payload,
) -> Result<(), String> {
    if decision.as_str().len() > DECISION_LIMIT_BYTES {
        return Ok(());
    }
    let row = DecisionRow {
        stage: stage.to_owned(),
        note: note.to_owned(),
        decision: decision.as_str().to_owned(),
    };
    change.put(keys::decision(job, first), &row)
}

fn started(
    change: &mut Change<'_>,
    attempt: AttemptId,
    task: TaskId,
    worker: WorkerId,
    device: &str,
    at: i64,
) -> Result<(), String> {
    let row = AttemptRow {
        attempt,
        task,
        worker: worker_name(change, worker)?,
        device: device.to_owned(),
        started_unix_ms: at,
        ended_unix_ms: None,
        outcome: AttemptOutcome::Running,
        message: String::new(),
    };
    change.put(keys::attempt(task, attempt), &row)?;
    set_standing(change, task, TaskStanding::Running)
}

fn ended(change: &mut Change<'_>, event: &Event) -> Result<(), String> {
    let Some(end) = end_of(event) else {
        return Ok(());
    };
    let key = keys::attempt(end.task, end.attempt);
    if let Some(mut row) = change.get::<AttemptRow>(&key)? {
        row.ended_unix_ms = end.at;
        row.outcome = end.outcome;
        end.message.clone_into(&mut row.message);
        change.put(key, &row)?;
    }
    match end.standing {
        Some(standing) => set_standing(change, end.task, standing),
        None => Ok(()),
    }
}

fn end_of(event: &Event) -> Option<End<'_>> {
    let after = |retry: bool| {
        Some(if retry {
            TaskStanding::Waiting
        } else {
            TaskStanding::Failed
        })
    };
    let (attempt, task, at, outcome, message, standing) = match event {
        Event::AttemptCompleted {
            attempt, task, at, ..
        } => {
            let done = Some(TaskStanding::Done);
            (attempt, task, Some(*at), AttemptOutcome::Completed, "", done)
        }
        Event::RankCompleted {
            attempt, task, at, ..
        } => (attempt, task, Some(*at), AttemptOutcome::Completed, "", None),
        Event::AttemptFailed {
            attempt,
            task,
            failure,
            retry,
            at,
        } => {
            let message = failure.message.as_str();
            (
                attempt,
                task,
                Some(*at),
                AttemptOutcome::Failed,
                message,
                after(*retry),
            )
        }
        Event::AttemptLost {
            attempt,
            task,
            retry,
            at,
        } => {
            let message = "the worker was lost";
            (
                attempt,
                task,
                Some(*at),
                AttemptOutcome::Lost,
                message,
                after(*retry),
            )
        }
        Event::AttemptHandedBack { attempt, task, at } => {
            let waiting = Some(TaskStanding::Waiting);
            (attempt, task, Some(*at), AttemptOutcome::HandedBack, "", waiting)
        }
        Event::AttemptStopped { attempt, task } => (attempt, task, None, AttemptOutcome::Stopped, "", None),
        _ => return None,
    };
    Some(End {
        attempt: *attempt,
        task: *task,
        at,
        outcome,
        message,
        standing,
    })
}

/// A task whose job has ended stays as it is.
fn set_standing(change: &mut Change<'_>, task: TaskId, standing: TaskStanding) -> Result<(), String> {
    let key = keys::task(task);
    let Some(mut row) = change.get::<TaskRow>(&key)? else {
        return Ok(());
    };
    if row.standing == TaskStanding::Abandoned {
        return Ok(());
    }
    row.standing = standing;
    change.put(key, &row)
}

fn abandon(change: &mut Change<'_>, job: JobId) -> Result<(), String> {
    for key in change.keys(&keys::tasks_of(job))? {
        let Some(task) = keys::number(&key, 1) else {
            continue;
        };
        let key = keys::task(TaskId(task));
        let Some(mut row) = change.get::<TaskRow>(&key)? else {
            continue;
        };
        if matches!(row.standing, TaskStanding::Waiting | TaskStanding::Running) {
            row.standing = TaskStanding::Abandoned;
            change.put(key, &row)?;
        }
    }
    Ok(())
}

/// The archive has the job whole: only where its tasks went stays, and what it found. Where they went is noted
/// first, and a task is struck off the job's list with its last row: so a change may be eased in between.
fn archived(change: &mut Change<'_>, job: JobId) -> Result<(), String> {
    let listed = change.keys(&keys::tasks_of(job))?;
    let tasks: Vec<TaskId> = listed
        .iter()
        .filter_map(|key| keys::number(key, 1).map(TaskId))
        .collect();
    ranges(change, job, &tasks)?;
    for task in tasks {
        for key in change.keys(&keys::attempts_of(task))? {
            change.remove(key);
        }
        change.remove(keys::task(task));
        change.remove(keys::task_of(job, task));
        change.ease()?;
    }
    for key in change.keys(&keys::events_of(job))? {
        change.remove(key);
        change.ease()?;
    }
    Ok(())
}

fn ranges(change: &mut Change<'_>, job: JobId, tasks: &[TaskId]) -> Result<(), String> {
    let mut run: Option<(TaskId, TaskId)> = None;
    for task in tasks {
        run = match run {
            Some((first, last)) if last.next() == *task => Some((first, *task)),
            Some((first, last)) => {
                change.put(keys::archived(first), &ArchivedRange { last, job })?;
                Some((*task, *task))
            }
            None => Some((*task, *task)),
        };
    }
    match run {
        Some((first, last)) => change.put(keys::archived(first), &ArchivedRange { last, job }),
        None => Ok(()),
    }
}

/// What a task of a job in the tables found.
fn found(change: &mut Change<'_>, task: TaskId, output: &Payload) -> Result<(), String> {
    match change.get::<TaskRow>(&keys::task(task))? {
        Some(row) => found_by(change, row.job, task, &row.kind, output),
        None => Ok(()),
    }
}

fn found_by(
    change: &mut Change<'_>,
    job: JobId,
    task: TaskId,
    kind: &str,
    output: &Payload,
) -> Result<(), String> {
    if !matches!(kind, "profile" | "score" | "calibrate") {
        return Ok(());
    }
    match serde_json::from_str(output.as_str()) {
        Ok(TaskOutput::Profile(profiled)) => {
            for (index, row) in (0..).zip(profiled.rows) {
                let key = profiled.key.clone();
                change.put(keys::cost(job, task, index), &CostEntry { task, key, row })?;
            }
        }
        Ok(TaskOutput::Score { scores }) => {
            for (index, score) in (0..).zip(scores) {
                let block = u64::try_from(score.block).unwrap_or(u64::MAX);
                change.put(keys::score(job, block, task, index), &ScoreEntry { task, score })?;
            }
        }
        Ok(TaskOutput::Calibrate { importance }) => {
            let artifact = importance;
            change.put(keys::importance(job, task), &ImportanceRow { task, artifact })?;
        }
        Ok(_) | Err(_) => {}
    }
    Ok(())
}
