//! What clients and workers see of a coordinator, over real gRPC on loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::{DEADLINE, FakeWorker, Place, acknowledged, client, end_of, run_one};
use espalier_coordinator::Error;
use espalier_coordinator::client::Client;
use espalier_proto::task::FailureKind;
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::submit_request::Spec;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{JobState, Lease, Leaving, Stopped, WorkerState};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_goes_from_submission_to_its_outcome_in_place() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let (job, existed) = client(&handle)
        .await
        .submit(place.spec(), "request")
        .await
        .unwrap();
    assert!(!existed);
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    run_one(&mut worker).await;
    fs::create_dir_all(place.partial().join("checkpoint")).unwrap();
    fs::write(place.partial().join("checkpoint/config.json"), "{}").unwrap();
    run_one(&mut worker).await;
    run_one(&mut worker).await;
    let ended = end_of(&handle, &job.id).await;
    assert_eq!(ended.state(), JobState::Succeeded, "{}", ended.message);
    assert_eq!(ended.outcome_json, "{\"story\":\"told\"}");
    assert!(place.output().join("checkpoint/config.json").is_file());
    assert!(place.output().join("report.json").is_file());
    assert!(!place.partial().exists());
    let (again, existed) = client(&handle)
        .await
        .submit(place.spec(), "request")
        .await
        .unwrap();
    assert!(
        existed,
        "a submission sent twice runs once, though its output exists now"
    );
    assert_eq!(again.id, job.id);
    let taken = client(&handle).await.submit(place.spec(), "other").await;
    assert!(matches!(taken, Err(Error::Conflict(message)) if message.contains("exists")));
    handle.shutdown(DEADLINE).await.unwrap();
}

