//! What the loop does with what it is asked, by itself: no runtime, and a clock that the test sets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::bench::{Bench, assigned, messages};
use common::{Crowd, DEADLINE};
use espalier_coordinator::archive::Archives;
use espalier_coordinator::journal::disk::SystemDisk;
use espalier_coordinator::logs::Logs;
use espalier_coordinator::metrics::Metrics;
use espalier_coordinator::scheduler::{JobId, Term};
use espalier_coordinator::service::owner::{
    JobOrder, Listing, Query, Report, Request, WorkerHandle, WorkerOrder,
};
use espalier_proto::task::FailureKind;
use espalier_proto::v1::coordinator_message::Message;
use espalier_proto::v1::{self, JobEvent, JobState, WorkerState};
use tokio::sync::oneshot;
use tonic::{Code, Status};

const RETRY: JobOrder = JobOrder::Retry { request_id: None };

fn archive(bench: &Bench, job: u64) -> PathBuf {
    bench.directory.path().join(format!("archive/job-{job}.archive"))
}

fn cancelled(bench: &mut Bench, output: &str) -> u64 {
    let job = bench.submit(output).unwrap().0.id;
    let number = job.trim_start_matches("job-").parse().unwrap();
    let reason = "enough".to_owned();
    bench.order(number, JobOrder::Cancel { reason }).unwrap();
    number
}

/// A job that failed, its first task with bad input.
fn failed(bench: &mut Bench, output: &str) {
    bench.submit(output).unwrap();
    bench.turn(vec![Request::Tick]);
    let (from, mut inbox) = bench.greet(Vec::new());
    bench.turn(vec![Request::Tick]);
    let lease = assigned(&messages(&mut inbox)).expect("the worker got a task");
    bench.fail(from, lease, FailureKind::Invalid);
}

#[test]
fn a_large_failed_job_can_be_retried_whatever_ends_after_it() {
    let mut bench = Bench::new(Crowd(10_001));
    failed(&mut bench, "/failed");
    // Its worker goes, so that the others run nowhere.
    for _ in 0..4 {
        bench.wait(14_000);
        bench.turn(vec![Request::Tick]);
    }
    for number in 0..2 {
        cancelled(&mut bench, &format!("/other-{number}"));
    }
    for _ in 0..8 {
        bench.wait(11 * 60 * 1000);
        bench.turn(vec![Request::Tick]);
    }
    assert!(archive(&bench, 2).is_file() && !archive(&bench, 1).is_file());
    let retried = bench.order(1, RETRY).unwrap();
    assert_eq!(retried.state(), JobState::Running);
}

#[test]
fn the_oldest_of_too_many_failed_jobs_is_archived_and_who_retries_it_is_told_to_submit_it_again() {
    let mut bench = Bench::new(Crowd(1));
    for number in 0..17 {
        failed(&mut bench, &format!("/failed-{number}"));
    }
    for _ in 0..3 {
        bench.wait(11 * 60 * 1000);
        bench.turn(vec![Request::Tick]);
    }
    let refused = bench.order(1, RETRY).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("archived since: submit it again"),
        "{refused}"
    );
    bench.order(2, RETRY).unwrap();
}

#[test]
fn an_archive_does_not_wait_for_ever_for_tables_that_stand_still() {
    let mut bench = Bench::new(Crowd(10_001));
    cancelled(&mut bench, "/one");
    for _ in 0..2 {
        bench.wait(9 * 60 * 1000 / 2);
        bench.turn(vec![Request::Tick]);
    }
    assert!(!archive(&bench, 1).is_file(), "the tables know nothing of it yet");
    bench.wait(2 * 60 * 1000);
    bench.turn(vec![Request::Tick]);
    assert!(archive(&bench, 1).is_file(), "it waits for ever");
}

#[test]
fn tables_that_lag_are_not_waited_for_while_ended_tasks_crowd_the_state() {
    let mut bench = Bench::new(Crowd(10_001));
    cancelled(&mut bench, "/one");
    bench.turn(vec![Request::Tick]);
    assert!(!archive(&bench, 1).is_file(), "the tables know nothing of it yet");
    cancelled(&mut bench, "/two");
    bench.turn(vec![Request::Tick]);
    assert!(archive(&bench, 1).is_file(), "ended tasks pile up");
}

