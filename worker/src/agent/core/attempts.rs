//! Which attempts wait, run, or ended without an acknowledgement, and what each device is about. It knows
//! nothing of connections: whoever calls decides whether what it gives can be sent now.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use espalier_proto::task::{Failure, FailureKind};
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{Assign, Completed, Failed, Lease, Prepared, Release, Stopped};

use super::interface::{Ended, Output, Run};
use super::link::Terms;
use super::log::LogTail;

/// Attempts that are over and acknowledged, remembered so that an assignment that comes late or twice does
/// not run again what is done.
const OVER: usize = 1024;

/// An attempt's number is unique within a journal; a coordinator that lost the end of its journal gives
/// numbers again, under another term.
type Key = (u64, u64);

fn key(lease: &Lease) -> Key {
    (lease.term, lease.attempt)
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    device: String,
    stage: Stage,
    log: LogTail,
}

#[derive(Debug)]
enum Stage {
    /// For its device to be free.
    Waiting(Box<Run>),
    Running {
        /// Where its gang's other ranks reach it, once it stands ready.
        prepared: Option<String>,
        released: bool,
        stopping: Option<Stopping>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopping {
    AfterCheckpoint,
    Now,
}

#[derive(Debug)]
struct Unacknowledged {
    lease: Lease,
    message: FromWorker,
    log: LogTail,
}

#[derive(Debug, Default)]
struct Device {
    /// What it was given and has not said the end of; maybe an attempt that is no longer ours.
    busy: Option<Key>,
    waiting: VecDeque<Key>,
    replace: bool,
}

/// All of a worker's attempts.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    held: BTreeMap<Key, Held>,
    outbox: BTreeMap<Key, Unacknowledged>,
    devices: BTreeMap<String, Device>,
    over: BTreeSet<Key>,
    /// The same, the one remembered for longest first.
    over_in_order: VecDeque<Key>,
}

impl Attempts {
    pub(super) fn new(devices: impl Iterator<Item = String>) -> Self {
        Self {
            devices: devices.map(|id| (id, Device::default())).collect(),
            ..Self::default()
        }
    }

    /// Takes an assignment. Gives what there is to say at once: the end of an attempt that has ended.
    pub(super) fn assign(
        &mut self,
        lease: Lease,
        assign: Assign,
        terms: &Terms,
        outputs: &mut Vec<Output>,
    ) -> Option<FromWorker> {
        let key = key(&lease);
        if let Some(known) = self.outbox.get(&key) {
            return Some(known.message.clone());
        }
        if self.held.contains_key(&key) {
            return None;
        }
        if self.over.contains(&key) {
            // A coordinator that lost the end of its journal does not know that it is over, and would wait for it
            // for ever.
            tracing::warn!(
                attempt = lease.attempt,
                "an attempt that is over is assigned again: it is handed back"
            );
            return Some(self.hand_back(lease));
        }
        let id = assign.device_id.clone();
        let Some(device) = self.devices.get_mut(&id) else {
            let reason = format!("this worker has no device {id:?}");
            return Some(self.refuse(lease, reason));
        };
        device.waiting.push_back(key);
        let run = Box::new(Run {
            lease,
            assign,
            artifact_store: terms.artifact_store.to_string(),
            artifact_store_id: terms.artifact_store_id.to_string(),
        });
        self.held.insert(
            key,
            Held {
                lease,
                device: id.clone(),
                stage: Stage::Waiting(run),
                log: LogTail::default(),
            },
        );
        self.start_next(&id, outputs);
        None
    }

    fn refuse(&mut self, lease: Lease, message: String) -> FromWorker {
        let failure = Failure {
            kind: FailureKind::Invalid,
            message,
        };
        let json = serde_json::to_vec(&failure).unwrap_or_default();
        self.keep(lease, Ended::Failure(json), LogTail::default())
    }

    /// Hands an attempt back that was never begun.
    pub(super) fn hand_back(&mut self, lease: Lease) -> FromWorker {
        self.keep(lease, Ended::Stopped, LogTail::default())
    }

    /// Keeps an end until it is acknowledged; the message that tells it.
    fn keep(&mut self, lease: Lease, ended: Ended, log: LogTail) -> FromWorker {
        let lease_of = Some(lease);
        let message = match ended {
            Ended::Output(output_json) => FromWorker::Completed(Completed {
                lease: lease_of,
                output_json: output_json.into(),
            }),
            Ended::Failure(failure_json) => FromWorker::Failed(Failed {
                lease: lease_of,
                failure_json: failure_json.into(),
            }),
            Ended::Stopped => FromWorker::Stopped(Stopped { lease: lease_of }),
        };
        self.outbox.insert(
            key(&lease),
            Unacknowledged {
                lease,
                message: message.clone(),
                log,
            },
        );
        message
    }

