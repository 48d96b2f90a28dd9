//! Which attempts run, and which results the coordinator has not acknowledged. Pure: no I/O, no clock.

use std::collections::BTreeMap;

use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{Completed, Failed, Lease, Log, Progress, Stopped};

use super::device::{Ended, Event};

#[derive(Debug, Clone)]
struct Running {
    lease: Lease,
    device: String,
}

#[derive(Debug, Clone)]
struct Unacknowledged {
    lease: Lease,
    message: FromWorker,
}

/// Attempts by number.
#[derive(Debug, Default)]
pub struct State {
    running: BTreeMap<u64, Running>,
    outbox: BTreeMap<u64, Unacknowledged>,
}

impl State {
    /// An attempt starts.
    pub fn begin(&mut self, lease: Lease, device: &str) {
        self.running.insert(
            lease.attempt,
            Running {
                lease,
                device: device.to_owned(),
            },
        );
    }

    /// What to tell the coordinator of an event; nothing when the attempt was given up meanwhile.
    pub fn take_event(&mut self, event: Event) -> Option<FromWorker> {
        match event {
            Event::Progress { lease, progress_json } => {
                self.running.contains_key(&lease.attempt).then(|| {
                    FromWorker::Progress(Progress {
                        lease: Some(lease),
                        progress_json: progress_json.into(),
                    })
                })
            }
            Event::Log { lease, lines } => Some(FromWorker::Log(Log {
                lease: Some(lease),
                lines,
                first_line: 0,
            })),
            Event::Ended { lease, ended } => {
                self.running.remove(&lease.attempt)?;
                let message = match ended {
                    Ended::Output(output_json) => FromWorker::Completed(Completed {
                        lease: Some(lease),
                        output_json: output_json.into(),
                    }),
                    Ended::Failure(failure_json) => FromWorker::Failed(Failed {
                        lease: Some(lease),
                        failure_json: failure_json.into(),
                    }),
                    Ended::Stopped => FromWorker::Stopped(Stopped { lease: Some(lease) }),
                };
                self.outbox.insert(
                    lease.attempt,
                    Unacknowledged {
                        lease,
                        message: message.clone(),
                    },
                );
                Some(message)
            }
        }
    }

    /// What to answer a cancel of an attempt that does not run: its result, when there is one that is not
    /// acknowledged, or that it has stopped.
    pub fn stopped_unless_known(&mut self, lease: Lease) -> Option<FromWorker> {
        if let Some(known) = self.outbox.get(&lease.attempt) {
            return Some(known.message.clone());
        }
        let message = FromWorker::Stopped(Stopped { lease: Some(lease) });
        self.outbox.insert(
            lease.attempt,
            Unacknowledged {
                lease,
                message: message.clone(),
            },
        );
        Some(message)
    }

    /// The coordinator has made an end durable.
    pub fn acknowledge(&mut self, attempt: u64) {
        self.outbox.remove(&attempt);
    }

    /// Gives an attempt up; the device that still runs it.
    pub fn forget(&mut self, attempt: u64) -> Option<String> {
        self.outbox.remove(&attempt);
        self.running.remove(&attempt).map(|running| running.device)
    }

    /// The device that runs an attempt.
    pub fn device_of(&self, attempt: u64) -> Option<String> {
        self.running.get(&attempt).map(|running| running.device.clone())
    }

    /// The end of an attempt that is not acknowledged.
    pub fn result_of(&self, attempt: u64) -> Option<FromWorker> {
        self.outbox.get(&attempt).map(|entry| entry.message.clone())
    }

    /// Every end that is not acknowledged, the oldest attempt first.
    pub fn unacknowledged(&self) -> Vec<FromWorker> {
        self.outbox.values().map(|entry| entry.message.clone()).collect()
    }

    /// Leases of everything that runs or is not acknowledged.
    pub fn leases(&self) -> Vec<Lease> {
        let running = self.running.values().map(|running| running.lease);
        running
            .chain(self.outbox.values().map(|entry| entry.lease))
            .collect()
    }

    /// Attempts that run, with their devices.
    pub fn running(&self) -> Vec<(u64, String)> {
        self.running
            .iter()
            .map(|(attempt, running)| (*attempt, running.device.clone()))
            .collect()
    }

    /// Whether an attempt runs.
    pub fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Whether nothing runs and everything is acknowledged.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.outbox.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn lease(attempt: u64) -> Lease {
        Lease {
            term: 1,
            epoch: 2,
            attempt,
        }
    }

    fn ended(attempt: u64) -> Event {
        Event::Ended {
            lease: lease(attempt),
            ended: Ended::Output(b"{}".to_vec()),
        }
    }

    #[test]
    fn a_completion_is_kept_until_it_is_acknowledged() {
        let mut state = State::default();
        state.begin(lease(1), "cpu");
        assert!(matches!(
            state.take_event(ended(1)),
            Some(FromWorker::Completed(_))
        ));
        assert_eq!(state.unacknowledged().len(), 1);
        assert_eq!(state.leases(), vec![lease(1)]);
        state.acknowledge(1);
        assert!(state.is_idle());
    }

    #[test]
    fn a_superseded_attempt_says_nothing_more() {
        let mut state = State::default();
        state.begin(lease(1), "cpu");
        assert_eq!(state.forget(1).as_deref(), Some("cpu"));
        assert!(state.take_event(ended(1)).is_none());
        assert!(state.is_idle());
    }

    #[test]
    fn a_cancel_that_crosses_a_completion_answers_with_the_completion() {
        let mut state = State::default();
        state.begin(lease(1), "cpu");
        state.take_event(ended(1));
        assert!(matches!(
            state.stopped_unless_known(lease(1)),
            Some(FromWorker::Completed(_))
        ));
        assert!(matches!(
            state.stopped_unless_known(lease(2)),
            Some(FromWorker::Stopped(_))
        ));
    }
}