#[test]
fn an_archive_waits_until_the_tables_know_the_job_to_its_end() {
    let mut bench = Bench::new(Crowd(10_001));
    let data_dir = bench.directory.path().to_owned();
    let writer = bench
        .tables
        .start(Arc::new(SystemDisk), &data_dir, bench.owner.position())
        .unwrap();
    cancelled(&mut bench, "/one");
    let events = |bench: &mut Bench, after| {
        let job = JobId(1);
        bench
            .ask(|reply| Request::Query(Query::Events { job, after, reply }))
            .unwrap()
            .0
    };
    let live = events(&mut bench, 0);
    let began = Instant::now();
    while !archive(&bench, 1).is_file() {
        assert!(began.elapsed() < DEADLINE, "job-1 is not archived");
        bench.wait(100);
        bench.turn(vec![Request::Tick]);
        std::thread::sleep(Duration::from_millis(10));
    }
    let kept = Archives::new(Arc::new(SystemDisk), &data_dir)
        .read(JobId(1))
        .unwrap();
    let kinds: Vec<&str> = kept.events.iter().map(|event| event.kind.as_str()).collect();
    assert!(
        kinds.contains(&"job_cancelled"),
        "it was written before its end was known: {kinds:?}"
    );
    let numbers = |events: &[(u64, JobEvent)]| -> Vec<(u64, String)> {
        events
            .iter()
            .map(|(number, event)| (*number, event.kind.clone()))
            .collect()
    };
    assert!(live.iter().any(|(_, event)| event.kind == "stages_planned"));
    assert_eq!(numbers(&events(&mut bench, 0)), numbers(&live));
    let seen = live.last().unwrap().0;
    assert!(
        events(&mut bench, seen).is_empty(),
        "who follows is told again once it is archived"
    );
    writer.stop();
}

#[test]
fn what_is_known_can_be_asked_for_while_promotion_waits() {
    let mut bench = Bench::new(Crowd(1));
    bench.submit("/one").unwrap();
    bench.gate.waits.store(true, Ordering::Relaxed);
    let (reply, mut shown) = oneshot::channel();
    let (watch, mut followed) = oneshot::channel();
    let (cancel, mut cancelled) = oneshot::channel();
    let job = JobId(1);
    let order = JobOrder::Cancel {
        reason: String::new(),
    };
    let mut batch = vec![
        Request::KeepJob {
            job,
            order,
            reply: cancel,
        },
        Request::Query(Query::Job { job, reply }),
        Request::Watch { job, reply: watch },
        Request::Tick,
    ];
    bench.owner.turn(&mut batch).unwrap();
    assert_eq!(shown.try_recv().unwrap().unwrap().id, "job-1");
    assert!(followed.try_recv().unwrap().is_ok());
    assert!(
        cancelled.try_recv().is_err(),
        "a cancellation was promised without authority"
    );
    bench.gate.waits.store(false, Ordering::Relaxed);
    bench.owner.turn(&mut batch).unwrap();
    assert!(cancelled.try_recv().unwrap().is_ok(), "what waited was lost");
}

#[test]
fn a_job_is_followed_without_its_spec_sent_again_and_again() {
    let mut bench = Bench::new(Crowd(1));
    bench.submit("/one").unwrap();
    let job = JobId(1);
    let followed = bench.ask(|reply| Request::Watch { job, reply }).unwrap();
    assert_eq!(followed.spec_json, "{}");
    let before = followed.snapshots.borrow().clone();
    bench.greet(Vec::new());
    bench.turn(vec![Request::Tick]);
    let after = followed.snapshots.borrow().clone();
    assert!(after.revision > before.revision);
    assert_eq!((before.spec_json.as_str(), after.spec_json.as_str()), ("", ""));
    let shown = bench
        .ask(|reply| Request::Query(Query::Job { job, reply }))
        .unwrap();
    assert_eq!(shown.spec_json, "{}");
}

#[test]
fn leases_that_end_with_a_lost_worker_are_counted_apart_from_those_of_a_worker_started_anew() {
    let mut bench = Bench::new(Crowd(1));
    let metrics = Metrics::default();
    bench.owner = bench.owner.seen_by(metrics.clone(), Logs::nowhere());
    let counted = |reason: &str| {
        let line = format!("espalier_lease_expirations_total{{reason=\"{reason}\"}} ");
        let text = metrics.text();
        let value = text.lines().find_map(|shown| shown.strip_prefix(line.as_str()));
        value.expect("it is not counted").to_owned()
    };
    bench.submit("/one").unwrap();
    let (_, mut inbox) = bench.greet_as("a", 1, Vec::new());
    bench.turn(vec![Request::Tick]);
    assert!(assigned(&messages(&mut inbox)).is_some());
    for _ in 0..4 {
        bench.wait(14_000);
        bench.turn(vec![Request::Tick]);
    }
    assert_eq!(
        (
            counted("worker_lost").as_str(),
            counted("worker_restarted").as_str()
        ),
        ("1", "0")
    );
    let (_, mut inbox) = bench.greet_as("a", 2, Vec::new());
    bench.turn(vec![Request::Tick]);
    assert!(assigned(&messages(&mut inbox)).is_some());
    bench.greet_as("a", 3, Vec::new());
    assert_eq!(
        (
            counted("worker_lost").as_str(),
            counted("worker_restarted").as_str()
        ),
        ("1", "1")
    );
}

