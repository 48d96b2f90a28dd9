//! What peers' users suffer from, as far as the state machine answers for it.

use std::time::Duration;

use espalier_proto::task::FailureKind;

use super::kit::{World, introduction, stage};
use crate::scheduler::{Command, Epoch, JobPhase, Lease, Rejection, Standing, TaskPhase, Term, retry_pause};

#[test]
fn a_stale_workers_completion_is_refused() {
    let mut world = World::new();
    let stale = world.join("a", 1, 1);
    world.join("b", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let old = world.dispatch()[0];
    assert_eq!(old.0, stale);
    world.lose(stale);
    let new = world.dispatch()[0];
    world.join("a", 1, 1);
    assert!(
        matches!(world.complete(old), Err(Rejection::Stale(_))),
        "back from its partition"
    );
    world.complete(new).unwrap();
    assert!(
        matches!(world.complete(old), Err(Rejection::Stale(_))),
        "after the task is done"
    );
    match &world.only_task(job).phase {
        TaskPhase::Done { attempt, .. } => assert_eq!(*attempt, new.1.attempt),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_completion_of_a_forgotten_term_is_refused_though_its_number_was_given_again() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    world.run(Command::BeginTerm).unwrap();
    let (worker, lease) = world.dispatch()[0];
    world.complete((worker, lease)).unwrap();
    // What a successor that starts from an older state of the same history looks like to the worker.
    let forgotten = Lease {
        term: Term(lease.term.0 - 1),
        ..lease
    };
    assert!(matches!(
        world.complete((worker, forgotten)),
        Err(Rejection::Stale(_))
    ));
    assert_eq!(world.complete((worker, lease)), Ok(0), "its own is told again");
}

#[test]
fn the_crash_count_survives_a_restart() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let mut crashes = 0;
    while let Some(work) = world.dispatch().first().copied() {
        crashes += 1;
        world.fail(work, FailureKind::Crashed);
        world.state = world.replayed();
        world.run(Command::BeginTerm).unwrap();
        world.join("a", 1 + crashes, 1);
    }
    assert_eq!(crashes, 3, "the budget holds over restarts");
    assert!(matches!(
        world.state.job(job).unwrap().phase,
        JobPhase::Failed { .. }
    ));
}

#[test]
fn losing_the_last_worker_leaves_a_job_waiting_and_saying_so() {
    let mut world = World::new();
    let last = world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    world.dispatch();
    assert_eq!(world.why(job), "");
    world.lose(last);
    assert_eq!(world.why(job), "waits for a worker with a cpu device: 1 lost");
    world.join("a", 1, 1);
    assert_eq!(world.dispatch().len(), 1, "and it goes on with the next worker");
}

#[test]
fn a_worker_rejoins_a_restarted_coordinator_and_keeps_its_work() {
    let mut world = World::new();
    let worker = world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    world.state = world.replayed();
    world.run(Command::BeginTerm).unwrap();
    assert_eq!(world.join("a", 1, 1), worker);
    assert!(world.dispatch().is_empty());
    assert_eq!(
        world.complete(work),
        Ok(1),
        "a lease of the term before still stands"
    );
}

#[test]
fn a_completion_of_a_coordinator_to_come_is_refused() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let (worker, mut lease) = world.dispatch()[0];
    lease.term = lease.term.next();
    assert!(matches!(
        world.complete((worker, lease)),
        Err(Rejection::Stale(_))
    ));
}

#[test]
fn a_task_that_cannot_be_decoded_ends_its_job_and_says_why() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    world.fail(work, FailureKind::Invalid);
    assert_eq!(world.message(job), "score, task 0: the disk caught fire");
}

#[test]
fn a_task_that_fails_on_two_workers_ends_its_job_with_the_evidence_of_both() {
    let mut world = World::new();
    world.join("a", 1, 1);
    world.join("b", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    world.fail(work, FailureKind::Crashed);
    let work = world.dispatch()[0];
    world.fail(work, FailureKind::Hung);
    assert_eq!(
        world.message(job),
        "score, task 0: it failed on two workers: on `a`: the disk caught fire; on `b`: the disk caught fire"
    );
}

#[test]
fn a_lost_worker_is_no_evidence_against_its_task() {
    let mut world = World::new();
    for name in ["a", "b", "c"] {
        let worker = world.join(name, 1, 1);
        if world.state.jobs().count() == 0 {
            let job = world.submit("/out");
            world.plan(job, vec![stage("score", 1)]);
        }
        assert_eq!(world.dispatch().len(), 1);
        world.lose(worker);
    }
    let task = world.state.tasks().next().unwrap();
    assert_eq!((task.failures().worker_lost, task.failures().own()), (3, 0));
    assert_eq!(task.phase, TaskPhase::Waiting);
}

#[test]
fn a_full_store_ends_no_job_and_accuses_no_worker_however_long_it_is_full() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("recover", 1)]);
    for _ in 0..50 {
        let work = world.dispatch()[0];
        world.fail(work, FailureKind::Storage);
        world.state = world.replayed();
    }
    assert!(matches!(world.state.job(job).unwrap().phase, JobPhase::Active));
    let task = world.state.tasks().next().unwrap();
    assert_eq!(retry_pause(&task.failures()), Duration::from_secs(60));
    assert!(task.last_failure().is_some(), "it is said why it waits");
    assert!(
        world
            .state
            .workers()
            .all(|worker| worker.failed_in_a_row.is_empty())
    );
}

