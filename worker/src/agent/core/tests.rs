#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

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

#[test]
fn a_result_is_said_on_every_stream_until_it_is_acknowledged() {
    let mut world = World::welcomed();
    assert_eq!(runs(&world.message(assign(1, "a"))), [1]);
    assert!(matches!(
        said(&world.ended(1, output()))[..],
        [FromWorker::Completed(_)]
    ));
    world.lose();
    assert_eq!(world.hello().attempts, [lease(1)]);
    let greeting = world.greeting();
    assert!(matches!(
        said(&world.welcome(greeting))[..],
        [FromWorker::Completed(_)]
    ));
    world.message(acknowledged(1));
    assert_eq!(world.core.leases(), []);
    world.lose();
    assert_eq!(said(&world.reconnect()).len(), 0);
}

#[test]
fn the_same_lease_twice_is_one_attempt() {
    let mut world = World::welcomed();
    assert_eq!(runs(&world.message(assign(1, "a"))), [1]);
    assert_eq!(world.message(assign(1, "a")), []);
    world.ended(1, output());
    let again = world.message(assign(1, "a"));
    assert!(matches!(said(&again)[..], [FromWorker::Completed(_)]));
    world.message(acknowledged(1));
    let over = world.message(assign(1, "a"));
    assert_eq!(runs(&over), [0_u64; 0], "what is over does not run again");
}

/// Seed 81 of the simulation: the coordinator's disk was lost after the acknowledgement, and its successor
/// waited for the attempt for ever.
#[test]
fn what_is_over_is_handed_back_to_a_coordinator_that_does_not_know_it() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.ended(1, output());
    world.message(acknowledged(1));
    let again = world.message(assign(1, "a"));
    assert!(matches!(said(&again)[..], [FromWorker::Stopped(_)]));
    world.message(acknowledged(1));
    assert_eq!(world.core.leases(), []);
}

#[test]
fn a_device_runs_one_attempt_at_a_time() {
    let mut world = World::welcomed();
    assert_eq!(runs(&world.message(assign(1, "a"))), [1]);
    assert_eq!(runs(&world.message(assign(2, "a"))), [0_u64; 0]);
    assert_eq!(runs(&world.message(assign(3, "b"))), [3]);
    assert_eq!(runs(&world.ended(1, output())), [2]);
}

#[test]
fn a_superseded_attempt_is_stopped_and_says_nothing_more() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.message(assign(2, "a"));
    let outputs = world.message(FromCoordinator::Superseded(superseded(1)));
    assert_eq!(stops(&outputs), [(1, false)]);
    let progress = DeviceEvent::Progress {
        lease: lease(1),
        progress_json: Vec::new(),
    };
    assert_eq!(world.device(progress), []);
    let outputs = world.ended(1, output());
    assert_eq!(said(&outputs).len(), 0);
    assert_eq!(runs(&outputs), [2], "the device goes on when it is free");
}

#[test]
fn attempts_that_a_welcome_or_a_heartbeat_disowns_are_dropped() {
    let mut world = World::welcomed();
    for (attempt, device) in [(1, "a"), (2, "b")] {
        world.message(assign(attempt, device));
    }
    world.ended(1, output());
    world.lose();
    world.hello();
    let mut greeting = world.greeting();
    greeting.superseded = vec![superseded(1)];
    assert_eq!(said(&world.welcome(greeting)).len(), 0);
    let connection = world.connection;
    let answer = HeartbeatResponse {
        term: 3,
        superseded: vec![superseded(2)],
    };
    let outputs = world.give(Input::HeartbeatAnswer { connection, answer });
    assert_eq!(stops(&outputs), [(2, false)]);
    assert_eq!(world.core.leases(), []);
}

#[test]
fn a_cancel_that_crosses_a_result_is_answered_with_the_result() {
    let mut world = World::welcomed();
    let cancel = |attempt| {
        FromCoordinator::Cancel(Cancel {
            lease: Some(lease(attempt)),
            reason: String::new(),
        })
    };
    world.message(assign(1, "a"));
    world.message(assign(2, "a"));
    assert_eq!(stops(&world.message(cancel(1))), [(1, false)]);
    assert_eq!(stops(&world.message(cancel(1))), [], "once is enough");
    assert!(matches!(
        said(&world.message(cancel(2)))[..],
        [FromWorker::Stopped(_)]
    ));
    assert!(matches!(
        said(&world.ended(1, output()))[..],
        [FromWorker::Completed(_)]
    ));
    assert!(matches!(
        said(&world.message(cancel(1)))[..],
        [FromWorker::Completed(_)]
    ));
    assert!(matches!(
        said(&world.message(cancel(9)))[..],
        [FromWorker::Stopped(_)]
    ));
}

#[test]
fn an_old_coordinator_is_not_served_again() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.lose();
    assert_eq!(world.hello().highest_term, 3);
    world.term = 2;
    let greeting = world.greeting();
    let outputs = world.welcome(greeting);
    assert!(matches!(outputs[..], [Output::Disconnect { .. }]), "{outputs:?}");
    assert!(!world.core.is_connected());
    world.term = 4;
    world.reconnect();
    assert!(world.core.is_connected());
    assert_eq!(world.core.highest_term(), 4);
    assert_eq!(
        world.core.leases(),
        [lease(1)],
        "a lease of the term before goes on"
    );
}