fn shown(bench: &mut Bench, name: &str) -> Result<v1::Worker, Status> {
    let name = name.to_owned();
    bench.ask(|reply| Request::Query(Query::Worker { name, reply }))
}

/// Lets time pass, in steps that are not taken for an absence of the loop itself.
fn pass(bench: &mut Bench, seconds: u64) {
    for _ in 0..seconds.div_ceil(14) {
        bench.wait(14_000);
        bench.turn(vec![Request::Tick]);
    }
}

#[test]
fn a_worker_that_left_is_shown_as_such_and_forgotten_after_a_day() {
    let mut bench = Bench::new(Crowd(1));
    let (from, _inbox) = bench.greet_as("pod-1", 1, Vec::new());
    bench.turn(vec![Request::Leave { from }, Request::Closed { from }]);
    let (_, _stays) = bench.greet_as("pod-2", 1, Vec::new());
    pass(&mut bench, 60);
    assert_eq!(shown(&mut bench, "pod-1").unwrap().state(), WorkerState::Left);
    pass(&mut bench, 23 * 60 * 60);
    assert!(shown(&mut bench, "pod-1").is_ok());
    pass(&mut bench, 60 * 60);
    assert_eq!(shown(&mut bench, "pod-1").unwrap_err().code(), Code::NotFound);
    assert!(shown(&mut bench, "pod-2").is_ok());
}

#[test]
fn a_worker_that_leaves_of_itself_or_is_drained_has_left_and_a_silent_one_is_lost() {
    let mut bench = Bench::new(Crowd(1));
    let (terminated, _gone) = bench.greet_as("terminated", 1, Vec::new());
    let from = terminated;
    bench.turn(vec![Request::Leave { from }, Request::Closed { from }]);
    bench.submit("/one").unwrap();
    let (from, mut inbox) = bench.greet_as("drained", 1, Vec::new());
    bench.turn(vec![Request::Tick]);
    let lease = assigned(&messages(&mut inbox)).expect("the worker got a task");
    let drain = |reply| Request::KeepWorker {
        name: "drained".to_owned(),
        order: WorkerOrder::Drain {
            reason: "a new disk".to_owned(),
        },
        reply,
    };
    bench.ask(drain).unwrap();
    let report = Report::Stopped;
    bench.turn(vec![
        Request::Leave { from },
        Request::Report { from, lease, report },
        Request::Closed { from },
    ]);
    let (from, _gone) = bench.greet_as("killed", 1, Vec::new());
    bench.turn(vec![Request::Closed { from }]);
    assert_eq!(
        shown(&mut bench, "drained").unwrap().state(),
        WorkerState::Leaving
    );
    pass(&mut bench, 60);
    let mut state = |name: &str| shown(&mut bench, name).unwrap().state();
    assert_eq!(
        ["terminated", "drained", "killed"].map(&mut state),
        [WorkerState::Left, WorkerState::Left, WorkerState::Lost]
    );
    assert_eq!(shown(&mut bench, "drained").unwrap().message, "a new disk");
}