#[test]
fn a_noisy_measurement_is_repeated_and_accuses_no_worker() {
    let mut world = World::new();
    world.join("a", 1, 1);
    world.join("b", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("profile", 1)]);
    for _ in 0..2 {
        let work = world.dispatch()[0];
        world.fail(work, FailureKind::TooNoisy);
    }
    assert!(matches!(world.state.job(job).unwrap().phase, JobPhase::Active));
    assert!(
        world
            .state
            .workers()
            .all(|worker| worker.failed_in_a_row.is_empty())
    );
}

#[test]
fn a_worker_on_which_task_after_task_fails_gets_nothing_more() {
    let mut world = World::new();
    let bad = world.join("a", 1, 1);
    let jobs: Vec<_> = (0..4)
        .map(|number| world.submit(&format!("/out/{number}")))
        .collect();
    for job in &jobs[..3] {
        world.plan(*job, vec![stage("score", 1)]);
    }
    for number in 0..3 {
        if number == 2 {
            world.join("b", 1, 1);
            world.absent.insert(world.state.worker_named("b").unwrap().id);
        }
        let work = world.dispatch()[0];
        assert_eq!(work.0, bad);
        let task = world.task_of(work).id;
        world.fail(work, FailureKind::Error);
        world.resting.insert(task);
    }
    let worker = world.state.worker(bad).unwrap();
    let cordon = worker.cordon.as_ref().unwrap();
    assert!(cordon.by_rule);
    assert_eq!(
        cordon.reason,
        "3 tasks in a row failed on it, the last with: the disk caught fire"
    );
    world.plan(jobs[3], vec![stage("score", 1)]);
    assert!(world.dispatch().is_empty(), "only the bad worker is there");
    world.absent.clear();
    assert_ne!(world.dispatch()[0].0, bad);
}

#[test]
fn the_last_worker_of_its_kind_is_never_cordoned_by_the_rules() {
    let mut world = World::new();
    let last = world.join("a", 1, 1);
    for number in 0..5 {
        let job = world.submit(&format!("/out/{number}"));
        world.plan(job, vec![stage("score", 1)]);
        let work = world.dispatch()[0];
        world.fail(work, FailureKind::Error);
        let task = world.only_task(job).id;
        world.resting.insert(task);
    }
    let worker = world.state.worker(last).unwrap();
    assert_eq!(worker.cordon, None);
    assert_eq!(worker.failed_in_a_row.len(), 5, "and the row is there to be seen");
}

#[test]
fn a_completion_between_failures_clears_a_worker() {
    let mut world = World::new();
    let worker = world.join("a", 1, 1);
    world.join("b", 1, 1);
    world.absent.insert(world.state.worker_named("b").unwrap().id);
    for number in 0..6 {
        let job = world.submit(&format!("/out/{number}"));
        world.plan(job, vec![stage("score", 1)]);
        let work = world.dispatch()[0];
        if number % 3 == 2 {
            world.complete(work).unwrap();
        } else {
            world.fail(work, FailureKind::Error);
            let task = world.only_task(job).id;
            world.resting.insert(task);
        }
    }
    assert_eq!(world.state.worker(worker).unwrap().cordon, None);
}

#[test]
fn a_worker_started_anew_gets_its_task_again_and_the_old_process_nothing() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let old = world.dispatch()[0];
    world.join("a", 2, 1);
    let new = world.dispatch()[0];
    assert_ne!(old.1, new.1);
    assert!(matches!(world.complete(old), Err(Rejection::Stale(_))));
    let late = world.run(Command::Leave {
        worker: old.0,
        epoch: Epoch(1),
    });
    assert!(matches!(late, Err(Rejection::Stale(_))));
    let earlier = world.run(Command::Introduce(introduction("a", 1, "a", 1)));
    assert!(matches!(earlier, Err(Rejection::StaleEpoch { .. })));
    assert_eq!(world.state.worker(new.0).unwrap().standing, Standing::Present);
}

#[test]
fn every_job_that_does_not_move_says_why() {
    let mut world = World::new();
    let job = world.submit("/out");
    assert_eq!(world.why(job), "decides what comes next");
    world.plan(job, vec![stage("score", 1)]);
    assert_eq!(
        world.why(job),
        "waits for a worker with a cpu device: there is none"
    );
    world.join("a", 1, 1);
    assert_eq!(world.why(job), "waits for a cpu device to be free");
    let work = world.dispatch()[0];
    assert_eq!(world.why(job), "");
    let reason = String::new();
    world.run(Command::Cancel { job, reason }).unwrap();
    assert_eq!(world.why(job), "waits for its attempts to stop");
    world.stop(work);
    assert_eq!(world.why(job), "removes what it had half-written");
    world.run(Command::PartialRemoved { job }).unwrap();
    assert_eq!(world.why(job), "");
}
