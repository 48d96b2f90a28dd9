//! A worker on its way out.

use super::*;

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
    let drained = world.now;
    assert_eq!(
        finish(&world.give(Input::Tick)),
        None,
        "nothing runs that the drain timeout is for"
    );
    let mut ended = None;
    while ended.is_none() {
        world.now = world.core.wake_at().unwrap();
        ended = finish(&world.give(Input::Tick)).cloned();
    }
    assert_eq!(ended, Some(Finish::Killed));
    assert_eq!(world.now, drained + 1800 * SECOND, "as long as it may be wanted");

    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.lose();
    world.give(Input::ShutdownAsked);
    assert_eq!(finish(&world.ended(1, Ended::Stopped)), Some(&Finish::Left));
}

#[test]
fn a_result_that_ended_before_the_drain_timeout_is_told_after_it() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.message(assign(2, "b"));
    world.ended(1, output());
    world.lose();
    world.give(Input::ShutdownAsked);
    world.now += 60 * SECOND;
    let outputs = world.give(Input::Tick);
    assert_eq!(finish(&outputs), None);
    assert_eq!(stops(&outputs), [(2, false)], "what still runs has had its time");
    world.ended(2, Ended::Stopped);
    world.now += 60 * SECOND;
    let again = world.reconnect();
    assert!(matches!(
        said(&again)[..],
        [
            FromWorker::Leaving(_),
            FromWorker::Completed(_),
            FromWorker::Stopped(_)
        ]
    ));
    assert_eq!(finish(&world.message(acknowledged(2))), None);
    assert_eq!(finish(&world.message(acknowledged(1))), Some(&Finish::Left));
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
