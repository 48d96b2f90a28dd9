//! Folding events into the state. Total: an event that does not fit changes nothing it cannot change,
//! and never panics, because a journal may have been written by another build.

use super::{
    Attempt, AttemptId, Device, DeviceInfo, Event, Job, JobId, JobPhase, Lease, Payload, Stage, StageRecord,
    Standing, State, Task, TaskId, TaskPhase, Worker, WorkerId,
};

/// Folds one event into the state.
pub fn apply(state: &mut State, event: &Event) {
    match event {
        Event::TermBegan { term } => state.term = *term,
        Event::JobSubmitted { .. } => submitted(state, event),
        Event::StagesPlanned {
            job,
            revision,
            stages,
        } => planned(state, *job, *revision, stages),
        Event::OutcomeReached { job, outcome } => set_phase(
            state,
            *job,
            JobPhase::Finishing {
                outcome: outcome.clone(),
            },
        ),
        Event::JobSucceeded { job, at } => succeeded(state, *job, *at),
        Event::JobFailed { job, message, at } => {
            let phase = JobPhase::Failed {
                message: message.clone(),
                at: *at,
                removed: false,
            };
            end(state, *job, phase);
        }
        Event::JobCancelled { job, reason, at } => {
            let phase = JobPhase::Cancelled {
                reason: reason.clone(),
                at: *at,
                removed: false,
            };
            end(state, *job, phase);
        }
        Event::PartialRemoved { job } => partial_removed(state, *job),
        Event::WorkerJoined {
            worker,
            name,
            epoch,
            host,
            devices,
        } => {
            let joined = Worker {
                id: *worker,
                name: name.clone(),
                epoch: *epoch,
                host: host.clone(),
                devices: idle(devices),
                standing: Standing::Present,
            };
            state.worker_names.insert(name.clone(), *worker);
            state.workers.insert(*worker, joined);
        }
        Event::WorkerReturned { worker } => set_standing(state, *worker, Standing::Present),
        Event::WorkerLeaving { worker } => set_standing(state, *worker, Standing::Leaving),
        Event::WorkerLost { worker } => set_standing(state, *worker, Standing::Lost),
        Event::AttemptStarted {
            attempt,
            task,
            worker,
            device,
            at,
        } => {
            started(state, *attempt, *task, *worker, device, *at);
        }
        Event::AttemptCompleted { attempt, output, at } => completed(state, *attempt, output, *at),
        Event::AttemptFailed {
            attempt,
            failure,
            retry,
            ..
        } => {
            let Some((ended, task)) = release(state, *attempt) else {
                return;
            };
            task.failures.count(failure.kind);
            task.last_failure = Some(failure.message.clone());
            task.failed_on = Some(ended.worker);
            wait_or_fail(state, ended.task, *retry);
        }
        Event::AttemptLost { attempt, retry, .. } => {
            let Some((ended, task)) = release(state, *attempt) else {
                return;
            };
            task.failures.worker_lost = task.failures.worker_lost.saturating_add(1);
            task.last_failure = Some("the worker was lost".to_owned());
            wait_or_fail(state, ended.task, *retry);
        }
        Event::AttemptStopped { attempt } => {
            release(state, *attempt);
        }
    }
}

fn submitted(state: &mut State, event: &Event) {
    let Event::JobSubmitted {
        job,
        request_id,
        spec,
        parent,
        output,
        device_kind,
        at,
    } = event
    else {
        return;
    };
    if let Some(request_id) = request_id {
        state.request_ids.insert(request_id.clone(), *job);
    }
    let submitted = Job {
        id: *job,
        request_id: request_id.clone(),
        spec: spec.clone(),
        parent: parent.clone(),
        output: output.clone(),
        device_kind: device_kind.clone(),
        phase: JobPhase::Active,
        stages: Vec::new(),
        results: 1,
        planned: 0,
        submitted_at: *at,
        started_at: None,
    };
    state.jobs.insert(*job, submitted);
}

fn planned(state: &mut State, id: JobId, revision: u64, stages: &[StageRecord]) {
    let Some(job) = state.jobs.get_mut(&id) else {
        return;
    };
    job.planned = job.planned.max(revision);
    for record in stages {
        let stage = job.stages.len();
        job.stages.push(Stage {
            name: record.name.clone(),
            kind: record.kind.clone(),
            decision: record.decision.clone(),
            note: record.note.clone(),
            tasks: record.tasks.iter().map(|task| task.id).collect(),
            done: 0,
            started_at: None,
            finished_at: None,
        });
        for task in &record.tasks {
            let waiting = Task {
                id: task.id,
                job: id,
                stage,
                name: task.name.clone(),
                kind: record.kind.clone(),
                payload: task.payload.clone(),
                exclusive: task.exclusive,
                phase: TaskPhase::Waiting,
                failures: super::Failures::default(),
                last_failure: None,
                failed_on: None,
            };
            state.ready.insert(task.id);
            state.tasks.insert(task.id, waiting);
        }
    }
}

