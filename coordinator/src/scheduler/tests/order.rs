use std::collections::BTreeMap;

use espalier_proto::task::FailureKind;

use super::kit::{World, gpus, introduction, measurement, stage};
use crate::scheduler::{Command, EngineInfo, Failures, JobId, Rejection, hand_back_pause, retry_pause};

#[test]
fn the_higher_priority_goes_first_then_the_older_job() {
    let mut world = World::new();
    let jobs = [("/old", 0), ("/urgent", 7), ("/young", 0), ("/idle", -3)];
    let jobs: Vec<JobId> = jobs
        .iter()
        .map(|(output, priority)| {
            let job = world.submit_at(output, *priority);
            world.plan(job, vec![stage("score", 1)]);
            job
        })
        .collect();
    world.join("a", 1, 1);
    let mut order = Vec::new();
    while let Some(work) = world.dispatch().first().copied() {
        order.push(world.task_of(work).job);
        world.complete(work).unwrap();
    }
    assert_eq!(order, [jobs[1], jobs[0], jobs[2], jobs[3]]);
}

#[test]
fn a_priority_beyond_its_range_is_refused() {
    let mut world = World::new();
    let refused = world.run(Command::Submit {
        request_id: None,
        spec: "{}".into(),
        parent: String::new(),
        output: "/out".to_owned(),
        device_kind: "cpu".to_owned(),
        priority: 101,
    });
    assert!(matches!(refused, Err(Rejection::Invalid(message)) if message.contains("-100 to 100")));
}

#[test]
fn a_task_runs_only_where_its_kind_and_memory_are() {
    let mut world = World::new();
    world.join("small-cpu", 1, 4);
    world.run(Command::Introduce(gpus("small", 1, 8 << 30))).unwrap();
    let job = world.submit("/out");
    let mut planned = stage("score", 1);
    planned.tasks[0].needs.device_kind = Some("cuda".into());
    planned.tasks[0].needs.memory_bytes = 40 << 30;
    world.plan(job, vec![planned]);
    assert!(world.dispatch().is_empty());
    assert_eq!(
        world.why(job),
        "waits for a worker with a cuda device of at least 40 GiB: there is none"
    );
    world.run(Command::Introduce(gpus("large", 1, 80 << 30))).unwrap();
    let work = world.dispatch();
    assert_eq!(world.state.worker(work[0].0).unwrap().name, "large");
}

#[test]
fn a_device_whose_memory_nobody_tells_is_given_what_may_fit() {
    let mut world = World::new();
    world.run(Command::Introduce(gpus("untold", 1, 0))).unwrap();
    let job = world.submit("/out");
    let mut planned = stage("score", 1);
    planned.tasks[0].needs.device_kind = Some("cuda".into());
    planned.tasks[0].needs.memory_bytes = 40 << 30;
    world.plan(job, vec![planned]);
    assert_eq!(world.dispatch().len(), 1);
}

#[test]
fn a_task_that_finds_no_place_keeps_nobody_behind_it_waiting() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    let mut unplaceable = stage("score", 50);
    for task in &mut unplaceable.tasks {
        task.needs.device_kind = Some("cuda".into());
    }
    world.plan(job, vec![unplaceable, stage("calibrate", 1)]);
    assert_eq!(world.dispatch().len(), 1);
}

#[test]
fn a_resting_task_lets_others_pass() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 2)]);
    let first = world.dispatch()[0];
    let resting = world.task_of(first).id;
    world.fail(first, FailureKind::Error);
    world.resting.insert(resting);
    let second = world.dispatch()[0];
    assert_ne!(world.task_of(second).id, resting);
    world.complete(second).unwrap();
    assert!(world.dispatch().is_empty());
    assert_eq!(world.why(job), "rests after a failure");
    world.resting.clear();
    assert_eq!(world.dispatch().len(), 1);
}

#[test]
fn pauses_double_from_a_second_to_a_minute_and_lost_workers_cost_none() {
    let seconds: Vec<u64> = (0..9)
        .map(|crashed| {
            let failures = Failures {
                crashed,
                worker_lost: 5,
                ..Failures::default()
            };
            retry_pause(&failures).as_secs()
        })
        .collect();
    assert_eq!(seconds, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
}

#[test]
fn a_task_that_is_handed_back_again_and_again_rests_longer_and_longer() {
    let pause = |handed_back| {
        let failures = Failures {
            handed_back,
            ..Failures::default()
        };
        hand_back_pause(&failures).as_secs()
    };
    let seconds: Vec<u64> = (0..8).chain([100]).map(pause).collect();
    assert_eq!(seconds, [0, 0, 0, 0, 0, 1, 2, 4, 60]);
}

#[test]
fn a_device_that_holds_the_job_is_preferred_to_one_that_holds_another() {
    let mut world = World::new();
    let (one, two) = (world.submit("/one"), world.submit("/two"));
    world.plan(one, vec![stage("score", 1)]);
    world.plan(two, vec![stage("score", 1)]);
    world.join("a", 1, 1);
    world.join("b", 1, 1);
    let work = world.dispatch();
    let ran_on: BTreeMap<JobId, _> = work
        .iter()
        .map(|rank| (world.task_of(*rank).job, rank.0))
        .collect();
    for rank in work {
        world.complete(rank).unwrap();
    }
    world.plan(two, vec![stage("recover", 1)]);
    assert_eq!(world.dispatch()[0].0, ran_on[&two]);
}

#[test]
fn nothing_goes_to_a_worker_that_is_away() {
    let mut world = World::new();
    let worker = world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    world.absent.insert(worker);
    assert!(world.dispatch().is_empty());
    assert_eq!(world.why(job), "waits for a worker with a cpu device: 1 away");
    world.absent.clear();
    assert_eq!(world.dispatch().len(), 1);
}

#[test]
fn a_measurement_of_several_ranks_has_its_hosts_for_itself() {
    let mut world = World::new();
    for name in ["a", "b"] {
        world
            .run(Command::Introduce(introduction(name, 1, name, 2)))
            .unwrap();
    }
    let job = world.submit("/out");
    world.plan(job, vec![stage("calibrate", 1)]);
    let other = world.dispatch()[0];
    let mut measured = measurement("profile");
    measured.tasks[0].needs.ranks = 2;
    let second = world.submit("/second");
    world.plan(second, vec![measured, stage("score", 4)]);
    let work = world.dispatch();
    let of_gang: Vec<_> = work
        .iter()
        .filter(|rank| world.task_of(**rank).is_gang())
        .collect();
    assert_eq!(of_gang.len(), 2);
    assert!(of_gang.iter().all(|rank| rank.0 != other.0), "on the quiet host");
    let beside = work.len() - of_gang.len();
    assert_eq!(beside, 1, "the rest goes to the other host's free device");
}

#[test]
fn a_measurement_in_an_engine_goes_only_where_it_is_and_a_job_says_that_it_waits_for_that() {
    let mut world = World::new();
    world.join("without", 1, 4);
    let job = world.submit("/out");
    let mut planned = stage("profile", 1);
    planned.tasks[0].needs.engine = Some("vllm".into());
    world.plan(job, vec![planned]);
    assert!(world.dispatch().is_empty());
    assert_eq!(
        world.why(job),
        "waits for a worker with a cpu device and vllm to measure in: there is none"
    );
    let mut with = introduction("with", 1, "with", 1);
    with.devices[0].engines = vec![EngineInfo {
        name: "vllm".into(),
        version: "0.32.0".into(),
    }];
    world.run(Command::Introduce(with)).unwrap();
    let work = world.dispatch();
    assert_eq!(world.state.worker(work[0].0).unwrap().name, "with");
}