    /// Gives an idle device what waits for it.
    fn start_next(&mut self, id: &str, outputs: &mut Vec<Output>) {
        let Some(device) = self.devices.get_mut(id) else {
            return;
        };
        if device.busy.is_some() {
            return;
        }
        if std::mem::take(&mut device.replace) {
            outputs.push(Output::ReplaceChild {
                device: id.to_owned(),
            });
        }
        while let Some(key) = device.waiting.pop_front() {
            let Some(held) = self.held.get_mut(&key) else {
                continue;
            };
            let running = Stage::Running {
                prepared: None,
                released: false,
                stopping: None,
            };
            if let Stage::Waiting(run) = std::mem::replace(&mut held.stage, running) {
                device.busy = Some(key);
                outputs.push(Output::Run(run));
                return;
            }
        }
    }

    /// An attempt ended and its device is free. What there is to say, the rest of its log first: nothing when it
    /// is no longer ours.
    pub(super) fn ended(&mut self, lease: Lease, ended: Ended, outputs: &mut Vec<Output>) -> Vec<FromWorker> {
        let key = key(&lease);
        let freed = self
            .devices
            .iter_mut()
            .find(|(_, device)| device.busy == Some(key));
        let freed = freed.map(|(id, device)| {
            device.busy = None;
            id.clone()
        });
        let mut messages = Vec::new();
        if let Some(mut held) = self.held.remove(&key) {
            messages.extend(held.log.say(lease).into_iter().map(FromWorker::Log));
            messages.push(self.keep(held.lease, ended, held.log));
        }
        if let Some(id) = freed {
            self.start_next(&id, outputs);
        }
        messages
    }

    /// What looks after a device has ended and begun anew: what ran there has crashed.
    pub(super) fn device_gone(&mut self, id: &str, outputs: &mut Vec<Output>) -> Vec<FromWorker> {
        let busy = self.devices.get_mut(id).and_then(|device| device.busy.take());
        let Some(key) = busy else { return Vec::new() };
        let mut messages = Vec::new();
        if let Some(held) = self.held.remove(&key) {
            let failure = Failure {
                kind: FailureKind::Crashed,
                message: format!("what looks after device {id} ended abnormally"),
            };
            let json = serde_json::to_vec(&failure).unwrap_or_default();
            messages.push(self.keep(held.lease, Ended::Failure(json), held.log));
        }
        self.start_next(id, outputs);
        messages
    }

    /// Whether an attempt waits or runs.
    pub(super) fn holds(&self, lease: &Lease) -> bool {
        self.held.contains_key(&key(lease))
    }

    /// Whether an attempt waits, runs, or ended without an acknowledgement.
    pub(super) fn knows(&self, lease: &Lease) -> bool {
        self.holds(lease) || self.outbox.contains_key(&key(lease))
    }

    /// Whether anything waits or runs that has not been told to stop at once.
    pub(super) fn may_stop(&self) -> bool {
        self.held.values().any(|held| match &held.stage {
            Stage::Waiting(_) => true,
            Stage::Running { stopping, .. } => *stopping != Some(Stopping::Now),
        })
    }

    /// Takes lines of a log in; nothing when the attempt is no longer ours.
    pub(super) fn log(&mut self, lease: &Lease, first_line: u64, lines: Vec<String>) {
        if let Some(held) = self.held.get_mut(&key(lease)) {
            held.log.push(first_line, lines);
        }
    }

    /// Lines of an attempt that found no room on the stream.
    pub(super) fn log_held_back(&mut self, lease: &Lease, first_line: u64) {
        if let Some(log) = self.log_of(&key(lease)) {
            log.unsay(first_line);
        }
    }

    fn log_of(&mut self, key: &Key) -> Option<&mut LogTail> {
        let held = self.held.get_mut(key).map(|held| &mut held.log);
        held.or_else(|| self.outbox.get_mut(key).map(|entry| &mut entry.log))
    }

    /// What no stream has taken yet of the logs of what runs.
    pub(super) fn say_logs(&mut self) -> Vec<FromWorker> {
        let logs = self.held.values_mut().flat_map(|held| held.log.say(held.lease));
        logs.map(FromWorker::Log).collect()
    }

    /// A rank stands ready; what there is to say.
    pub(super) fn prepared(&mut self, lease: &Lease, address: String) -> Option<FromWorker> {
        let held = self.held.get_mut(&key(lease))?;
        let Stage::Running { prepared, .. } = &mut held.stage else {
            return None;
        };
        *prepared = Some(address.clone());
        Some(FromWorker::Prepared(Prepared {
            lease: Some(held.lease),
            address,
        }))
    }

    /// Passes a release on, once.
    pub(super) fn release(&mut self, release: Release, outputs: &mut Vec<Output>) {
        let Some(lease) = release.lease else { return };
        let Some(held) = self.held.get_mut(&key(&lease)) else {
            return;
        };
        if let Stage::Running {
            prepared: Some(_),
            released: released @ false,
            ..
        } = &mut held.stage
        {
            *released = true;
            outputs.push(Output::Release {
                device: held.device.clone(),
                lease,
                communicator: release.communicator,
                addresses: release.addresses,
            });
        }
    }

