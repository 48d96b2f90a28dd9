//! Gangs that form with fewer ranks than they ask for.

use espalier_proto::task::FailureKind;

use super::kit::{Work, World, pliable_gang, stage};
use crate::scheduler::{JobId, JobPhase};

/// A gang of at most four ranks, in pairs.
fn pairs(world: &mut World) -> (JobId, Vec<Work>) {
    let job = world.submit("/out");
    world.plan(job, vec![pliable_gang("recover", 4, 2)]);
    (job, world.dispatch())
}

#[test]
fn a_cluster_with_fewer_devices_forms_a_smaller_gang_of_the_right_multiple() {
    for (devices, expected) in [(1, 0), (2, 2), (3, 2), (4, 4), (5, 4)] {
        let mut world = World::new();
        world.join("a", 1, devices);
        let (job, work) = pairs(&mut world);
        assert_eq!(work.len(), expected, "{devices} devices");
        if expected == 0 {
            let why = "waits for 2 cpu devices: there are 1, and a worker with more has to join";
            assert_eq!(world.why(job), why);
            continue;
        }
        let place = world.state.attempt(work[0].1.attempt).unwrap().place.unwrap();
        assert_eq!(place.ranks as usize, expected);
        assert_eq!(world.only_task(job).formed_ranks as usize, expected);
    }
}

#[test]
fn a_gang_waits_for_devices_that_are_busy_rather_than_form_without_them() {
    let mut world = World::new();
    world.join("a", 1, 4);
    let other = world.submit("/other");
    world.plan(other, vec![stage("score", 1)]);
    let busy = world.dispatch();
    let (job, work) = pairs(&mut world);
    assert_eq!(work, []);
    assert_eq!(world.why(job), "waits until 4 cpu devices are free together");
    world.complete(busy[0]).unwrap();
    assert_eq!(world.dispatch().len(), 4);
}

#[test]
fn a_gang_waits_for_a_worker_that_is_away_and_does_without_one_that_is_lost() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let away = world.join("b", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![pliable_gang("recover", 4, 2)]);
    world.absent.insert(away);
    assert_eq!(world.dispatch(), []);
    assert_eq!(world.why(job), "waits for 4 cpu devices: there are 2");
    world.lose(away);
    assert_eq!(world.dispatch().len(), 2);
}

#[test]
fn a_smaller_gang_answers_for_its_own_attempts_only() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, work) = pairs(&mut world);
    for rank in &work {
        world.prepare(*rank);
    }
    let other = world.submit("/other");
    world.plan(other, vec![stage("score", 1)]);
    for rank in &work {
        world.complete(*rank).unwrap();
    }
    // The attempt after the gang's last: the whole gang's third, had it formed with four.
    let next = world.dispatch();
    assert_eq!(next[0].1.attempt.0, work[1].1.attempt.0 + 1);
    assert!(!world.state.completed_before(next[0].1));
    assert_eq!(world.complete(work[1]), Ok(0), "said again");
    assert!(world.complete(next[0]).is_ok_and(|events| events > 0));
    assert!(matches!(world.state.job(job).unwrap().phase, JobPhase::Active));
    assert_eq!(world.replayed(), world.state);
}

#[test]
fn a_lost_rank_is_told_by_the_others_and_held_against_nobody() {
    let mut world = World::new();
    world.join("a", 1, 2);
    world.join("b", 1, 2);
    let (job, mut work) = pairs(&mut world);
    for time in 1..=8 {
        for rank in &work {
            world.prepare(*rank);
        }
        world.fail(work[1], FailureKind::RankLost);
        for rank in [0, 2, 3] {
            world.stop(work[rank]);
        }
        let task = world.only_task(job);
        assert_eq!((task.failures().rank_lost, task.failed_on()), (time, None));
        assert!(world.state.workers().all(|worker| worker.cordon.is_none()));
        work = world.dispatch();
        assert_eq!(work.len(), 4, "loss {time}");
    }
    world.fail(work[0], FailureKind::RankLost);
    assert!(
        world.message(job).contains("after 8 earlier failures"),
        "{}",
        world.message(job)
    );
}
