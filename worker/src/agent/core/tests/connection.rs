//! Connections: made, lost, refused, and whom they are made to.

use super::*;

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
fn a_refusal_ends_a_worker_at_once_only_when_nobody_ever_welcomed_it() {
    let refused = |world: &World| Input::Refused {
        connection: world.connection,
        refusal: Refusal::Other,
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

fn refused(world: &World, refusal: Refusal) -> Input {
    Input::Refused {
        connection: world.connection,
        refusal,
        reason: "no".to_owned(),
    }
}

#[test]
fn a_new_process_whose_clock_was_set_back_begins_above_the_epoch_it_is_known_by() {
    let mut world = World::alone();
    assert_eq!(world.hello().epoch, 7);
    let refusal = Refusal::Epoch { known: Some(9_000) };
    let input = refused(&world, refusal);
    assert_eq!(finish(&world.give(input)), None);
    assert_eq!(world.hello().epoch, 9_001);
    let greeting = world.greeting();
    world.welcome(greeting);
    assert_eq!(
        runs(&world.message(assign(1, "a"))),
        [0_u64; 0],
        "a lease of epoch 7 is nobody's"
    );
}

#[test]
fn a_worker_whose_name_another_process_has_taken_stops_at_once() {
    for known in [None, Some(9_000)] {
        let mut world = World::welcomed();
        world.message(assign(1, "a"));
        world.lose();
        world.hello();
        let input = refused(&world, Refusal::Epoch { known });
        let outputs = world.give(input);
        assert!(
            matches!(finish(&outputs), Some(Finish::Refused(_))),
            "{outputs:?}"
        );
    }
}

#[test]
fn a_new_process_waits_a_while_for_another_of_its_name_to_go() {
    let refusal = Refusal::Epoch { known: None };
    let mut world = World::alone();
    let ended = loop {
        world.hello();
        let input = refused(&world, refusal);
        if let Some(how) = finish(&world.give(input)) {
            break how.clone();
        }
    };
    assert!(
        matches!(ended, Finish::Refused(_)),
        "two processes do not take a name from each other in turns"
    );
    assert!(
        world.now >= 60 * SECOND,
        "its connection may be dead: {:?}",
        world.now
    );
}
