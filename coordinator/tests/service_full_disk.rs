//! The loop on a disk that fills up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::bench::{Bench, Filling, assigned, messages};
use common::{Crowd, DEADLINE, FakeWorker, Place, Story, client, free_address};
use espalier_coordinator::Coordinator;
use espalier_coordinator::client::Client;
use espalier_coordinator::service::owner::{Report, Request};
use espalier_proto::v1::coordinator_message::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
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

#[test]
fn a_disk_that_others_filled_is_noticed_before_anybody_asks_for_anything() {
    let mut bench = Bench::new(Crowd(1));
    bench.turn(vec![Request::Tick]);
    bench.disk.full.store(true, Ordering::Relaxed);
    bench.wait(5_000);
    bench.turn(vec![Request::Tick]);
    assert!(
        bench.owner.is_full(),
        "nobody has written, and it is said to have room"
    );
    bench.disk.full.store(false, Ordering::Relaxed);
    bench.wait(5_000);
    bench.turn(vec![Request::Tick]);
    assert!(!bench.owner.is_full());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_on_a_full_disk_waits_for_room_and_says_so() {
    let place = Place::new();
    let before = place.coordinator().await;
    let accepted = client(&before).await.submit(place.spec(), "").await.unwrap().0;
    let worker = FakeWorker::connect(&before, "worker", 1, Vec::new()).await;
    before.shutdown(DEADLINE).await.unwrap();
    drop(worker);

    let mut options = place.options();
    options.listen = free_address();
    let address = options.listen;
    let disk = Filling::default();
    disk.full.store(true, Ordering::Relaxed);
    let starting = tokio::spawn(Coordinator::start_on(
        options,
        Arc::new(Story),
        Arc::new(disk.clone()),
    ));
    let began = Instant::now();
    loop {
        let ready = match TcpStream::connect(address).await {
            Ok(stream) => page(stream, "/readyz").await,
            Err(_) => String::new(),
        };
        if ready.contains("503") && ready.contains("free some space") {
            break;
        }
        assert!(!starting.is_finished(), "{:?}", starting.await);
        assert!(began.elapsed() < DEADLINE, "no reason is said: {ready}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let alive = page(TcpStream::connect(address).await.unwrap(), "/healthz").await;
    assert!(
        alive.contains("200"),
        "it would be restarted for nothing: {alive}"
    );
    let metrics = page(TcpStream::connect(address).await.unwrap(), "/metrics").await;
    assert!(metrics.contains("espalier_disk_full 1"), "{metrics}");
    let endpoint = format!("http://{address}");
    let mut asking = Client::connect(&endpoint, DEADLINE).await.unwrap();
    let refused = asking.submit(place.spec(), "other").await.unwrap_err();
    assert!(
        refused.is_away() && refused.to_string().contains("free some space"),
        "who follows something does not wait for it: {refused}"
    );

    disk.full.store(false, Ordering::Relaxed);
    let started = tokio::time::timeout(DEADLINE, starting).await.unwrap();
    let coordinator = started.unwrap().unwrap();
    let ready = page(TcpStream::connect(address).await.unwrap(), "/readyz").await;
    assert!(ready.contains("200"), "{ready}");
    let metrics = page(TcpStream::connect(address).await.unwrap(), "/metrics").await;
    assert!(metrics.contains("espalier_disk_full 0"), "{metrics}");
    let (jobs, _) = asking.list(10, "", &[]).await.unwrap();
    assert_eq!(jobs.len(), 1, "what was refused was taken all the same");
    assert_eq!(jobs.first().unwrap().id, accepted.id);
    coordinator.shutdown(DEADLINE).await.unwrap();
}

/// The whole answer, status and headers too.
async fn page(mut stream: TcpStream, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    tokio::time::timeout(DEADLINE, read)
        .await
        .expect("no answer")
        .unwrap();
    answer
}
