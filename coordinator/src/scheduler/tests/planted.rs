//! Each planted bug is one that the invariants, or a look at the counters, can see.

use std::collections::BTreeSet;

use espalier_proto::task::FailureKind;

use super::kit::{Work, World, gang, stage};
use crate::scheduler::planted::{Bug, plant};
use crate::scheduler::{Command, Event, Now, Rejection, apply, check, decide};

/// What a command leads to, unchecked.
fn run(world: &mut World, command: Command) -> Result<Vec<Event>, Rejection> {
    let events = decide(&world.state, command, Now { unix_ms: 0 })?;
    for event in &events {
        apply(&mut world.state, event);
    }
    Ok(events)
}

#[test]
fn a_stale_attempt_that_is_promoted_is_seen_and_only_one_is() {
    let mut world = World::new();
    plant(Some(Bug::PromoteOneStaleAttempt));
    let complete = |(worker, lease): Work| Command::Complete {
        worker,
        lease,
        output: "{}".into(),
    };
    let lost = world.join("a", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 2)]);
    let old = world.dispatch();
    world.lose(lost);
    world.join("b", 1, 2);
    world.dispatch();
    assert_eq!(run(&mut world, complete(old[0])).unwrap().len(), 1);
    assert!(check(&world.state).is_err());
    let second = run(&mut world, complete(old[1]));
    assert!(matches!(second, Err(Rejection::Stale(_))));
    plant(None);
}

#[test]
fn counters_that_a_restart_forgets_are_seen() {
    let mut world = World::new();
    plant(Some(Bug::ForgetTheRetryCounter));
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    world.fail(work, FailureKind::Crashed);
    let before = world.only_task(job).failures();
    run(&mut world, Command::BeginTerm).unwrap();
    assert!(!world.only_task(job).failures().covers(&before));
    plant(None);
}

#[test]
fn half_a_gang_that_is_released_is_seen() {
    let mut world = World::new();
    plant(Some(Bug::ReleaseHalfAGang));
    world.join("a", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![gang("recover", 2)]);
    let dispatch = Command::Dispatch {
        absent: BTreeSet::new(),
        resting: BTreeSet::new(),
    };
    run(&mut world, dispatch).unwrap();
    let (worker, lease) = world
        .state
        .attempts()
        .map(|held| (held.worker, held.lease))
        .next()
        .unwrap();
    let address = "host:1".to_owned();
    let prepared = Command::Prepared {
        worker,
        lease,
        address,
        token: 7.into(),
    };
    assert_eq!(run(&mut world, prepared).unwrap().len(), 2);
    assert!(check(&world.state).is_err());
    plant(None);
}
