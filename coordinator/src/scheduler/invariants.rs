//! What must hold in every state that [`super::apply`] can reach. Tests and the simulation call it.

use std::collections::BTreeMap;

use super::{Standing, State, TaskPhase};

/// Checks a whole state.
///
/// # Errors
/// The first rule that is broken, with its evidence.
pub fn check(state: &State) -> Result<(), String> {
    tasks(state)?;
    attempts(state)?;
    devices(state)?;
    hosts(state)
}

fn tasks(state: &State) -> Result<(), String> {
    for task in state.tasks.values() {
        let waits = state.ready.contains(&task.id);
        if waits != matches!(task.phase, TaskPhase::Waiting) {
            return Err(format!("task {} is {:?} but waits: {waits}", task.id, task.phase));
        }
        let live = state
            .attempts()
            .filter(|attempt| attempt.task == task.id && !attempt.cancelled)
            .map(|attempt| attempt.lease.attempt)
            .collect::<Vec<_>>();
        let expected = match &task.phase {
            TaskPhase::Running { attempt } => vec![*attempt],
            _ => Vec::new(),
        };
        if live != expected {
            return Err(format!(
                "task {} is {:?} with attempts {live:?}",
                task.id, task.phase
            ));
        }
        let Some(job) = state.job(task.job) else {
            return Err(format!("task {} has no job", task.id));
        };
        let open = matches!(task.phase, TaskPhase::Waiting | TaskPhase::Running { .. });
        if open && job.phase.is_terminal() {
            return Err(format!(
                "task {} is {:?} in an ended {}",
                task.id, task.phase, job.id
            ));
        }
        if matches!(task.phase, TaskPhase::Failed) && !job.phase.is_terminal() {
            return Err(format!("task {} failed but {} goes on", task.id, job.id));
        }
    }
    Ok(())
}

fn attempts(state: &State) -> Result<(), String> {
    for attempt in state.attempts() {
        let Some(worker) = state.worker(attempt.worker) else {
            return Err(format!("attempt {} has no worker", attempt.lease.attempt));
        };
        if worker.standing == Standing::Lost || worker.epoch != attempt.lease.epoch {
            return Err(format!("attempt {} outlives its worker", attempt.lease.attempt));
        }
        let held = worker
            .devices
            .iter()
            .find(|device| device.info.id == attempt.device);
        if held.is_none_or(|device| device.attempt != Some(attempt.lease.attempt)) {
            return Err(format!(
                "attempt {} does not hold its device",
                attempt.lease.attempt
            ));
        }
    }
    Ok(())
}

fn devices(state: &State) -> Result<(), String> {
    for worker in state.workers() {
        for attempt in worker.devices.iter().filter_map(|device| device.attempt) {
            if state.attempt(attempt).is_none() {
                return Err(format!("a device of {} is held by ended {attempt}", worker.name));
            }
        }
    }
    Ok(())
}

fn hosts(state: &State) -> Result<(), String> {
    let mut running: BTreeMap<&str, (usize, bool)> = BTreeMap::new();
    for attempt in state.attempts() {
        let Some(worker) = state.worker(attempt.worker) else {
            continue;
        };
        let (count, exclusive) = running.entry(worker.host.as_str()).or_default();
        *count += 1;
        *exclusive |= attempt.exclusive;
    }
    match running
        .iter()
        .find(|(_, (count, exclusive))| *exclusive && *count > 1)
    {
        Some((host, _)) => Err(format!("host {host} measures while something else runs")),
        None => Ok(()),
    }
}
