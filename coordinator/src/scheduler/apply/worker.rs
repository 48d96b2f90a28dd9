//! What happens to a worker as a whole.

use crate::scheduler::{Cordon, Device, DeviceInfo, Event, Name, Standing, State, Worker, WorkerId};

pub fn apply(state: &mut State, event: &Event) {
    match event {
        Event::WorkerJoined { .. } => joined(state, event),
        Event::WorkerReturned { worker } => change(state, *worker, |worker| {
            worker.standing = Standing::Present;
            worker.drain = None;
        }),
        Event::WorkerLeaving { worker, drain } => change(state, *worker, |worker| {
            worker.standing = Standing::Leaving;
            if drain.is_some() {
                worker.drain.clone_from(drain);
            }
        }),
        Event::WorkerLost { worker } => change(state, *worker, |worker| worker.standing = Standing::Lost),
        Event::WorkerLeft { worker } => change(state, *worker, |worker| worker.standing = Standing::Left),
        Event::WorkerForgotten { worker } => forgotten(state, *worker),
        Event::WorkerCordoned {
            worker,
            reason,
            by_rule,
            ..
        } => change(state, *worker, |worker| {
            worker.cordon = Some(Cordon {
                reason: reason.clone(),
                by_rule: *by_rule,
            });
        }),
        Event::WorkerUncordoned { worker, .. } => change(state, *worker, |worker| {
            worker.cordon = None;
            worker.failed_in_a_row.clear();
        }),
        // Only said on: see `effects`.
        _ => {}
    }
}

fn joined(state: &mut State, event: &Event) {
    let Event::WorkerJoined {
        worker: id,
        name,
        epoch,
        host,
        devices,
    } = event
    else {
        return;
    };
    let before = state.workers.remove(id);
    if let Some(before) = &before {
        state.index.withdraw(before);
    }
    let (cordon, failed_in_a_row) = before
        .map(|before| (before.cordon, before.failed_in_a_row))
        .unwrap_or_default();
    let joined = Worker {
        id: *id,
        name: name.clone(),
        epoch: *epoch,
        host: Name::from(host.as_str()),
        devices: devices.iter().map(idle).collect(),
        standing: Standing::Present,
        cordon,
        drain: None,
        failed_in_a_row,
    };
    state.index.worker_names.insert(name.clone(), *id);
    state.index.offer(&joined);
    state.workers.insert(*id, joined);
}

fn forgotten(state: &mut State, id: WorkerId) {
    let Some(worker) = state.workers.remove(&id) else {
        return;
    };
    state.index.withdraw(&worker);
    if state.index.worker_names.get(&worker.name) == Some(&id) {
        state.index.worker_names.remove(&worker.name);
    }
}

fn idle(info: &DeviceInfo) -> Device {
    Device {
        info: info.clone(),
        attempt: None,
        last: None,
    }
}

/// Changes whether a worker gets work, and so which devices are on offer.
fn change(state: &mut State, id: WorkerId, change: impl FnOnce(&mut Worker)) {
    let Some(worker) = state.workers.get_mut(&id) else {
        return;
    };
    state.index.withdraw(worker);
    change(worker);
    state.index.offer(worker);
}
