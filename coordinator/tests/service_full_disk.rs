//! The loop on a disk that fills up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::atomic::Ordering;

use common::Crowd;
use common::bench::{Bench, assigned, messages};
use espalier_coordinator::service::owner::{Report, Request};
use espalier_proto::v1::coordinator_message::Message;
use tonic::Code;

#[test]
fn a_full_disk_stops_admission_and_nothing_accepted_is_lost() {
    let mut bench = Bench::new(Crowd(2));
    bench.submit("/accepted").unwrap();
    let (worker, mut inbox) = bench.greet(Vec::new());
    bench.turn(vec![Request::Tick]);
    let lease = assigned(&messages(&mut inbox)).expect("the worker got a task");
    let (_other, others) = bench.greet_as("other", 1, Vec::new());

    bench.disk.full.store(true, Ordering::Relaxed);
    let refused = bench.submit("/refused").unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(bench.owner.is_full());
    assert!(messages(&mut inbox).is_empty());
    assert!(!inbox.is_closed(), "a worker that has said nothing is cut off");
    let completed = |from| Request::Report {
        from,
        lease,
        report: Report::Completed("{}".into()),
    };
    bench.world.milliseconds.fetch_add(10_000, Ordering::Relaxed);
    bench.turn(vec![completed(worker)]);
    let acknowledged = |messages: &[Message]| {
        let is_one = |message: &Message| matches!(message, Message::Acknowledged(_));
        messages.iter().any(is_one)
    };
    assert!(
        !acknowledged(&messages(&mut inbox)),
        "a result that is not on the disk was acknowledged"
    );
    assert_eq!(bench.done(1), 0);
    assert!(
        inbox.is_closed(),
        "the worker is told to come back and say all again"
    );
    assert!(
        !others.is_closed(),
        "one whose report was not in the turn is cut off"
    );

    bench.disk.full.store(false, Ordering::Relaxed);
    bench.world.milliseconds.fetch_add(10_000, Ordering::Relaxed);
    bench.turn(vec![Request::Tick]);
    assert!(!bench.owner.is_full());
    let (worker, mut inbox) = bench.greet(vec![lease]);
    bench.turn(vec![completed(worker)]);
    assert!(acknowledged(&messages(&mut inbox)), "work in flight was lost");
    assert_eq!(bench.done(1), 1);
    let (job, existed) = bench.submit("/refused").unwrap();
    assert_eq!(
        (job.id.as_str(), existed),
        ("job-2", false),
        "what was refused left no trace"
    );
}

#[test]
fn a_full_disk_is_full_until_something_was_written_to_it() {
    let mut bench = Bench::new(Crowd(1));
    bench.disk.full.store(true, Ordering::Relaxed);
    bench.submit("/refused").unwrap_err();
    for _ in 0..3 {
        bench.wait(10_000);
        bench.turn(vec![Request::Tick]);
        assert!(
            bench.owner.is_full(),
            "nothing was written, and it is said to have room"
        );
    }
    bench.disk.full.store(false, Ordering::Relaxed);
    bench.wait(10_000);
    bench.turn(vec![Request::Tick]);
    assert!(
        !bench.owner.is_full(),
        "it has room, and nothing is to be written"
    );
    bench.submit("/taken").unwrap();
}

#[test]
fn tasks_that_wait_while_the_disk_is_full_cut_no_worker_off() {
    let mut bench = Bench::new(Crowd(2));
    bench.submit("/accepted").unwrap();
    bench.disk.full.store(true, Ordering::Relaxed);
    bench.submit("/refused").unwrap_err();
    bench.disk.full.store(false, Ordering::Relaxed);
    // Known before, so that its coming is nothing to be written.
    let (from, _gone) = bench.greet(Vec::new());
    bench.turn(vec![Request::Closed { from }]);
    bench.disk.full.store(true, Ordering::Relaxed);
    let (_, mut inbox) = bench.greet(Vec::new());
    for _ in 0..3 {
        bench.wait(3_000);
        bench.turn(vec![Request::Tick]);
        assert!(
            !inbox.is_closed(),
            "the worker is cut off for a task that finds no room"
        );
    }
    bench.disk.full.store(false, Ordering::Relaxed);
    bench.wait(3_000);
    bench.turn(vec![Request::Tick]);
    assert!(assigned(&messages(&mut inbox)).is_some());
}