/// Waits until a worker is seen in this state.
async fn expect_state(keeper: &mut Client, name: &str, state: WorkerState) {
    let began = Instant::now();
    loop {
        let seen = keeper.worker(name).await.unwrap();
        if seen.state() == state {
            return;
        }
        assert!(began.elapsed() < DEADLINE, "{seen:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_leaves_of_itself_or_is_drained_is_seen_to_leave() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut keeper = client(&handle).await;
    let terminated = FakeWorker::connect(&handle, "terminated", 1, Vec::new()).await;
    terminated
        .say(FromWorker::Leaving(Leaving { term: 1, epoch: 1 }))
        .await;
    expect_state(&mut keeper, "terminated", WorkerState::Leaving).await;
    let mut drained = FakeWorker::connect(&handle, "drained", 1, Vec::new()).await;
    let (job, _) = keeper.submit(place.spec(), "").await.unwrap();
    let lease = drained.assignment().await.lease.unwrap();
    keeper.drain("drained", "a new disk").await.unwrap();
    assert!(matches!(drained.next().await, FromCoordinator::Drain(_)));
    drained
        .say(FromWorker::Leaving(Leaving { term: 1, epoch: 1 }))
        .await;
    drained
        .say(FromWorker::Stopped(Stopped { lease: Some(lease) }))
        .await;
    assert_eq!(acknowledged(&mut drained).await, lease);
    expect_state(&mut keeper, "drained", WorkerState::Leaving).await;
    assert_eq!(keeper.worker("drained").await.unwrap().message, "a new disk");
    assert_eq!(keeper.get(&job.id).await.unwrap().state(), JobState::Running);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_coordinator_keeps_results_and_lets_workers_carry_on() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let done = run_one(&mut worker).await;
    let running = worker.assignment().await.lease.unwrap();
    handle.shutdown(DEADLINE).await.unwrap();

    let handle = place.coordinator().await;
    let mut worker = FakeWorker::connect(&handle, "a", 1, vec![done, running]).await;
    assert_eq!(worker.welcome.term, 2);
    assert!(worker.welcome.superseded.is_empty());
    worker.complete(done).await;
    assert_eq!(
        acknowledged(&mut worker).await,
        done,
        "a result sent again is acknowledged again"
    );
    worker.complete(running).await;
    assert_eq!(acknowledged(&mut worker).await, running);
    fs::create_dir_all(place.partial()).unwrap();
    run_one(&mut worker).await;
    assert_eq!(end_of(&handle, &job.id).await.state(), JobState::Succeeded);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_started_anew_keeps_its_stream_and_runs_again_what_it_had() {
    let place = Place::new();
    let handle = place.coordinator().await;
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut before = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let open = before.assignment().await.lease.unwrap();
    let mut after = FakeWorker::connect(&handle, "a", 2, Vec::new()).await;
    let again = run_one(&mut after).await;
    assert!(again.attempt > open.attempt && again.epoch == 2, "{again:?}");
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_assignment_that_never_arrived_is_sent_again() {
    let place = Place::new();
    let handle = place.coordinator().await;
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let first = worker.assignment().await;
    drop(worker);
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    assert_eq!(worker.assignment().await, first);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_input_fails_the_job_with_its_message_and_leaves_nothing() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let lease = worker.assignment().await.lease.unwrap();
    fs::create_dir_all(place.partial().join("checkpoint")).unwrap();
    worker
        .fail(lease, FailureKind::Invalid, "the file is empty")
        .await;
    let ended = end_of(&handle, &job.id).await;
    assert_eq!(ended.state(), JobState::Failed);
    assert!(ended.message.ends_with("the file is empty"), "{}", ended.message);
    assert!(!place.partial().exists() && !place.output().exists());
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_job_ends_when_its_attempts_have_stopped() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let lease = worker.assignment().await.lease.unwrap();
    fs::create_dir_all(place.partial()).unwrap();
    let cancelled = client(&handle).await.cancel(&job.id, "enough").await.unwrap();
    assert_eq!(cancelled.state(), JobState::Running, "its attempt still runs");
    let FromCoordinator::Cancel(cancel) = worker.next().await else {
        panic!("no cancel came")
    };
    assert_eq!(cancel.lease, Some(lease));
    worker
        .say(FromWorker::Stopped(Stopped { lease: Some(lease) }))
        .await;
    acknowledged(&mut worker).await;
    let ended = end_of(&handle, &job.id).await;
    assert_eq!(
        (ended.state(), ended.message.as_str()),
        (JobState::Cancelled, "enough")
    );
    assert!(!place.partial().exists());
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_requests_are_refused_by_their_kind() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut client = client(&handle).await;
    let submitted = client.submit(Spec::Yaml("parent: [".to_owned()), "").await;
    assert!(matches!(submitted, Err(Error::Invalid(_))), "{submitted:?}");
    assert!(matches!(client.get("job-7").await, Err(Error::NotFound(_))));
    assert!(matches!(client.get("7").await, Err(Error::Invalid(_))));
    assert!(matches!(client.watch("job-7", 0).await, Err(Error::NotFound(_))));
    let newer = FakeWorker::connect(&handle, "a", 2, Vec::new()).await;
    let older = FakeWorker::try_connect(&handle, "a", 1, Vec::new()).await;
    assert_eq!(older.err().unwrap().code(), tonic::Code::FailedPrecondition);
    let unnamed = FakeWorker::try_connect(&handle, "not a name", 1, Vec::new()).await;
    assert_eq!(unnamed.err().unwrap().code(), tonic::Code::InvalidArgument);
    newer
        .complete(Lease {
            term: 9,
            epoch: 9,
            attempt: u64::MAX,
        })
        .await;
    let mut newer = newer;
    assert!(matches!(newer.next().await, FromCoordinator::Superseded(_)));
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_list_every_job_once_the_newest_first() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut client = client(&handle).await;
    for number in 0..5 {
        let Spec::Yaml(text) = place.spec() else {
            panic!("yaml")
        };
        let elsewhere = text.replace("/out\n", &format!("/out-{number}\n"));
        client.submit(Spec::Yaml(elsewhere), "").await.unwrap();
    }
    let (mut seen, mut token) = (Vec::new(), String::new());
    loop {
        let (jobs, next) = client.list(2, &token, &[]).await.unwrap();
        seen.extend(jobs.into_iter().map(|job| job.id));
        match next {
            Some(next) => token = next,
            None => break,
        }
    }
    assert_eq!(seen, ["job-5", "job-4", "job-3", "job-2", "job-1"]);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_data_directory_has_one_coordinator() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut options = espalier_coordinator::CoordinatorOptions::new(place.directory.path().join("data"));
    options.listen = "127.0.0.1:0".parse().unwrap();
    let second = espalier_coordinator::Coordinator::start_with(options, std::sync::Arc::new(common::Story));
    assert!(matches!(second.await, Err(Error::InUse { .. })));
    handle.shutdown(DEADLINE).await.unwrap();
}