#[test]
fn out_of_touch_for_the_orphan_grace_work_stops_and_results_are_kept() {
    let mut world = World::welcomed();
    for (attempt, device) in [(1, "a"), (2, "b")] {
        world.message(assign(attempt, device));
    }
    world.ended(1, output());
    world.lose();
    let lost = world.now;
    let mut stopped = None;
    while stopped.is_none() {
        let outputs = world.give(Input::Tick);
        if !stops(&outputs).is_empty() {
            assert_eq!(stops(&outputs), [(2, false)]);
            stopped = Some(world.now);
        }
        world.now = world.core.wake_at().unwrap();
    }
    assert_eq!(
        stopped,
        Some(lost + 1800 * SECOND),
        "not a moment earlier or later"
    );
    world.ended(2, Ended::Stopped);
    let again = world.reconnect();
    assert!(matches!(
        said(&again)[..],
        [FromWorker::Completed(_), FromWorker::Stopped(_)]
    ));
}

#[test]
fn heartbeats_go_out_each_interval_and_silence_ends_the_connection() {
    let mut world = World::welcomed();
    // The first went out with the welcome.
    let answer = || Input::HeartbeatAnswer {
        connection: 1,
        answer: HeartbeatResponse {
            term: 3,
            superseded: Vec::new(),
        },
    };
    world.give(answer());
    let mut beats = Vec::new();
    let lost = loop {
        world.now = world.core.wake_at().unwrap();
        let outputs = world.give(Input::Tick);
        if outputs.contains(&Output::Disconnect { connection: 1 }) {
            break world.now;
        }
        let beat = |output: &Output| matches!(output, Output::Heartbeat { .. });
        if outputs.iter().any(beat) {
            beats.push(world.now);
            if beats.len() <= 3 {
                world.give(answer());
            }
        }
    };
    assert_eq!(beats[..4], [10, 20, 30, 40].map(|seconds| seconds * SECOND));
    assert_eq!(
        lost,
        70 * SECOND,
        "30 s after the first that was not answered since the last answer"
    );
}

#[test]
fn a_heartbeat_that_was_never_sent_is_not_missed() {
    let mut world = World::welcomed();
    let connection = world.connection;
    let answer = HeartbeatResponse {
        term: 3,
        superseded: Vec::new(),
    };
    world.give(Input::HeartbeatAnswer { connection, answer });
    assert_eq!(world.core.wake_at_but_heartbeats(), None);
    world.now = 100_000 * SECOND;
    world.message(assign(1, "a"));
    assert!(world.core.is_connected());
}

#[test]
fn a_coordinator_that_started_anew_is_greeted_anew() {
    let mut world = World::welcomed();
    let connection = world.connection;
    let answer = HeartbeatResponse {
        term: 4,
        superseded: Vec::new(),
    };
    let outputs = world.give(Input::HeartbeatAnswer { connection, answer });
    assert!(outputs.contains(&Output::Disconnect { connection }));
}

#[test]
fn news_of_an_earlier_connection_is_ignored() {
    let mut world = World::welcomed();
    world.lose();
    world.reconnect();
    let stale = Input::Message {
        connection: 1,
        message: assign(1, "a"),
    };
    assert_eq!(world.give(stale), []);
    let stale = Input::ConnectionLost {
        connection: 1,
        reason: String::new(),
    };
    assert_eq!(world.give(stale), []);
    assert!(world.core.is_connected());
}

#[test]
fn pauses_between_connections_grow_and_differ_between_workers() {
    let pauses = |seed: u64| {
        let mut pauses = link::Pauses::new(seed);
        [(); 12].map(|()| pauses.next())
    };
    let first = pauses(1);
    assert_eq!(first, pauses(1));
    assert_ne!(first, pauses(2));
    assert!(first[0] <= SECOND / 10 && first[11] >= 5 * SECOND / 2 && first[11] <= 5 * SECOND);
}

#[test]
fn a_worker_that_is_drained_asks_for_checkpoints_hands_back_and_leaves() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.message(assign(2, "a"));
    let outputs = world.message(FromCoordinator::Drain(Drain {
        reason: String::new(),
        term: 3,
    }));
    assert_eq!(stops(&outputs), [(1, true)]);
    assert!(matches!(
        said(&outputs)[..],
        [FromWorker::Leaving(_), FromWorker::Stopped(_)]
    ));
    let late = world.message(assign(3, "b"));
    assert_eq!(runs(&late).len(), 0);
    assert!(matches!(said(&late)[..], [FromWorker::Stopped(_)]));
    world.ended(1, Ended::Stopped);
    for attempt in [1, 2] {
        assert_eq!(finish(&world.message(acknowledged(attempt))), None);
    }
    assert_eq!(finish(&world.message(acknowledged(3))), Some(&Finish::Left));
}

