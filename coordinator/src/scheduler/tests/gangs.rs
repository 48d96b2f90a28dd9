use espalier_proto::task::FailureKind;

use super::kit::{Work, World, gang, gpus, stage};
use crate::scheduler::{Command, Effect, Event, JobId, JobPhase, Rejection, StagePlan, TaskPhase, WorkerId};

fn formed(world: &mut World, ranks: u32) -> (JobId, Vec<Work>) {
    let job = world.submit("/out");
    world.plan(job, vec![gang("recover", ranks)]);
    let work = world.dispatch();
    (job, work)
}

fn released(world: &mut World, ranks: u32) -> (JobId, Vec<Work>) {
    let (job, work) = formed(world, ranks);
    for rank in &work {
        world.prepare(*rank);
    }
    (job, work)
}

fn stop_orders(world: &World) -> Vec<u64> {
    let stopped = world.effects.iter().filter_map(|effect| match effect {
        Effect::StopAttempt { attempt } => Some(attempt.0),
        _ => None,
    });
    stopped.collect()
}

#[test]
fn a_gang_is_reserved_whole_or_not_at_all() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, work) = formed(&mut world, 3);
    assert_eq!(work, []);
    assert_eq!(world.state.attempts().count(), 0, "no device is held in part");
    let why = "waits for 3 cpu devices: there are 2, and a worker with more has to join";
    assert_eq!(world.why(job), why);
    world.join("b", 1, 1);
    let work = world.dispatch();
    assert_eq!(work.len(), 3);
    let places: Vec<_> = work
        .iter()
        .map(|(_, lease)| world.state.attempt(lease.attempt).unwrap().place.unwrap())
        .collect();
    let ranks: Vec<_> = places
        .iter()
        .map(|place| (place.generation, place.rank, place.ranks))
        .collect();
    assert_eq!(ranks, [(1, 0, 3), (1, 1, 3), (1, 2, 3)]);
}

#[test]
fn a_gang_begins_once_when_its_last_rank_is_ready() {
    let mut world = World::new();
    world.join("a", 1, 3);
    let (_, work) = formed(&mut world, 3);
    assert!(!world.prepare(work[2]));
    assert!(!world.prepare(work[0]));
    assert!(!world.prepare(work[0]), "said again, as on a new stream");
    assert_eq!(world.state.release_of(work[0].1.attempt), None);
    world.effects.clear();
    assert!(world.prepare(work[1]));
    for (_, lease) in &work {
        let attempt = lease.attempt;
        assert!(world.effects.contains(&Effect::Release { attempt }));
        let release = world.state.release_of(attempt).unwrap();
        // Of the rank that came last; not to be found in what may be logged.
        let token = release.communicator.reveal();
        assert_eq!(token, "00000000000000000000000000000002");
        assert!(!format!("{release:?} {:?} {:?}", world.state, world.journal).contains(token));
        assert_eq!(release.addresses, ["host-1:1", "host-1:2", "host-1:3"]);
    }
    assert!(!world.prepare(work[1]), "no second release");
}

/// Seed 332 of the simulation: the release was lost with a coordinator's disk, and its successor failed the job.
#[test]
fn a_rank_that_ended_before_its_gang_began_as_far_as_the_journal_knows_is_handed_back() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, work) = formed(&mut world, 2);
    world.complete(work[1]).unwrap();
    let task = world.state.tasks().next().unwrap();
    assert_eq!(task.failures().own(), 0, "nobody is to blame");
    assert!(!world.state.job(job).unwrap().phase.is_terminal());
    assert!(world.state.attempt(work[1].1.attempt).is_none());
}

