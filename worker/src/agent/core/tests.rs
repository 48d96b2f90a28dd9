//! A core and a coordinator played by the test; what they say to each other is told by theme.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attempts;
mod connection;
mod leaving;
mod logs;

use std::time::Duration;

use espalier_proto::task::{Failure, FailureKind};
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{
    Acknowledged, Assign, Cancel, Device, Drain, Gang, HeartbeatResponse, Lease, Release, Restart,
    Superseded, Welcome,
};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// A core and its coordinator, who is the test.
struct World {
    core: Core,
    now: Duration,
    connection: u64,
    term: u64,
}

fn lease(attempt: u64) -> Lease {
    Lease {
        term: 3,
        epoch: 7,
        attempt,
    }
}

fn output() -> Ended {
    Ended::Output(b"{}".to_vec())
}

fn assign(attempt: u64, device: &str) -> FromCoordinator {
    FromCoordinator::Assign(Assign {
        lease: Some(lease(attempt)),
        device_id: device.to_owned(),
        ..Assign::default()
    })
}

fn rank(attempt: u64, device: &str) -> FromCoordinator {
    FromCoordinator::Assign(Assign {
        lease: Some(lease(attempt)),
        device_id: device.to_owned(),
        gang: Some(Gang {
            generation: 1,
            rank: 0,
            ranks: 2,
        }),
        ..Assign::default()
    })
}

fn acknowledged(attempt: u64) -> FromCoordinator {
    FromCoordinator::Acknowledged(Acknowledged {
        lease: Some(lease(attempt)),
    })
}

fn superseded(attempt: u64) -> Superseded {
    Superseded {
        lease: Some(lease(attempt)),
        reason: String::new(),
    }
}

impl World {
    /// A worker with devices `a` and `b` that nobody has welcomed.
    fn alone() -> Self {
        let device = |id: &str| Device {
            id: id.to_owned(),
            kind: "cpu".to_owned(),
            ..Device::default()
        };
        let options = CoreOptions {
            name: "w".to_owned(),
            host: String::new(),
            epoch: 7,
            devices: vec![device("a"), device("b")],
            drain_timeout: 60 * SECOND,
            seed: 1,
        };
        Self {
            core: Core::new(options),
            now: Duration::ZERO,
            connection: 0,
            term: 3,
        }
    }

    /// The same, welcomed by term 3.
    fn welcomed() -> Self {
        let mut world = Self::alone();
        world.reconnect();
        world
    }

    fn give(&mut self, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.core.handle(input, self.now, &mut outputs);
        for output in &outputs {
            if let Output::Connect { connection, .. } = output {
                self.connection = *connection;
            }
        }
        outputs
    }

    fn message(&mut self, message: FromCoordinator) -> Vec<Output> {
        let connection = self.connection;
        self.give(Input::Message { connection, message })
    }

    fn device(&mut self, event: DeviceEvent) -> Vec<Output> {
        self.give(Input::Device(event))
    }

    fn ended(&mut self, attempt: u64, ended: Ended) -> Vec<Output> {
        self.device(DeviceEvent::Ended {
            lease: lease(attempt),
            ended,
        })
    }

    fn lose(&mut self) -> Vec<Output> {
        let connection = self.connection;
        self.give(Input::ConnectionLost {
            connection,
            reason: "cut".to_owned(),
        })
    }

    /// Waits until the core asks for a connection; the hello.
    fn hello(&mut self) -> Hello {
        for _ in 0..10 {
            let found = self
                .give(Input::Tick)
                .into_iter()
                .find_map(|output| match output {
                    Output::Connect { hello, .. } => Some(*hello),
                    _ => None,
                });
            if let Some(hello) = found {
                return hello;
            }
            self.now = self.core.wake_at().expect("a core that is not done wakes up");
        }
        panic!("no connection was asked for");
    }

    fn welcome(&mut self, welcome: Welcome) -> Vec<Output> {
        let connection = self.connection;
        self.give(Input::Connected {
            connection,
            welcome: Box::new(welcome),
        })
    }

    fn greeting(&self) -> Welcome {
        Welcome {
            protocol_version: espalier_proto::PROTOCOL_VERSION,
            term: self.term,
            worker_id: 5,
            heartbeat_interval_ms: 10_000,
            worker_lost_ms: 30_000,
            orphan_grace_ms: 1_800_000,
            artifact_store: "file:///artifacts".to_owned(),
            artifact_store_id: "0123".to_owned(),
            superseded: Vec::new(),
        }
    }

    fn reconnect(&mut self) -> Vec<Output> {
        self.hello();
        let greeting = self.greeting();
        self.welcome(greeting)
    }
}

fn said(outputs: &[Output]) -> Vec<&FromWorker> {
    let sent = outputs.iter().filter_map(|output| match output {
        Output::Send(message) => Some(message),
        _ => None,
    });
    sent.collect()
}

fn runs(outputs: &[Output]) -> Vec<u64> {
    let runs = outputs.iter().filter_map(|output| match output {
        Output::Run(run) => Some(run.lease.attempt),
        _ => None,
    });
    runs.collect()
}

fn stops(outputs: &[Output]) -> Vec<(u64, bool)> {
    let stops = outputs.iter().filter_map(|output| match output {
        Output::Stop {
            lease, checkpoint, ..
        } => Some((lease.attempt, *checkpoint)),
        _ => None,
    });
    stops.collect()
}

fn finish(outputs: &[Output]) -> Option<&Finish> {
    outputs.iter().find_map(|output| match output {
        Output::Finish(how) => Some(how),
        _ => None,
    })
}
