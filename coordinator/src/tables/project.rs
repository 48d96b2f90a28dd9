//! What an event, an archive or a snapshot means for the tables. Lenient: what does not parse, or is about
//! something unknown, is left out.

use espalier_proto::task::TaskOutput;

use super::keys;
use super::rows::{
    AttemptOutcome, AttemptRow, CostEntry, DecisionRow, EventRow, ImportanceRow, Place, ScoreEntry, TaskRange,
};
use super::store::Change;
use crate::archive::Archive;
use crate::scheduler::{AttemptId, Event, JobId, Payload, State, TaskId, TaskPhase, WorkerId};
use crate::told::{About, Told, told};

/// Larger decisions are left to the journal: small values only.
const DECISION_LIMIT_BYTES: usize = 64 << 10;

/// Takes one event.
pub fn event(change: &mut Change<'_>, place: Place, event: &Event) -> Result<(), String> {
    match event {
        Event::WorkerJoined { worker, name, .. } => change.put(keys::worker(*worker), name)?,
        Event::StagesPlanned { job, stages, .. } => {
            for stage in stages {
                let tasks: Vec<TaskId> = stage.tasks.iter().map(|task| task.id).collect();
                if let (Some(first), Some(decision)) = (tasks.first(), &stage.decision) {
                    decided(change, *job, *first, &stage.name, &stage.note, decision)?;
                }
                planned(change, *job, &stage.kind, &tasks)?;
            }
        }
        Event::JobArchived { job, .. } => archived(change, *job)?,
        Event::AttemptStarted {
            attempt,
            task,
            worker,
            device,
            at,
        } => started(change, Some(place), (*attempt, *task), (*worker, device), *at)?,
        Event::GangFormed { task, ranks, at, .. } => {
            for rank in ranks {
                let on = (rank.worker, rank.device.as_str());
                started(change, None, (rank.attempt, *task), on, *at)?;
            }
        }
        Event::AttemptCompleted { task, output, .. } | Event::RankCompleted { task, output, .. } => {
            found(change, *task, output)?;
        }
        _ => {}
    }
    match told(event) {
        Some(told) => tell(change, place, event, told),
        None => Ok(()),
    }
}

/// Notes what people are told of an event, with the attempt that it ends where it ends one.
fn tell(change: &mut Change<'_>, place: Place, event: &Event, told: Told<'_>) -> Result<(), String> {
    if matches!(event, Event::AttemptStarted { .. }) {
        return Ok(());
    }
    let job = match told.about {
        About::Job(job) => job,
        About::Task(task) | About::Attempt(task, _) => match change.range_of(task)? {
            Some((_, range)) => range.job,
            None => return Ok(()),
        },
    };
    let mut worker = String::new();
    if let About::Attempt(task, attempt) = told.about {
        let key = keys::attempt(task, attempt);
        if let Some(mut row) = change.get::<AttemptRow>(&key)? {
            let completed = matches!(event, Event::AttemptCompleted { .. });
            row.completed_in = completed.then_some(place);
            row.outcome = outcome_of(event);
            row.ended_unix_ms = (told.at != 0).then_some(told.at);
            row.message = told.message.clone().into_owned();
            worker.clone_from(&row.worker);
            change.put(key, &row)?;
            if completed {
                return Ok(());
            }
        }
    }
    let row = EventRow {
        frame: place.frame,
        index: place.index,
        unix_ms: told.at,
        kind: told.kind.to_owned(),
        task: told.about.task().unwrap_or_default().0,
        attempt: told.about.attempt().unwrap_or_default().0,
        worker,
        message: told.message.into_owned(),
    };
    change.put(keys::event(job, place.frame, place.index), &row)
}

fn outcome_of(event: &Event) -> AttemptOutcome {
    match event {
        Event::AttemptCompleted { .. } | Event::RankCompleted { .. } => AttemptOutcome::Completed,
        Event::AttemptFailed { .. } => AttemptOutcome::Failed,
        Event::AttemptLost { .. } => AttemptOutcome::Lost,
        Event::AttemptHandedBack { .. } => AttemptOutcome::HandedBack,
        Event::AttemptStopped { .. } => AttemptOutcome::Stopped,
        _ => AttemptOutcome::Running,
    }
}