#[test]
fn a_gang_is_done_when_every_rank_is_and_its_output_is_the_first_ranks() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, work) = released(&mut world, 2);
    let complete = |(worker, lease): Work, output: &str| Command::Complete {
        worker,
        lease,
        output: output.into(),
    };
    world.run(complete(work[0], "\"first\"")).unwrap();
    let phase = &world.only_task(job).phase;
    assert!(
        matches!(phase, TaskPhase::Gang(_)),
        "one rank of two is not the task"
    );
    world.run(complete(work[1], "\"second\"")).unwrap();
    match &world.only_task(job).phase {
        TaskPhase::Done { attempt, output } => {
            assert_eq!((*attempt, output.as_str()), (work[0].1.attempt, "\"first\""));
        }
        other => panic!("{other:?}"),
    }
    for rank in work {
        assert_eq!(
            world.complete(rank),
            Ok(0),
            "a completion sent again is acknowledged"
        );
    }
    assert!(world.effects.contains(&Effect::Plan { job }));
}

#[test]
fn one_rank_lost_ends_the_generation_for_all() {
    let mut world = World::new();
    let first = world.join("a", 1, 1);
    world.join("b", 1, 1);
    world.join("c", 1, 1);
    let (job, work) = released(&mut world, 3);
    assert_eq!(
        world.complete(work[1]),
        Ok(1),
        "a rank that had ended well goes down with the others"
    );
    world.effects.clear();
    world.lose(first);
    assert_eq!(stop_orders(&world), [work[2].1.attempt.0]);
    assert!(
        world.dispatch().is_empty(),
        "the last rank still holds its device"
    );
    assert!(matches!(world.complete(work[1]), Err(Rejection::Stale(_))));
    world.stop(work[2]);
    assert_eq!(world.only_task(job).phase, TaskPhase::Waiting);
    world.join("d", 1, 1);
    let again = world.dispatch();
    assert_eq!(again.len(), 3);
    assert_eq!(world.only_task(job).gang().unwrap().generation, 2);
    assert!(matches!(world.complete(work[2]), Err(Rejection::Stale(_))));
}

#[test]
fn a_lost_rank_costs_the_budget_once_a_generation() {
    let mut world = World::new();
    let both = world.join("a", 1, 2);
    let (job, work) = formed(&mut world, 2);
    assert_eq!(work.len(), 2);
    world.lose(both);
    let task = world.only_task(job);
    assert_eq!((task.failures().worker_lost, task.failures().own()), (1, 0));
    assert_eq!(
        task.phase,
        TaskPhase::Waiting,
        "both ranks went with their worker"
    );
}

#[test]
fn a_failed_rank_stops_the_others_before_and_after_the_release() {
    for begun in [false, true] {
        let mut world = World::new();
        world.join("a", 1, 2);
        let (job, work) = formed(&mut world, 2);
        for rank in work.iter().filter(|_| begun) {
            world.prepare(*rank);
        }
        world.effects.clear();
        world.fail(work[0], FailureKind::Crashed);
        assert_eq!(stop_orders(&world), [work[1].1.attempt.0]);
        // The other rank's collective broke too: that is the same failure.
        world.fail(work[1], FailureKind::Error);
        let task = world.only_task(job);
        assert_eq!(task.failures().own(), 1);
        assert_eq!(task.phase, TaskPhase::Waiting);
    }
}

#[test]
fn a_rank_handed_back_costs_nothing() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, work) = released(&mut world, 2);
    world.stop(work[0]);
    world.stop(work[1]);
    let task = world.only_task(job);
    assert_eq!(task.failures().handed_back, 1);
    assert_eq!(task.failures().own() + task.failures().worker_lost, 0);
    assert_eq!(world.dispatch().len(), 2);
}

#[test]
fn a_gang_that_fails_for_good_ends_its_job_and_every_rank_is_told() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, work) = released(&mut world, 2);
    world.effects.clear();
    world.fail(work[1], FailureKind::Invalid);
    assert!(matches!(
        world.state.job(job).unwrap().phase,
        JobPhase::Failed { .. }
    ));
    assert!(stop_orders(&world).contains(&work[0].1.attempt.0));
    assert!(!world.effects.contains(&Effect::RemovePartial { job }));
    world.stop(work[0]);
    assert!(world.effects.contains(&Effect::RemovePartial { job }));
    assert_eq!(world.only_task(job).phase, TaskPhase::Failed);
}

