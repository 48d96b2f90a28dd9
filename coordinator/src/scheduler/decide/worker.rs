//! Workers that come and go, and what users may do with them.

use std::collections::HashSet;

use super::Decision;
use super::attempt::lose;
use crate::scheduler::{
    Command, Epoch, Event, Introduction, Now, Rejection, Standing, State, Worker, WorkerId,
};

pub fn decide(state: &State, command: Command, now: Now) -> Decision {
    let at = now.unix_ms;
    match command {
        Command::Introduce(introduction) => introduce(state, introduction, now),
        Command::Leave { worker, epoch } => Ok(match current(state, worker, epoch)? {
            Standing::Present => vec![Event::WorkerLeaving { worker, drain: None }],
            Standing::Leaving | Standing::Lost | Standing::Left => Vec::new(),
        }),
        Command::WorkerSilent { worker, epoch } => Ok(match current(state, worker, epoch)? {
            Standing::Leaving if state.attempts_on(worker).next().is_none() => {
                vec![Event::WorkerLeft { worker }]
            }
            Standing::Present | Standing::Leaving => lose(state, worker, now),
            Standing::Lost | Standing::Left => Vec::new(),
        }),
        Command::Forget { worker } => Ok(forget(state, worker)),
        Command::Cordon { worker, reason } => {
            let by_rule = false;
            Ok(match &known(state, worker)?.cordon {
                Some(_) => Vec::new(),
                None => vec![Event::WorkerCordoned {
                    worker,
                    reason,
                    by_rule,
                    at,
                }],
            })
        }
        Command::Uncordon { worker } => Ok(match &known(state, worker)?.cordon {
            Some(_) => vec![Event::WorkerUncordoned { worker, at }],
            None => {
                stays(state, worker)?;
                Vec::new()
            }
        }),
        Command::Drain { worker, reason } => {
            let known = not_lost(state, worker)?;
            let drain = Some(reason);
            Ok(match &known.drain {
                Some(_) => Vec::new(),
                None => vec![Event::WorkerLeaving { worker, drain }],
            })
        }
        Command::RestartWorker { worker, reason } => {
            stays(state, worker)?;
            Ok(vec![Event::WorkerRestartAsked { worker, reason, at }])
        }
        _ => Ok(Vec::new()),
    }
}

fn known(state: &State, worker: WorkerId) -> Result<&Worker, Rejection> {
    state.worker(worker).ok_or(Rejection::NoSuchWorker(worker))
}

fn not_lost(state: &State, worker: WorkerId) -> Result<&Worker, Rejection> {
    let known = known(state, worker)?;
    match known.standing {
        Standing::Present | Standing::Leaving => Ok(known),
        Standing::Lost => Err(Rejection::WorkerGone {
            name: known.name.clone(),
            standing: "was lost: start it again",
        }),
        Standing::Left => Err(Rejection::WorkerGone {
            name: known.name.clone(),
            standing: "has left: start it again",
        }),
    }
}

/// What is asked of a worker on its way out would have no effect.
fn stays(state: &State, worker: WorkerId) -> Result<(), Rejection> {
    let known = not_lost(state, worker)?;
    match known.standing {
        Standing::Leaving => Err(Rejection::WorkerGone {
            name: known.name.clone(),
            standing: "is leaving, which is not taken back: start it again once it has left",
        }),
        Standing::Present | Standing::Lost | Standing::Left => Ok(()),
    }
}

/// What a user said of a worker is kept, and so is the newest: numbers of workers are not given again.
fn forget(state: &State, worker: WorkerId) -> Vec<Event> {
    let is_newest = state.workers.keys().next_back() == Some(&worker);
    let cordoned = |known: &Worker| known.cordon.as_ref().is_some_and(|cordon| !cordon.by_rule);
    match state.worker(worker) {
        Some(known) if known.standing.is_gone() && !cordoned(known) && !is_newest => {
            vec![Event::WorkerForgotten { worker }]
        }
        _ => Vec::new(),
    }
}

/// Where the worker stands, if this is its present incarnation.
fn current(state: &State, worker: WorkerId, epoch: Epoch) -> Result<Standing, Rejection> {
    let known = state
        .worker(worker)
        .ok_or_else(|| Rejection::Stale(format!("worker {worker} is unknown: introduce it")))?;
    if known.epoch != epoch {
        return Err(Rejection::Stale(format!(
            "worker `{}` is at epoch {}, not {epoch}",
            known.name, known.epoch
        )));
    }
    Ok(known.standing)
}

fn introduce(state: &State, introduction: Introduction, now: Now) -> Decision {
    let mut ids = HashSet::new();
    if introduction.devices.is_empty() {
        return Err(Rejection::Invalid(format!(
            "worker `{}` has no device",
            introduction.name
        )));
    }
    if let Some(twice) = introduction.devices.iter().find(|device| !ids.insert(&device.id)) {
        return Err(Rejection::Invalid(format!(
            "device id `{}` is used twice",
            twice.id
        )));
    }
    let mut events = Vec::new();
    let worker = match state.worker_named(&introduction.name) {
        Some(known) if introduction.epoch < known.epoch => {
            return Err(Rejection::StaleEpoch {
                name: introduction.name,
                known: known.epoch,
                said: introduction.epoch,
            });
        }
        Some(known) if introduction.epoch == known.epoch => return Ok(came_back(known)),
        Some(known) => {
            events = lose(state, known.id, now);
            known.id
        }
        None => {
            let newest = state.workers.keys().next_back().copied();
            newest.unwrap_or_default().next()
        }
    };
    let Introduction {
        name,
        epoch,
        host,
        devices,
    } = introduction;
    events.push(Event::WorkerJoined {
        worker,
        name,
        epoch,
        host,
        devices,
    });
    Ok(events)
}

/// The same incarnation on a new stream. One that a user asked to leave is still to leave.
fn came_back(known: &Worker) -> Vec<Event> {
    let worker = known.id;
    match (known.standing, &known.drain) {
        (Standing::Present, _) | (Standing::Leaving, Some(_)) => Vec::new(),
        (Standing::Leaving | Standing::Lost | Standing::Left, None) => vec![Event::WorkerReturned { worker }],
        (Standing::Lost | Standing::Left, Some(_)) => {
            let drain = known.drain.clone();
            vec![Event::WorkerLeaving { worker, drain }]
        }
    }
}
