//! Gangs that form with fewer ranks than they ask for.

use espalier_proto::task::FailureKind;

use super::kit::{Work, World, pliable_gang, stage};
use crate::scheduler::{Command, Event, JobId, JobPhase};

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

#[test]
fn a_gang_forms_again_without_a_rank_that_was_let_go_and_is_not_concerned_when_that_stops_or_is_lost() {
    for comes_back in [true, false] {
        let mut world = World::new();
        world.join("a", 1, 1);
        let cut_off = world.join("b", 1, 1);
        let job = world.submit("/out");
        world.plan(job, vec![pliable_gang("recover", 2, 1)]);
        let work = world.dispatch();
        for rank in &work {
            world.prepare(*rank);
        }
        let (gone, left) = match work[..] {
            [first, second] if first.0 == cut_off => (first, second),
            [first, second] => (second, first),
            _ => panic!("{work:?}"),
        };
        let attempt = gone.1.attempt;
        let let_go = |world: &mut World| world.run(Command::LetGo { attempt }).unwrap().len();
        assert_eq!(let_go(&mut world), 0, "its gang is whole");
        world.fail(left, FailureKind::RankLost);
        world.absent.insert(cut_off);
        assert_eq!(world.dispatch(), [], "the gang has not ended");
        assert_eq!(let_go(&mut world), 2, "it is let go, and the gang ends");
        assert_eq!(let_go(&mut world), 0, "once");
        let again = world.dispatch();
        assert_eq!(again.len(), 1, "the device that is cut off is not waited for");
        assert_eq!(again[0].0, left.0);
        // Whatever becomes of it, it is not this gang's.
        if comes_back {
            world.absent.clear();
            world.stop(gone);
        } else {
            world.lose(cut_off);
        }
        assert_eq!(world.only_task(job).failures().worker_lost, 0);
        world.prepare(again[0]);
        assert_eq!(world.replayed(), world.state);
        if comes_back {
            // Its device counts again.
            world.fail(again[0], FailureKind::RankLost);
            assert_eq!(world.dispatch().len(), 2);
        } else {
            world.complete(again[0]).unwrap();
            assert_eq!(world.only_task(job).formed_ranks, 1);
        }
    }
}

#[test]
fn what_a_rank_that_was_let_go_completes_is_not_taken() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let cut_off = world.join("b", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![pliable_gang("recover", 2, 1)]);
    let work = world.dispatch();
    for rank in &work {
        world.prepare(*rank);
    }
    let gone = *work.iter().find(|rank| rank.0 == cut_off).unwrap();
    let left = *work.iter().find(|rank| rank.0 != cut_off).unwrap();
    world.fail(left, FailureKind::RankLost);
    let attempt = gone.1.attempt;
    world.run(Command::LetGo { attempt }).unwrap();
    world.absent.insert(cut_off);
    let again = world.dispatch();
    let (worker, lease) = gone;
    let output = "late".into();
    let events = world
        .run(Command::Complete {
            worker,
            lease,
            output,
        })
        .unwrap();
    assert!(matches!(events[..], [Event::AttemptStopped { .. }]), "{events:?}");
    world.prepare(again[0]);
    world.complete(again[0]).unwrap();
}
