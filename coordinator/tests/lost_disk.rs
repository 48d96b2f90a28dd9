//! A coordinator whose disk is lost goes on elsewhere, from the artifact store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{DEADLINE, FakeWorker, Place, Story, client, end_of, hello, run_one};
use espalier_coordinator::client::Client;
use espalier_coordinator::{Coordinator, CoordinatorOptions, Error, Handle, doctor};
use espalier_proto::v1::JobState;
use tokio::io::AsyncWriteExt;
use tonic::Code;

/// A coordinator of the one cluster on a disk of this name.
async fn coordinator(place: &Place, disk: &str) -> Result<Handle, Error> {
    let options = CoordinatorOptions {
        data_dir: place.directory.path().join(disk),
        store: Some(place.directory.path().join("store").display().to_string()),
        ship_interval: Duration::from_millis(100),
        term_lease: Duration::from_secs(1),
        ..place.options()
    };
    Coordinator::start_with(options, Arc::new(Story)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_goes_on_from_the_store_when_the_disk_is_lost_and_the_old_disk_is_refused() {
    let place = Place::new();
    let first = coordinator(&place, "first").await.unwrap();
    let (job, _) = client(&first).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&first, "a", 1, Vec::new()).await;
    let done = run_one(&mut worker).await;
    std::fs::create_dir_all(place.partial().join("checkpoint")).unwrap();
    let running = worker.assignment().await.lease.unwrap();
    first.shutdown(DEADLINE).await.unwrap();

    let second = coordinator(&place, "second").await.unwrap();
    // The worker carries on with what it had.
    let mut worker = FakeWorker::connect(&second, "a", 1, vec![running]).await;
    assert_eq!(worker.welcome.term, 2);
    worker.complete(running).await;
    assert_eq!(common::acknowledged(&mut worker).await, running);
    let last = run_one(&mut worker).await;
    assert!(
        last.attempt > done.attempt,
        "what was acknowledged is not done again"
    );
    let ended = end_of(&second, &job.id).await;
    assert_eq!(ended.state(), JobState::Succeeded, "{}", ended.message);

    let refused = coordinator(&place, "first").await.unwrap_err().to_string();
    assert!(
        refused.contains("has gone on without this data directory"),
        "{refused}"
    );
    second.shutdown(DEADLINE).await.unwrap();
    // The disk that has the term goes on at once.
    let again = coordinator(&place, "second").await.unwrap();
    let worker = FakeWorker::connect(&again, "b", 1, Vec::new()).await;
    assert_eq!(worker.welcome.term, 3);
    again.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_started_anew_is_welcomed_by_the_successor_and_runs_again_what_it_had() {
    let place = Place::new();
    let first = coordinator(&place, "first").await.unwrap();
    let (job, _) = client(&first).await.submit(place.spec(), "").await.unwrap();
    std::fs::create_dir_all(place.partial().join("checkpoint")).unwrap();
    let mut worker = FakeWorker::connect(&first, "a", 1, Vec::new()).await;
    run_one(&mut worker).await;
    let open = worker.assignment().await.lease.unwrap();
    first.shutdown(DEADLINE).await.unwrap();

    let second = coordinator(&place, "second").await.unwrap();
    let mut worker = FakeWorker::connect(&second, "a", 2, Vec::new()).await;
    assert_eq!(worker.welcome.term, 2);
    for _ in 0..2 {
        let lease = run_one(&mut worker).await;
        assert_eq!((lease.term, lease.epoch), (2, 2));
        assert!(lease.attempt > open.attempt, "the old attempt was given up");
    }
    let ended = end_of(&second, &job.id).await;
    assert_eq!(ended.state(), JobState::Succeeded, "{}", ended.message);
    second.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_still_runs_stops_by_itself_when_another_takes_over() {
    let place = Place::new();
    let first = coordinator(&place, "first").await.unwrap();
    let second = coordinator(&place, "second").await.unwrap();
    let reason = tokio::time::timeout(DEADLINE, first.failed()).await.unwrap();
    assert!(reason.contains("term 2"), "{reason}");
    let (job, _) = client(&second).await.submit(place.spec(), "").await.unwrap();
    std::fs::create_dir_all(place.partial().join("checkpoint")).unwrap();
    let mut worker = FakeWorker::connect(&second, "a", 1, Vec::new()).await;
    for _ in 0..3 {
        run_one(&mut worker).await;
    }
    let ended = end_of(&second, &job.id).await;
    assert_eq!(ended.state(), JobState::Succeeded, "{}", ended.message);
    second.shutdown(DEADLINE).await.unwrap();
    first.shutdown(DEADLINE).await.unwrap();
}

/// A first coordinator has a job, whose first task is done; then it is gone.
async fn with_a_past(place: &Place) -> String {
    let first = coordinator(place, "first").await.unwrap();
    let (job, _) = client(&first).await.submit(place.spec(), "").await.unwrap();
    std::fs::create_dir_all(place.partial().join("checkpoint")).unwrap();
    let mut worker = FakeWorker::connect(&first, "a", 1, Vec::new()).await;
    run_one(&mut worker).await;
    first.shutdown(DEADLINE).await.unwrap();
    job.id
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_failed_before_its_claim_leaves_nothing_that_makes_the_clusters_history_void() {
    let place = Place::new();
    let job = with_a_past(&place).await;
    // What such a start leaves behind: a segment without a whole frame.
    let journal = place.directory.path().join("second/journal");
    std::fs::create_dir_all(&journal).unwrap();
    std::fs::write(journal.join("journal-00000000000000000001.log"), [7; 5]).unwrap();
    std::fs::write(
        journal.join("damaged-snapshot-00000000000000000003.snap"),
        "evidence",
    )
    .unwrap();

    let second = coordinator(&place, "second").await.unwrap();
    let known = client(&second).await.get(&job).await.unwrap();
    assert_eq!(known.stages.iter().map(|stage| stage.tasks_done).sum::<u32>(), 1);
    assert!(
        journal
            .join("damaged-snapshot-00000000000000000003.snap")
            .exists(),
        "what was set aside stays"
    );
    second.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copied_disk_is_refused_and_the_one_it_was_copied_from_goes_on() {
    let place = Place::new();
    let first = coordinator(&place, "first").await.unwrap();
    let (job, _) = client(&first).await.submit(place.spec(), "").await.unwrap();
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .args(["first", "copied"].map(|disk| place.directory.path().join(disk)))
        .status();
    assert!(copied.unwrap().success());

    let refused = coordinator(&place, "copied").await.unwrap_err().to_string();
    assert!(
        refused.contains("has gone on without this data directory"),
        "{refused}"
    );
    first.shutdown(DEADLINE).await.unwrap();
    let again = coordinator(&place, "first").await.unwrap();
    assert_eq!(client(&again).await.get(&job.id).await.unwrap().id, job.id);
    again.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_that_was_emptied_is_refused_rather_than_begun_anew() {
    let place = Place::new();
    let handle = place.coordinator().await;
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    while handle.tables().reflects() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    handle.shutdown(DEADLINE).await.unwrap();
    let options = place.options();
    std::fs::remove_dir_all(options.data_dir.join("journal")).unwrap();

    let refused = Coordinator::start_with(options.clone(), Arc::new(Story)).await;
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("holds nothing, but") && refused.contains("tables"),
        "{refused}"
    );
    std::fs::remove_dir_all(&options.data_dir).unwrap();
    let anew = Coordinator::start_with(options, Arc::new(Story)).await.unwrap();
    anew.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn an_address_of_another_kind_is_refused_before_anything_is_sent() {
    for wrong in [
        "https://127.0.0.1:7474",
        "ftp://127.0.0.1",
        "http://127.0.0.1:7474/espalier",
    ] {
        let refused = Client::connect(wrong, DEADLINE).await.unwrap_err();
        assert!(matches!(refused, Error::Endpoint { .. }), "{wrong}: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_listens_there_and_is_no_coordinator_is_none_that_answers() {
    for says in [
        "",
        "220 mail.example ESMTP\r\n",
        "HTTP/1.1 400 Bad Request\r\n\r\n",
    ] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let other = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(says.as_bytes()).await;
            }
        });
        let asked = match Client::connect(&endpoint, DEADLINE).await {
            Ok(mut client) => client.list(1, "", &[]).await.map(drop),
            Err(error) => Err(error),
        };
        let error = asked.unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{says:?}: {error:?}");
        other.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repaired_disk_that_lost_what_the_store_has_is_refused_and_an_empty_one_has_it() {
    let place = Place::new();
    let job = with_a_past(&place).await;
    let data_dir = place.directory.path().join("first");
    let segment = data_dir.join("journal/journal-00000000000000000001.log");
    let mut bytes = std::fs::read(&segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&segment, bytes).unwrap();
    let damaged = coordinator(&place, "first").await.unwrap_err().to_string();
    assert!(damaged.contains("--store"), "{damaged}");
    let report = doctor::repair(&data_dir).unwrap();
    assert!(report.starts);
    let advice = report
        .findings
        .iter()
        .find(|finding| finding.problem.contains("the store"));
    assert!(advice.is_some(), "{report:?}");

    let refused = coordinator(&place, "first").await.unwrap_err().to_string();
    let store = place.directory.path().join("store");
    for part in [
        "going on from here would lose",
        "empty one",
        store.to_str().unwrap(),
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    let again = coordinator(&place, "empty").await.unwrap();
    let known = client(&again).await.get(&job).await.unwrap();
    assert_eq!(known.stages.iter().map(|stage| stage.tasks_done).sum::<u32>(), 1);
    again.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_leaves_a_shipped_journal_that_was_emptied_to_a_start_with_its_store() {
    let place = Place::new();
    let job = with_a_past(&place).await;
    let data_dir = place.directory.path().join("first");
    std::fs::write(data_dir.join("journal/journal-00000000000000000001.log"), "").unwrap();
    std::fs::create_dir_all(data_dir.join("logs/job-1")).unwrap();
    std::fs::write(data_dir.join("logs/job-1/attempt-1.log"), "a line\n").unwrap();
    let report = doctor::repair(&data_dir).unwrap();
    assert!(report.mended.is_empty(), "{report:?}");
    let said = |finding: &doctor::Finding| finding.problem.contains("a start with the --store");
    assert!(report.findings.iter().any(said), "{report:?}");

    // So that the next start may take another store, or none.
    std::fs::remove_file(data_dir.join("store-id")).unwrap();
    let mut options = place.options();
    options.data_dir.clone_from(&data_dir);
    let alone = Coordinator::start_with(options, Arc::new(Story)).await;
    let refused = alone.unwrap_err();
    assert!(
        matches!(refused, Error::Conflict(_)),
        "a new history begins: {refused}"
    );
    let again = coordinator(&place, "first").await.unwrap();
    assert_eq!(client(&again).await.get(&job).await.unwrap().id, job);
    again.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_speaks_of_a_higher_term_does_not_stop_a_coordinator_that_nobody_has_succeeded() {
    let place = Place::new();
    let only = coordinator(&place, "only").await.unwrap();
    client(&only).await.submit(place.spec(), "").await.unwrap();
    let mut stranger = hello("stranger", 1, Vec::new());
    stranger.highest_term = 9;
    for _ in 0..3 {
        let refused = FakeWorker::say_hello(&only, stranger.clone())
            .await
            .err()
            .unwrap();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut worker = FakeWorker::connect(&only, "a", 1, Vec::new()).await;
    assert_eq!(worker.welcome.term, 1);
    run_one(&mut worker).await;
    only.shutdown(DEADLINE).await.unwrap();
}
