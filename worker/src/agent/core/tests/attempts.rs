//! What becomes of attempts: leases, ends, acknowledgements, cancels, gangs.

use super::*;

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

#[test]
fn what_was_over_first_is_forgotten_first_whatever_its_number() {
    let mut world = World::welcomed();
    for attempt in (2..=1025).chain([1]) {
        world.message(assign(attempt, "a"));
        world.ended(attempt, output());
        world.message(acknowledged(attempt));
    }
    let late = world.message(assign(1, "a"));
    assert_eq!(runs(&late), [0_u64; 0], "it was acknowledged last of all");
    world.message(acknowledged(1));
    let forgotten = world.message(assign(2, "a"));
    assert_eq!(runs(&forgotten), [2]);
}

#[test]
fn an_attempt_whose_device_is_gone_has_crashed_and_the_next_one_runs() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.message(assign(2, "a"));
    world.message(assign(3, "b"));
    let outputs = world.device(DeviceEvent::Gone {
        device: "a".to_owned(),
    });
    let [FromWorker::Failed(failed)] = said(&outputs)[..] else {
        panic!("{outputs:?}")
    };
    assert_eq!(failed.lease, Some(lease(1)));
    let failure: Failure = serde_json::from_slice(&failed.failure_json).unwrap();
    assert_eq!(failure.kind, FailureKind::Crashed);
    assert_eq!(runs(&outputs), [2]);
    world.message(acknowledged(1));
    assert_eq!(
        world.core.leases(),
        [lease(2), lease(3)],
        "nothing is held that nobody runs"
    );
}