    /// Stops an attempt because the coordinator says so. What there is to say at once: the end of one that
    /// has ended, or that one that was never begun is handed back.
    pub(super) fn cancel(&mut self, lease: Lease, outputs: &mut Vec<Output>) -> Option<FromWorker> {
        let key = key(&lease);
        if let Some(known) = self.outbox.get(&key) {
            return Some(known.message.clone());
        }
        self.stop(key, Stopping::Now, outputs)
            .unwrap_or_else(|| Some(self.hand_back(lease)))
    }

    /// Stops everything; the ends of what was never begun.
    pub(super) fn stop_all(&mut self, checkpoint: bool, outputs: &mut Vec<Output>) -> Vec<FromWorker> {
        let how = if checkpoint {
            Stopping::AfterCheckpoint
        } else {
            Stopping::Now
        };
        let keys: Vec<Key> = self.held.keys().copied().collect();
        keys.into_iter()
            .filter_map(|key| self.stop(key, how, outputs).flatten())
            .collect()
    }

    /// None when there is no such attempt; the inner none when it will tell its end later.
    fn stop(&mut self, key: Key, how: Stopping, outputs: &mut Vec<Output>) -> Option<Option<FromWorker>> {
        let held = self.held.get_mut(&key)?;
        let lease = held.lease;
        match &mut held.stage {
            Stage::Waiting(_) => {
                let log = self.held.remove(&key).map(|held| held.log).unwrap_or_default();
                Some(Some(self.keep(lease, Ended::Stopped, log)))
            }
            Stage::Running { stopping, .. } => {
                // A stop for good overrides one that waits for a checkpoint, and not the other way.
                let asked = stopping.is_some_and(|before| before == Stopping::Now || before == how);
                if !asked {
                    *stopping = Some(how);
                    outputs.push(Output::Stop {
                        device: held.device.clone(),
                        lease,
                        checkpoint: how == Stopping::AfterCheckpoint,
                    });
                }
                Some(None)
            }
        }
    }

    /// Gives an attempt up: it is stopped, and nothing more is said of it.
    pub(super) fn supersede(&mut self, lease: &Lease, outputs: &mut Vec<Output>) {
        let key = key(lease);
        self.outbox.remove(&key);
        // Whether it runs or waits: a device passes over what is no longer held.
        self.stop_quietly(key, outputs);
        self.remember(key);
    }

    fn stop_quietly(&mut self, key: Key, outputs: &mut Vec<Output>) {
        let running = self
            .held
            .get(&key)
            .is_some_and(|held| matches!(held.stage, Stage::Running { .. }));
        if running {
            self.stop(key, Stopping::Now, outputs);
        }
        if let Some(held) = self.held.remove(&key) {
            tracing::info!(attempt = held.lease.attempt, "an attempt is no longer ours");
        }
    }

    /// The coordinator has made an end durable.
    pub(super) fn acknowledge(&mut self, lease: &Lease) {
        if self.outbox.remove(&key(lease)).is_some() {
            self.remember(key(lease));
        }
    }

    fn remember(&mut self, key: Key) {
        if self.over.insert(key) {
            self.over_in_order.push_back(key);
        }
        if self.over.len() > OVER
            && let Some(oldest) = self.over_in_order.pop_front()
        {
            self.over.remove(&oldest);
        }
    }

    /// Replaces the children of idle devices now, and of busy ones when they are free.
    pub(super) fn replace_children(&mut self, outputs: &mut Vec<Output>) {
        let ids: Vec<String> = self.devices.keys().cloned().collect();
        for id in ids {
            if let Some(device) = self.devices.get_mut(&id) {
                device.replace = true;
            }
            self.start_next(&id, outputs);
        }
    }

    /// Everything to say on a new stream: unacknowledged ends with their logs before them, ranks that stand
    /// ready, and logs of what runs.
    pub(super) fn say_again(&mut self) -> Vec<FromWorker> {
        let mut messages = Vec::new();
        for entry in self.outbox.values_mut() {
            entry.log.unsay(0);
            messages.extend(entry.log.say(entry.lease).into_iter().map(FromWorker::Log));
            messages.push(entry.message.clone());
        }
        for held in self.held.values() {
            if let Stage::Running {
                prepared: Some(address),
                released: false,
                ..
            } = &held.stage
            {
                messages.push(FromWorker::Prepared(Prepared {
                    lease: Some(held.lease),
                    address: address.clone(),
                }));
            }
        }
        for held in self.held.values_mut() {
            held.log.unsay(0);
        }
        messages.extend(self.say_logs());
        messages
    }

    /// Leases of everything that waits, runs, or is not acknowledged.
    pub(super) fn leases(&self) -> Vec<Lease> {
        let held = self.held.values().map(|held| held.lease);
        held.chain(self.outbox.values().map(|entry| entry.lease))
            .collect()
    }

    /// Whether nothing waits or runs.
    pub(super) fn is_idle(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether everything said is acknowledged.
    pub(super) fn is_acknowledged(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Whether a result, which would be lost with this worker, is not acknowledged.
    pub(super) fn holds_results(&self) -> bool {
        self.outbox
            .values()
            .any(|entry| !matches!(entry.message, FromWorker::Stopped(_)))
    }
}
