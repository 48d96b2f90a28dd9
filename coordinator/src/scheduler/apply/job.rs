//! What happens to a job as a whole.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::scheduler::index::{Class, Turn};
use crate::scheduler::{
    Ended, Event, Job, JobId, JobPhase, Name, Pause, Payload, Retry, Stage, StageRecord, State, Summary,
    Task, TaskId, TaskPhase,
};

/// Retries of a job that are remembered, so that one sent twice is one.
const RETRIES_KEPT: usize = 16;

pub fn submitted(state: &mut State, event: &Event) {
    let Event::JobSubmitted {
        job,
        request_id,
        spec,
        parent,
        output,
        device_kind,
        priority,
        at,
    } = event
    else {
        return;
    };
    state.last_job = state.last_job.max(*job);
    if let Some(request_id) = request_id {
        state.index.request_ids.insert(request_id.clone(), *job);
    }
    let submitted = Job {
        id: *job,
        request_id: request_id.clone(),
        spec: spec.clone(),
        parent: parent.clone(),
        output: output.clone(),
        device_kind: Name::from(device_kind.as_str()),
        priority: *priority,
        phase: JobPhase::Active,
        paused: None,
        retries: Vec::new(),
        stages: Vec::new(),
        results: 1,
        planned: 0,
        submitted_at: *at,
        started_at: None,
    };
    state.jobs.insert(*job, submitted);
}

pub fn paused(state: &mut State, id: JobId, reason: &str, at: i64) {
    let Some(job) = state.jobs.get_mut(&id) else {
        return;
    };
    job.paused = Some(Pause {
        reason: reason.to_owned(),
        at,
    });
    let places = Turn::range(job);
    let mut emptied: Vec<Class> = Vec::new();
    let mut held: BTreeSet<TaskId> = BTreeSet::new();
    for (class, queue) in &mut state.index.waiting {
        let turns: Vec<Turn> = queue.range(places.clone()).copied().collect();
        for turn in turns {
            queue.remove(&turn);
            held.insert(turn.task);
        }
        if queue.is_empty() {
            emptied.push(class.clone());
        }
    }
    for class in emptied {
        state.index.waiting.remove(&class);
    }
    for task in held {
        state.index.hold(id, task);
    }
}

pub fn resumed(state: &mut State, id: JobId) {
    let Some(job) = state.jobs.get_mut(&id) else {
        return;
    };
    job.paused = None;
    for task in state.index.held.remove(&id).unwrap_or_default() {
        line_up(state, task);
    }
}

/// Puts a waiting task where it waits: in line, or aside while its job is paused.
pub fn line_up(state: &mut State, id: TaskId) {
    let Some(task) = state.tasks.get(&id) else {
        return;
    };
    let job = task.job;
    if state.is_held(job) {
        state.index.hold(job, id);
    } else if let Some((class, turn)) = state.turn(task) {
        state.index.line_up(class, turn);
    }
}

/// Takes a waiting task from where it waits.
pub fn step_out(state: &mut State, id: TaskId) {
    let Some(task) = state.tasks.get(&id) else {
        return;
    };
    let job = task.job;
    if let Some((class, turn)) = state.turn(task) {
        state.index.step_out(&class, turn);
    }
    state.index.let_go(job, id);
}

pub fn planned(state: &mut State, id: JobId, revision: u64, stages: &[StageRecord]) {
    let Some(job) = state.jobs.get_mut(&id) else {
        return;
    };
    job.planned = job.planned.max(revision);
    let mut made = Vec::new();
    for record in stages {
        let stage = job.stages.len();
        let kind = Name::from(record.kind.as_str());
        job.stages.push(Stage {
            name: record.name.clone(),
            kind: kind.clone(),
            decision: record.decision.clone(),
            note: record.note.clone(),
            in_output: record.in_output,
            tasks: record.tasks.iter().map(|task| task.id).collect(),
            done: 0,
            started_at: None,
            finished_at: None,
            rested_ms: 0,
        });
        for task in &record.tasks {
            made.push(Task {
                id: task.id,
                job: id,
                stage,
                name: task.name.as_str().into(),
                kind: kind.clone(),
                payload: task.payload.clone(),
                exclusive: task.exclusive,
                needs: task.needs.clone(),
                phase: TaskPhase::Waiting,
                generation: 0,
                formed_ranks: 0,
                trouble: None,
            });
        }
    }
    for task in made {
        let id = task.id;
        state.last_task = state.last_task.max(id);
        state.tasks.insert(id, Arc::new(task));
        line_up(state, id);
    }
}

pub fn outcome_reached(state: &mut State, job: JobId, outcome: &Payload) {
    if let Some(job) = state.jobs.get_mut(&job) {
        job.phase = JobPhase::Finishing {
            outcome: outcome.clone(),
        };
    }
}

pub fn succeeded(state: &mut State, job: JobId, at: i64) {
    let Some(job) = state.jobs.get_mut(&job) else {
        return;
    };
    if let JobPhase::Finishing { outcome } = &job.phase {
        job.phase = JobPhase::Succeeded {
            outcome: outcome.clone(),
            at,
        };
    }
}