#[test]
fn a_silent_workers_task_is_handed_on_and_its_late_result_refused() {
    let mut bench = Bench::new(Crowd(1));
    bench.submit("/one").unwrap();
    let (silent, mut inbox) = bench.greet_as("silent", 1, Vec::new());
    bench.turn(vec![Request::Tick]);
    let old = assigned(&messages(&mut inbox)).expect("the worker got a task");
    let (other, mut others) = bench.greet_as("other", 1, Vec::new());
    let beat = |bench: &mut Bench, from: WorkerHandle| {
        bench.ask(|reply| Request::Heartbeat {
            term: Term(1),
            worker: from.worker,
            epoch: from.epoch,
            attempts: Vec::new(),
            reply,
        })
    };
    for _ in 0..4 {
        bench.wait(14_000);
        beat(&mut bench, other).unwrap();
        bench.turn(vec![Request::Tick]);
    }
    let new = assigned(&messages(&mut others)).expect("the task is handed on");
    assert_ne!(new, old);
    assert_eq!(
        beat(&mut bench, silent).unwrap_err().code(),
        Code::FailedPrecondition
    );
    let (silent, mut inbox) = bench.greet_as("silent", 1, vec![old]);
    let told = messages(&mut inbox);
    let [Message::Welcome(welcome), ..] = told.as_slice() else {
        panic!("the first message is no welcome: {told:?}")
    };
    assert_eq!(welcome.superseded.len(), 1);
    let completed = |from, lease| Request::Report {
        from,
        lease,
        report: Report::Completed("{}".into()),
    };
    bench.turn(vec![completed(silent, old)]);
    let told = messages(&mut inbox);
    assert!(matches!(told.as_slice(), [Message::Superseded(_)]), "{told:?}");
    assert_eq!(bench.done(1), 0, "a late result was taken");
    bench.turn(vec![completed(other, new)]);
    let told = messages(&mut others);
    assert!(matches!(told.as_slice(), [Message::Acknowledged(_)]), "{told:?}");
    assert_eq!(bench.done(1), 1);
}

#[test]
fn a_restart_that_cannot_be_said_is_refused() {
    let mut bench = Bench::new(Crowd(1));
    let (from, mut inbox) = bench.greet_as("a", 1, Vec::new());
    let restart = |bench: &mut Bench| {
        let (name, order) = (
            "a".to_owned(),
            WorkerOrder::Restart {
                reason: String::new(),
            },
        );
        bench.ask(|reply| Request::KeepWorker { name, order, reply })
    };
    restart(&mut bench).unwrap();
    let told = messages(&mut inbox);
    assert!(told.iter().any(|message| matches!(message, Message::Restart(_))));
    bench.turn(vec![Request::Closed { from }]);
    let refused = restart(&mut bench).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("is not connected"), "{refused}");
}

#[test]
fn a_plan_asked_for_before_a_failure_cannot_break_the_retried_job() {
    let mut bench = Bench::new(Crowd(2));
    failed(&mut bench, "/one");
    bench.order(1, RETRY).unwrap();
    let late = Request::Planned {
        job: JobId(1),
        revision: 1,
        planned: Err("of before the failure".to_owned()),
    };
    bench.turn(vec![late]);
    let job = JobId(1);
    let shown = bench
        .ask(|reply| Request::Query(Query::Job { job, reply }))
        .unwrap();
    assert_eq!((shown.state(), shown.message.as_str()), (JobState::Running, ""));
}

#[test]
fn a_worker_that_hands_everything_back_does_not_keep_the_loop_busy() {
    let mut bench = Bench::new(Crowd(1));
    bench.submit("/one").unwrap();
    let (from, mut inbox) = bench.greet(Vec::new());
    let mut tries = 0;
    for _ in 0..20 {
        bench.turn(vec![Request::Tick]);
        let Some(lease) = assigned(&messages(&mut inbox)) else {
            break;
        };
        tries += 1;
        let report = Report::Stopped;
        bench
            .owner
            .turn(&mut vec![Request::Report { from, lease, report }])
            .unwrap();
    }
    assert!(tries < 10, "it got the task {tries} times without a pause");
    bench.wait(2_000);
    bench.turn(vec![Request::Tick]);
    assert!(assigned(&messages(&mut inbox)).is_some(), "a pause has an end");
}

#[test]
fn a_page_of_jobs_in_a_state_passes_over_the_others() {
    let mut bench = Bench::new(Crowd(1));
    for number in 0..3 {
        cancelled(&mut bench, &format!("/cancelled-{number}"));
        bench.submit(&format!("/queued-{number}")).unwrap();
    }
    let mut listed = |states: &[JobState], before| {
        let listing = Listing {
            before,
            size: 2,
            states: states.iter().map(|state| i32::from(*state)).collect(),
        };
        let page = bench.ask(|reply| Request::Query(Query::Jobs { listing, reply }));
        page.unwrap().into_iter().map(|job| job.id).collect::<Vec<_>>()
    };
    assert_eq!(listed(&[JobState::Cancelled], None), ["job-5", "job-3"]);
    assert_eq!(listed(&[JobState::Cancelled], Some(JobId(3))), ["job-1"]);
    assert_eq!(listed(&[JobState::Queued], None), ["job-6", "job-4"]);
    assert_eq!(listed(&[], None), ["job-6", "job-5"]);
    assert!(listed(&[JobState::Running, JobState::Failed], None).is_empty());
}
