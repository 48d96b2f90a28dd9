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
use espalier_coordinator::scheduler::JobId;
use espalier_coordinator::service::owner::{JobOrder, Query, Request};
use espalier_proto::task::FailureKind;
use espalier_proto::v1::JobState;
use tokio::sync::oneshot;
use tonic::Code;

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
