//! Which waiting task goes to which free device.
//!
//! Tasks are handed out in the order of their ids, so an earlier job goes first. A device whose child
//! already holds the same job and executor is preferred, then one that holds the job. A task that
//! measures time gets its host for itself: while one waits and no host is quiet, the host with the
//! fewest attempts takes nothing new, so that it becomes quiet.

use std::collections::{BTreeMap, BTreeSet};

use super::{AttemptId, Device, Event, Now, Standing, State, Task, TaskId, Worker, WorkerId};

struct Free<'a> {
    worker: &'a Worker,
    device: &'a Device,
}

#[derive(Default)]
struct Host {
    running: usize,
    exclusive: bool,
    held: bool,
}

/// Hands waiting tasks to free devices.
pub fn place(state: &State, absent: &BTreeSet<WorkerId>, now: Now) -> Vec<Event> {
    let mut free: BTreeMap<(WorkerId, &str), Free<'_>> = free_devices(state, absent);
    let mut hosts = hosts(state);
    let mut events = Vec::new();
    let mut attempt: AttemptId = state.next_attempt();
    for task in state.ready.iter().filter_map(|task| state.task(*task)) {
        if free.is_empty() {
            break;
        }
        let Some((worker, device)) = choose(state, task, &free, &hosts) else {
            if task.exclusive {
                hold_a_host(state, task, &free, &mut hosts);
            }
            continue;
        };
        if let Some(taken) = free.remove(&(worker, device)) {
            let host = hosts.entry(taken.worker.host.as_str()).or_default();
            host.running = host.running.saturating_add(1);
            host.exclusive |= task.exclusive;
        }
        let (task, at): (TaskId, i64) = (task.id, now.unix_ms);
        events.push(Event::AttemptStarted {
            attempt,
            task,
            worker,
            device: device.to_owned(),
            at,
        });
        attempt = attempt.next();
    }
    events
}

fn free_devices<'a>(
    state: &'a State,
    absent: &BTreeSet<WorkerId>,
) -> BTreeMap<(WorkerId, &'a str), Free<'a>> {
    let mut free = BTreeMap::new();
    let able = |worker: &&Worker| worker.standing == Standing::Present && !absent.contains(&worker.id);
    for worker in state.workers().filter(able) {
        for device in worker.devices.iter().filter(|device| device.attempt.is_none()) {
            free.insert((worker.id, device.info.id.as_str()), Free { worker, device });
        }
    }
    free
}

fn hosts(state: &State) -> BTreeMap<&str, Host> {
    let mut hosts: BTreeMap<&str, Host> = BTreeMap::new();
    for attempt in state.attempts() {
        let Some(worker) = state.worker(attempt.worker) else {
            continue;
        };
        let host = hosts.entry(worker.host.as_str()).or_default();
        host.running = host.running.saturating_add(1);
        host.exclusive |= attempt.exclusive;
    }
    hosts
}

fn choose<'a>(
    state: &State,
    task: &Task,
    free: &BTreeMap<(WorkerId, &'a str), Free<'a>>,
    hosts: &BTreeMap<&str, Host>,
) -> Option<(WorkerId, &'a str)> {
    let fits = free.iter().filter(|(_, candidate)| {
        let host = hosts.get(candidate.worker.host.as_str());
        let quiet = host.is_none_or(|host| host.running == 0);
        let open = host.is_none_or(|host| !host.exclusive && !host.held);
        kind_fits(state, task, candidate) && if task.exclusive { quiet } else { open }
    });
    fits.min_by_key(|((worker, _), candidate)| {
        (
            task.failed_on == Some(*worker),
            strangeness(task, candidate.device),
        )
    })
    .map(|(key, _)| *key)
}

fn kind_fits(state: &State, task: &Task, candidate: &Free<'_>) -> bool {
    state
        .job(task.job)
        .is_some_and(|job| job.device_kind == candidate.device.info.kind)
}

/// How much a device's child would have to change to run the task.
fn strangeness(task: &Task, device: &Device) -> u8 {
    match &device.last {
        Some((job, kind)) if *job == task.job && *kind == task.kind => 0,
        Some((job, _)) if *job == task.job => 1,
        None => 2,
        Some(_) => 3,
    }
}

fn hold_a_host<'a>(
    state: &'a State,
    task: &Task,
    free: &BTreeMap<(WorkerId, &'a str), Free<'a>>,
    hosts: &mut BTreeMap<&'a str, Host>,
) {
    let waiting_for_one = hosts.values().any(|host| host.held);
    if waiting_for_one {
        return;
    }
    let able: BTreeSet<&str> = free
        .values()
        .filter(|candidate| kind_fits(state, task, candidate))
        .map(|candidate| candidate.worker.host.as_str())
        .collect();
    let fewest = able
        .into_iter()
        .min_by_key(|host| hosts.get(host).map_or(0, |host| host.running));
    if let Some(host) = fewest {
        hosts.entry(host).or_default().held = true;
    }
}