/// Ends a job without an outcome: what waits is given up, what runs is to stop.
pub fn end(state: &mut State, id: JobId, phase: JobPhase) {
    let Some(job) = state.jobs.get_mut(&id) else {
        return;
    };
    job.phase = phase;
    let tasks: Vec<TaskId> = job
        .stages
        .iter()
        .flat_map(|stage| &stage.tasks)
        .copied()
        .collect();
    for id in tasks {
        let Some(task) = state.tasks.get(&id) else {
            continue;
        };
        match task.phase {
            TaskPhase::Waiting => step_out(state, id),
            TaskPhase::Gang(_) => state.index.remove_completed(task),
            TaskPhase::Running { .. } => {}
            TaskPhase::Done { .. } | TaskPhase::Failed | TaskPhase::Abandoned => continue,
        }
        if let Some(task) = state.task_mut(id) {
            task.phase = TaskPhase::Abandoned;
        }
    }
    // A pause ends with the job: a retried one goes on.
    if let Some(job) = state.jobs.get_mut(&id) {
        job.paused = None;
    }
    for attempt in state.index.of_job.get(&id).into_iter().flatten() {
        if let Some(attempt) = state.attempts.get_mut(attempt) {
            attempt.cancelled = true;
        }
    }
}

pub fn partial_removed(state: &mut State, job: JobId) {
    let Some(job) = state.jobs.get_mut(&job) else {
        return;
    };
    if let JobPhase::Failed { removed, .. } | JobPhase::Cancelled { removed, .. } = &mut job.phase {
        *removed = true;
    }
}

/// Lets a failed job go on: what it made in its output is gone and is planned `anew`, as are stages named there, what
/// failed waits again with its counters at zero, and the planner is asked.
pub fn retried(state: &mut State, id: JobId, request_id: Option<&String>, anew: &[String], at: i64) {
    let Some(job) = state.jobs.get_mut(&id) else {
        return;
    };
    let failed_at = match job.phase {
        JobPhase::Failed { at, .. } => at,
        _ => at,
    };
    job.phase = JobPhase::Active;
    // What a planner found out before the failure is about stages that may be gone.
    job.planned = job.results;
    job.results = job.results.saturating_add(1);
    if job.retries.len() >= RETRIES_KEPT {
        job.retries.remove(0);
    }
    job.retries.push(Retry {
        request_id: request_id.cloned(),
        at,
    });
    let gone = job.stages.iter().position(|stage| stage.in_output);
    let mut forgotten = gone.map(|first| job.stages.split_off(first)).unwrap_or_default();
    forgotten.extend(job.stages.extract_if(.., |stage| anew.contains(&stage.name)));
    for stage in &mut job.stages {
        if stage.started_at.is_some() && stage.finished_at.is_none() {
            stage.rested_ms += (at - failed_at).max(0);
        }
    }
    let stages = job.stages.iter().enumerate();
    let kept: Vec<(usize, TaskId)> = stages
        .flat_map(|(index, stage)| stage.tasks.iter().map(move |task| (index, *task)))
        .collect();
    for task in forgotten.iter().flat_map(|stage| &stage.tasks) {
        forget_task(state, *task);
    }
    for (stage, id) in kept {
        let Some(task) = state.task_mut(id) else {
            continue;
        };
        // Fewer may stand before it now.
        task.stage = stage;
        if !matches!(task.phase, TaskPhase::Failed | TaskPhase::Abandoned) {
            continue;
        }
        task.phase = TaskPhase::Waiting;
        if let Some(trouble) = &mut task.trouble {
            trouble.begin_again();
        }
        line_up(state, id);
    }
}

/// Drops what an ended job was made of; a summary stays.
pub fn archived(state: &mut State, id: JobId) {
    let Some(job) = state.jobs.remove(&id) else {
        return;
    };
    let (tasks, tasks_done) = state.counts(&job);
    for task in job.stages.iter().flat_map(|stage| &stage.tasks) {
        forget_task(state, *task);
    }
    let spec_digest = job.spec.digest();
    let (ended, message, ended_at) = match job.phase {
        JobPhase::Failed { message, at, .. } => (Ended::Failed, message, at),
        JobPhase::Cancelled { reason, at, .. } => (Ended::Cancelled, reason, at),
        JobPhase::Succeeded { at, .. } => (Ended::Succeeded, String::new(), at),
        // Not written by any build: kept as what it most likely was.
        JobPhase::Active | JobPhase::Finishing { .. } => (Ended::Cancelled, String::new(), job.submitted_at),
    };
    let summary = Summary {
        id,
        request_id: job.request_id,
        spec_digest,
        parent: job.parent,
        output: job.output,
        priority: job.priority,
        ended,
        message,
        tasks,
        tasks_done,
        submitted_at: job.submitted_at,
        started_at: job.started_at,
        ended_at,
    };
    state.archived.insert(id, summary);
}

fn forget_task(state: &mut State, id: TaskId) {
    step_out(state, id);
    if let Some(task) = state.tasks.remove(&id) {
        state.index.remove_completed(&task);
    }
}