#[test]
fn a_worker_out_of_touch_stays_for_its_results_and_not_for_its_stops() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.message(assign(2, "b"));
    world.lose();
    world.give(Input::ShutdownAsked);
    world.ended(2, output());
    assert_eq!(
        finish(&world.ended(1, Ended::Stopped)),
        None,
        "a result would be lost"
    );
    world.now += 60 * SECOND;
    assert_eq!(finish(&world.give(Input::Tick)), Some(&Finish::Killed));

    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.lose();
    world.give(Input::ShutdownAsked);
    assert_eq!(finish(&world.ended(1, Ended::Stopped)), Some(&Finish::Left));
}

#[test]
fn the_second_signal_and_the_drain_timeout_kill() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    assert_eq!(finish(&world.give(Input::ShutdownAsked)), None);
    assert_eq!(finish(&world.give(Input::ShutdownAsked)), Some(&Finish::Killed));

    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.give(Input::ShutdownAsked);
    world.now += 60 * SECOND;
    assert_eq!(finish(&world.give(Input::Tick)), Some(&Finish::Killed));
}

#[test]
fn a_restart_replaces_idle_children_now_and_busy_ones_when_they_are_free() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.message(assign(2, "a"));
    let replaced = |outputs: &[Output]| -> Vec<String> {
        let replaced = outputs.iter().filter_map(|output| match output {
            Output::ReplaceChild { device } => Some(device.clone()),
            _ => None,
        });
        replaced.collect()
    };
    let outputs = world.message(FromCoordinator::Restart(Restart {
        reason: String::new(),
        term: 3,
    }));
    assert_eq!(replaced(&outputs), ["b"]);
    assert_eq!(stops(&outputs), [], "what runs is let end");
    let outputs = world.ended(1, output());
    assert_eq!(replaced(&outputs), ["a"]);
    assert_eq!(runs(&outputs), [2]);
    let stale = world.message(FromCoordinator::Restart(Restart {
        reason: String::new(),
        term: 2,
    }));
    assert_eq!(stale, [], "an old term restarts nothing");
}

#[test]
fn a_rank_says_it_stands_ready_on_each_stream_until_it_is_released_once() {
    let mut world = World::welcomed();
    world.message(rank(1, "a"));
    let release = || {
        FromCoordinator::Release(Release {
            lease: Some(lease(1)),
            communicator: "c".to_owned(),
            addresses: vec!["x:1".to_owned(), "y:2".to_owned()],
        })
    };
    assert_eq!(world.message(release()), [], "it does not stand ready yet");
    let outputs = world.device(DeviceEvent::Prepared {
        lease: lease(1),
        address: "x:1".to_owned(),
    });
    assert!(matches!(said(&outputs)[..], [FromWorker::Prepared(_)]));
    world.lose();
    assert!(matches!(said(&world.reconnect())[..], [FromWorker::Prepared(_)]));
    assert!(matches!(world.message(release())[..], [Output::Release { .. }]));
    assert_eq!(world.message(release()), [], "once");
    world.lose();
    assert_eq!(said(&world.reconnect()).len(), 0);
}

#[test]
fn lines_that_may_be_lost_with_a_stream_are_sent_again_with_their_numbers() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    let line = |text: &str| DeviceEvent::Log {
        lease: lease(1),
        lines: vec![text.to_owned()],
    };
    world.device(line("one"));
    world.lose();
    assert_eq!(world.device(line("two")), []);
    let outputs = world.reconnect();
    let [FromWorker::Log(log)] = said(&outputs)[..] else {
        panic!("{outputs:?}")
    };
    assert_eq!(log.lines, ["one", "two"]);
    assert_eq!(log.first_line, 1);
}

#[test]
fn a_refusal_ends_a_worker_at_once_only_when_nobody_ever_welcomed_it() {
    let refused = |world: &World| Input::Refused {
        connection: world.connection,
        reason: "no".to_owned(),
    };
    let mut world = World::alone();
    world.hello();
    let input = refused(&world);
    assert!(matches!(finish(&world.give(input)), Some(Finish::Refused(_))));

    let mut world = World::welcomed();
    world.lose();
    let lost = world.now;
    loop {
        world.now = world.core.wake_at().unwrap();
        let outputs = world.give(Input::Tick);
        if finish(&outputs).is_some() {
            break;
        }
        if outputs
            .iter()
            .any(|output| matches!(output, Output::Connect { .. }))
        {
            let input = refused(&world);
            world.give(input);
        }
    }
    assert!(world.now >= lost + 1800 * SECOND);
}

#[test]
fn an_unknown_device_or_a_stale_epoch_runs_nothing() {
    let mut world = World::welcomed();
    assert!(matches!(
        said(&world.message(assign(1, "nowhere")))[..],
        [FromWorker::Failed(_)]
    ));
    let mut stale = lease(2);
    stale.epoch = 6;
    let stale = FromCoordinator::Assign(Assign {
        lease: Some(stale),
        device_id: "a".to_owned(),
        ..Assign::default()
    });
    assert_eq!(world.message(stale), []);
}