#[test]
fn two_gangs_never_wait_for_each_other() {
    let mut world = World::new();
    world.join("a", 1, 2);
    world.join("b", 1, 2);
    let jobs: Vec<JobId> = ["/one", "/two"]
        .iter()
        .map(|output| {
            let job = world.submit(output);
            world.plan(job, vec![gang("recover", 3)]);
            job
        })
        .collect();
    for job in jobs {
        let work = world.dispatch();
        assert_eq!(work.len(), 3, "one gang is whole, the other absent");
        assert!(world.dispatch().is_empty());
        assert!(work.iter().all(|rank| world.task_of(*rank).job == job));
        for rank in &work {
            world.prepare(*rank);
        }
        for rank in work {
            world.complete(rank).unwrap();
        }
    }
}

#[test]
fn a_waiting_gang_is_not_starved_by_small_tasks_behind_it() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let small = world.submit("/small");
    world.plan(small, vec![stage("score", 6)]);
    let running = world.dispatch();
    let urgent = world.submit_at("/gang", 1);
    world.plan(urgent, vec![gang("recover", 2)]);
    world.complete(running[0]).unwrap();
    assert!(
        world.dispatch().is_empty(),
        "the free device is kept for the gang"
    );
    world.complete(running[1]).unwrap();
    let work = world.dispatch();
    assert_eq!(work.len(), 2);
    assert!(work.iter().all(|rank| world.task_of(*rank).job == urgent));
}

#[test]
fn a_gang_that_waits_for_one_kind_of_device_does_not_keep_one_of_another_from_its_own() {
    let mut world = World::new();
    world.join("a", 1, 2);
    world.run(Command::Introduce(gpus("g", 2, 1 << 30))).unwrap();
    let on_gpus = |mut stage: StagePlan| {
        stage
            .tasks
            .iter_mut()
            .for_each(|task| task.needs.device_kind = Some("cuda".into()));
        stage
    };
    let small = world.submit("/small");
    world.plan(small, vec![stage("score", 6), on_gpus(stage("profile", 1))]);
    let running = world.dispatch();
    assert_eq!(running.len(), 3);
    let first = world.submit_at("/cuda", 3);
    world.plan(first, vec![on_gpus(gang("recover", 2))]);
    let second = world.submit_at("/cpu", 2);
    world.plan(second, vec![gang("recover", 2)]);
    let on_cpu = running
        .iter()
        .find(|work| work.0 == WorkerId(1))
        .copied()
        .unwrap();
    world.complete(on_cpu).unwrap();
    assert!(
        world.dispatch().is_empty(),
        "the free device is kept for its gang"
    );
    let behind = world.submit("/behind");
    world.plan(behind, vec![stage("score", 1)]);
    let why = world.why(behind);
    assert!(
        why.contains("kept for a task that needs several together"),
        "{why}"
    );
}

#[test]
fn a_gang_that_can_never_fit_keeps_nothing_from_others() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let large = world.submit_at("/large", 5);
    world.plan(large, vec![gang("recover", 3)]);
    let small = world.submit("/small");
    world.plan(small, vec![stage("score", 2)]);
    assert_eq!(world.dispatch().len(), 2);
}

#[test]
fn a_gang_keeps_to_few_hosts() {
    let mut world = World::new();
    world.join("a", 1, 1);
    world.join("b", 1, 3);
    world.join("c", 1, 1);
    let (_, work) = formed(&mut world, 3);
    let workers: Vec<WorkerId> = work.iter().map(|(worker, _)| *worker).collect();
    assert_eq!(workers, [WorkerId(2); 3]);
}