/// Takes a job that is archived already: where its tasks went, and what it found. What the tables had of it
/// from the time before goes.
pub fn archive(change: &mut Change<'_>, archive: &Archive) -> Result<(), String> {
    state(change, &archive.state)?;
    for job in archive.state.jobs() {
        archived(change, job.id)?;
    }
    Ok(())
}

/// Takes what a snapshot knows.
pub fn snapshot(change: &mut Change<'_>, snapshot: &State) -> Result<(), String> {
    for worker in snapshot.workers() {
        change.put(keys::worker(worker.id), &worker.name)?;
        change.ease()?;
    }
    state(change, snapshot)
}

fn state(change: &mut Change<'_>, state: &State) -> Result<(), String> {
    for job in state.jobs() {
        for stage in &job.stages {
            if let (Some(first), Some(decision)) = (stage.tasks.first(), &stage.decision) {
                decided(change, job.id, *first, &stage.name, &stage.note, decision)?;
            }
            planned(change, job.id, &stage.kind, &stage.tasks)?;
        }
    }
    for task in state.tasks() {
        if let TaskPhase::Done { output, .. } = &task.phase {
            found_by(change, task.job, task.id, &task.kind, output)?;
            change.ease()?;
        }
    }
    Ok(())
}

/// Where the tasks of a stage are, in runs of ids that follow each other: one, as a rule.
fn planned(change: &mut Change<'_>, job: JobId, kind: &str, tasks: &[TaskId]) -> Result<(), String> {
    for run in tasks.chunk_by(|one, other| one.next() == *other) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            continue;
        };
        let range = TaskRange {
            last: *last,
            job,
            kind: kind.to_owned(),
        };
        change.put(keys::tasks(*first), &range)?;
        change.put(keys::tasks_of(job, *first), &())?;
    }
    change.ease()
}

/// The archive has the job whole: only where its tasks went stays, and what it found. A range is struck off the
/// job's list after all its rows, so a change may be eased in between.
fn archived(change: &mut Change<'_>, job: JobId) -> Result<(), String> {
    let ranges = change.keys(&keys::all_tasks_of(job))?;
    change.remove_prefix(&keys::events_of(job))?;
    for listed in ranges {
        let Some(first) = keys::number(&listed, 1).map(TaskId) else {
            continue;
        };
        if let Some(range) = change.get::<TaskRange>(&keys::tasks(first))? {
            let up_to = keys::attempts_of(range.last.next());
            change.remove_between(&keys::attempts_of(first), &up_to)?;
        }
        change.remove(listed);
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
    started_in: Option<Place>,
    (attempt, task): (AttemptId, TaskId),
    (worker, device): (WorkerId, &str),
    at: i64,
) -> Result<(), String> {
    // Nothing would remove the row: the job's end was taken before, from its archive or by a change that a crash cut
    // short, or a retry has forgotten the task.
    if !change.is_live(task)? {
        return Ok(());
    }
    let name = change.get(&keys::worker(worker))?;
    let row = AttemptRow {
        attempt,
        task,
        worker: name.unwrap_or_else(|| format!("worker {worker}")),
        device: device.to_owned(),
        started_unix_ms: at,
        ended_unix_ms: None,
        outcome: AttemptOutcome::Running,
        message: String::new(),
        started_in,
        completed_in: None,
    };
    change.put(keys::attempt(task, attempt), &row)
}

/// What a task of a job in the tables found.
fn found(change: &mut Change<'_>, task: TaskId, output: &Payload) -> Result<(), String> {
    match change.range_of(task)? {
        Some((_, range)) => found_by(change, range.job, task, &range.kind, output),
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
        Ok(TaskOutput::Calibrate { importance, .. }) => {
            let artifact = importance;
            change.put(keys::importance(job, task), &ImportanceRow { task, artifact })?;
        }
        Ok(_) | Err(_) => {}
    }
    Ok(())
}