fn set_phase(state: &mut State, job: JobId, phase: JobPhase) {
    if let Some(job) = state.jobs.get_mut(&job) {
        job.phase = phase;
    }
}

fn succeeded(state: &mut State, job: JobId, at: i64) {
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

fn end(state: &mut State, id: JobId, phase: JobPhase) {
    let Some(job) = state.jobs.get_mut(&id) else {
        return;
    };
    job.phase = phase;
    for task in job.stages.iter().flat_map(|stage| &stage.tasks) {
        state.ready.remove(task);
        let Some(task) = state.tasks.get_mut(task) else {
            continue;
        };
        if matches!(task.phase, TaskPhase::Waiting | TaskPhase::Running { .. }) {
            task.phase = TaskPhase::Abandoned;
        }
    }
    for attempt in state.attempts.values_mut().filter(|attempt| attempt.job == id) {
        attempt.cancelled = true;
    }
}

fn partial_removed(state: &mut State, job: JobId) {
    let Some(job) = state.jobs.get_mut(&job) else {
        return;
    };
    if let JobPhase::Failed { removed, .. } | JobPhase::Cancelled { removed, .. } = &mut job.phase {
        *removed = true;
    }
}

fn idle(devices: &[DeviceInfo]) -> Vec<Device> {
    devices
        .iter()
        .map(|info| Device {
            info: info.clone(),
            attempt: None,
            last: None,
        })
        .collect()
}

fn set_standing(state: &mut State, worker: WorkerId, standing: Standing) {
    if let Some(worker) = state.workers.get_mut(&worker) {
        worker.standing = standing;
    }
}

fn started(
    state: &mut State,
    attempt: AttemptId,
    task_id: TaskId,
    worker_id: WorkerId,
    device: &str,
    at: i64,
) {
    let Some(task) = state.tasks.get_mut(&task_id) else {
        return;
    };
    let Some(worker) = state.workers.get_mut(&worker_id) else {
        return;
    };
    state.ready.remove(&task_id);
    state.attempt_tasks.push(task_id);
    task.phase = TaskPhase::Running { attempt };
    if let Some(device) = worker
        .devices
        .iter_mut()
        .find(|candidate| candidate.info.id == device)
    {
        device.attempt = Some(attempt);
        device.last = Some((task.job, task.kind.clone()));
    }
    if let Some(job) = state.jobs.get_mut(&task.job) {
        job.started_at.get_or_insert(at);
        if let Some(stage) = job.stages.get_mut(task.stage) {
            stage.started_at.get_or_insert(at);
        }
    }
    let running = Attempt {
        lease: Lease {
            term: state.term,
            epoch: worker.epoch,
            attempt,
        },
        task: task_id,
        job: task.job,
        worker: worker_id,
        device: device.to_owned(),
        exclusive: task.exclusive,
        cancelled: false,
        started_at: at,
    };
    state.attempts.insert(attempt, running);
}

fn completed(state: &mut State, attempt: AttemptId, output: &Payload, at: i64) {
    let Some((_, task)) = release(state, attempt) else {
        return;
    };
    task.phase = TaskPhase::Done {
        attempt,
        output: output.clone(),
    };
    let (job, stage) = (task.job, task.stage);
    let Some(job) = state.jobs.get_mut(&job) else {
        return;
    };
    let Some(stage) = job.stages.get_mut(stage) else {
        return;
    };
    stage.done = stage.done.saturating_add(1);
    if stage.done == stage.tasks.len() {
        stage.finished_at = Some(at);
        job.results = job.results.saturating_add(1);
    }
}

/// Takes the attempt from its device; gives it and its task.
fn release(state: &mut State, attempt: AttemptId) -> Option<(Attempt, &mut Task)> {
    let ended = state.attempts.remove(&attempt)?;
    if let Some(worker) = state.workers.get_mut(&ended.worker) {
        for device in &mut worker.devices {
            if device.attempt == Some(attempt) {
                device.attempt = None;
            }
        }
    }
    let task = state.tasks.get_mut(&ended.task)?;
    Some((ended, task))
}

fn wait_or_fail(state: &mut State, task_id: TaskId, retry: bool) {
    let Some(task) = state.tasks.get_mut(&task_id) else {
        return;
    };
    if !matches!(task.phase, TaskPhase::Running { .. }) {
        return;
    }
    if retry {
        task.phase = TaskPhase::Waiting;
        state.ready.insert(task_id);
    } else {
        task.phase = TaskPhase::Failed;
    }
}