#[test]
fn cancelling_a_job_ends_its_gang() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, work) = released(&mut world, 2);
    let reason = String::new();
    world.run(Command::Cancel { job, reason }).unwrap();
    assert_eq!(
        world.state.release_of(work[0].1.attempt),
        None,
        "it is not released again"
    );
    for rank in work {
        let events = world
            .run(Command::Stopped {
                worker: rank.0,
                lease: rank.1,
            })
            .unwrap();
        assert!(
            !events
                .iter()
                .any(|event| matches!(event, Event::GangEnded { .. }))
        );
    }
    assert_eq!(world.only_task(job).phase, TaskPhase::Abandoned);
    assert!(world.effects.contains(&Effect::RemovePartial { job }));
}

#[test]
fn a_gang_that_does_not_become_ready_is_formed_anew_within_the_budget_for_hangs() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![gang("recover", 2)]);
    for generation in 1..=3 {
        let work = world.dispatch();
        world.prepare(work[0]);
        let task = world.only_task(job).id;
        assert_eq!(world.state.forming().collect::<Vec<_>>(), [(task, generation)]);
        let before = world.run(Command::GangLate {
            task,
            generation: generation - 1,
        });
        assert_eq!(
            before,
            Ok(Vec::new()),
            "an older generation's deadline says nothing"
        );
        world.effects.clear();
        world.run(Command::GangLate { task, generation }).unwrap();
        assert_eq!(
            world.only_task(job).failures().hung,
            u32::try_from(generation).unwrap()
        );
        assert!(stop_orders(&world).contains(&work[0].1.attempt.0));
        assert_eq!(world.state.forming().count(), 0);
        world.stop(work[0]);
        world.stop(work[1]);
    }
    assert_eq!(
        world.message(job),
        "recover, task 0: its ranks were not ready in time, in generation 3 again"
    );
}

#[test]
fn a_gang_that_has_begun_is_not_late() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let (job, _) = released(&mut world, 2);
    let task = world.only_task(job).id;
    assert_eq!(world.state.forming().count(), 0);
    assert_eq!(
        world.run(Command::GangLate { task, generation: 1 }),
        Ok(Vec::new())
    );
}

#[test]
fn a_gang_that_goes_on_from_further_than_ever_outlives_any_number_of_crashes() {
    let mut world = World::new();
    for name in ["a", "b"] {
        world.join(name, 1, 1);
    }
    let (job, mut work) = released(&mut world, 2);
    let begins = |world: &mut World, (worker, lease): Work, done: u64| {
        let events = world.run(Command::WentOn { worker, lease, done }).unwrap();
        !events.is_empty()
    };
    assert!(!begins(&mut world, work[0], 1), "nothing is held against it yet");
    for round in 1..=5 {
        // A rank of one worker, then of the other: two of them at the same place would end the job.
        let victim = round % 2;
        world.fail(work[victim], FailureKind::Crashed);
        world.stop(work[1 - victim]);
        work = world.dispatch();
        for rank in &work {
            world.prepare(*rank);
        }
        let done = 100 * round as u64;
        assert!(
            !begins(&mut world, work[1], done),
            "the first rank speaks for its gang"
        );
        assert!(begins(&mut world, work[0], done), "round {round}");
        assert!(!begins(&mut world, work[0], done), "once");
        assert_eq!(world.only_task(job).failures().own(), 0);
    }
    assert_eq!(world.replayed(), world.state);
    // At the same place on two workers it is held against the task.
    let elsewhere = |work: &[Work], than: WorkerId| *work.iter().find(|rank| rank.0 != than).unwrap();
    let (first, other) = (work[0], elsewhere(&work, work[0].0));
    world.fail(first, FailureKind::Crashed);
    world.stop(other);
    work = world.dispatch();
    for rank in &work {
        world.prepare(*rank);
        assert!(!begins(&mut world, *rank, 500));
    }
    world.fail(elsewhere(&work, first.0), FailureKind::Crashed);
    let message = world.message(job);
    assert!(message.contains("it failed on two workers"), "{message}");
}
