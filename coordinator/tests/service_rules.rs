//! The protocol's rules and its limits: terms, versions, followers, large jobs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::{
    DEADLINE, FakeWorker, Place, Story, acknowledged, client, end_of, free_address, hello, run_one,
};
use espalier_coordinator::{Coordinator, CoordinatorOptions, Error, Handle};
use espalier_proto::v1::cluster_client::ClusterClient;
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::tasks_client::TasksClient;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{self, JobState, TaskState, WorkerState};
use tonic::Code;
use tonic::transport::Channel;

async fn channel(handle: &Handle) -> Channel {
    let endpoint = Channel::from_shared(handle.endpoint()).unwrap();
    endpoint.connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_the_version_before_are_served() {
    let place = Place::new();
    let handle = place.coordinator().await;
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut before = hello("before", 1, Vec::new());
    (before.protocol_version, before.oldest_protocol_version) = (1, 0);
    let mut before = FakeWorker::say_hello(&handle, before).await.unwrap();
    assert_eq!(before.welcome.protocol_version, 1);
    let lease = before.assignment().await.lease.unwrap();
    let restart = v1::RestartWorkerRequest {
        name: "before".to_owned(),
        reason: String::new(),
    };
    let mut cluster = ClusterClient::new(channel(&handle).await);
    let refused = cluster.restart_worker(restart).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("version 1, which has no restart"),
        "{refused}"
    );
    before.complete(lease).await;
    let acknowledged = acknowledged(&mut before).await;
    assert_eq!(
        acknowledged, lease,
        "it was sent a message its version does not have"
    );

    let mut both = hello("both", 1, Vec::new());
    (both.protocol_version, both.oldest_protocol_version) = (3, 2);
    let both = FakeWorker::say_hello(&handle, both).await.unwrap();
    assert_eq!(both.welcome.protocol_version, 2);
    let mut after = hello("after", 1, Vec::new());
    (after.protocol_version, after.oldest_protocol_version) = (4, 3);
    let refused = FakeWorker::say_hello(&handle, after).await.err().unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("only 1 to 2"), "{}", refused.message());
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_term_is_refused() {
    let place = Place::new();
    place.coordinator().await.shutdown(DEADLINE).await.unwrap();
    let handle = place.coordinator().await;
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    assert_eq!(worker.welcome.term, 2);
    let lease = worker.assignment().await.lease.unwrap();
    for term in [1, 3] {
        worker.complete(v1::Lease { term, ..lease }).await;
        let FromCoordinator::Superseded(refused) = worker.next().await else {
            panic!("a lease of term {term} was taken")
        };
        assert_eq!(refused.lease.unwrap().term, term);
    }
    worker.welcome.term = 1;
    let refused = worker.heartbeat().await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    worker.complete(lease).await;
    assert_eq!(acknowledged(&mut worker).await, lease);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_whose_journal_lost_its_last_terms_begins_one_above_them_and_goes_on() {
    let place = Place::new();
    let handle = place.coordinator().await;
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut other = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let running = other.assignment().await.lease.unwrap();
    let mut hello = hello("b", 1, Vec::new());
    hello.highest_term = 7;
    let worker = FakeWorker::say_hello(&handle, hello).await.unwrap();
    assert_eq!(worker.welcome.term, 8);
    // Who was welcomed before connects again, and goes on with what it had.
    assert!(other.heartbeat().await.is_err());
    let mut other = FakeWorker::connect(&handle, "a", 1, vec![running]).await;
    assert_eq!(other.welcome.term, 8);
    other.complete(running).await;
    assert_eq!(acknowledged(&mut other).await, running);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_worker_stops_a_coordinator_or_uses_its_terms_up_by_what_it_says_of_terms() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut stranger = hello("stranger", 1, Vec::new());
    stranger.highest_term = u64::MAX;
    let refused = FakeWorker::say_hello(&handle, stranger).await.err().unwrap();
    assert!(refused.message().contains("another cluster"), "{refused}");
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let (id, term) = (worker.welcome.worker_id, worker.welcome.term);
    (worker.welcome.worker_id, worker.welcome.term) = (99, 5);
    assert_eq!(
        worker.heartbeat().await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    worker.welcome.worker_id = id;
    assert_eq!(
        worker.heartbeat().await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    worker.welcome.term = term;
    assert_eq!(worker.heartbeat().await.unwrap().term, 1);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_clock_once_ran_ahead_is_told_the_epoch_to_begin_above_unless_it_has_a_living_rival() {
    let known = espalier_proto::KNOWN_EPOCH_METADATA;
    let place = Place::new();
    let handle = place.coordinator().await;
    let ahead = FakeWorker::connect(&handle, "a", 9_000, Vec::new()).await;
    let refused = FakeWorker::try_connect(&handle, "a", 7, Vec::new()).await;
    let refused = refused.err().unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.metadata().get(known).is_none(), "its rival lives");
    let stale = refused
        .metadata()
        .get(espalier_proto::STALE_EPOCH_METADATA)
        .unwrap();
    assert_eq!(stale, "7", "it is told that its epoch is why");
    drop(ahead);
    let told = async {
        loop {
            let refused = FakeWorker::try_connect(&handle, "a", 7, Vec::new()).await;
            if let Some(epoch) = refused.err().unwrap().metadata().get(known) {
                return epoch.to_str().unwrap().parse::<u64>().unwrap();
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let epoch = tokio::time::timeout(DEADLINE, told).await.unwrap();
    assert_eq!(epoch, 9_000);
    FakeWorker::connect(&handle, "a", epoch + 1, Vec::new()).await;
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dashboard_of_ten_thousand_tasks_answers_quickly() {
    const TASKS: usize = 10_000;
    let place = Place::new();
    let handle = place.coordinator_of_crowds(TASKS).await;
    let mut clients = client(&handle).await;
    let (job, _) = clients.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    run_one(&mut worker).await;
    let mut following = clients.watch(&job.id, 0).await.unwrap();
    let snapshot = following.next().await.unwrap().unwrap();
    let stage = snapshot.stages.first().unwrap();
    assert_eq!(stage.tasks, 10_000);
    let shown = prost::Message::encoded_len(&snapshot);
    assert!(shown < 8 << 10, "a snapshot takes {shown} bytes");
    assert!(
        snapshot.spec_json.contains("parent"),
        "the first snapshot is whole"
    );

    let mut tasks = TasksClient::new(channel(&handle).await);
    let mut list = v1::ListTasksRequest {
        job_id: job.id.clone(),
        page_size: 1000,
        ..v1::ListTasksRequest::default()
    };
    let mut seen = BTreeSet::new();
    loop {
        let page = tasks.list(list.clone()).await.unwrap().into_inner();
        assert!(page.tasks.len() <= 1000);
        seen.extend(page.tasks.iter().map(|task| task.id));
        if page.next_page_token.is_empty() {
            break;
        }
        list.page_token = page.next_page_token;
    }
    assert_eq!(seen.len(), TASKS, "every task once");
    list.page_token.clear();
    list.states = vec![TaskState::Done.into()];
    let done = tasks.list(list).await.unwrap().into_inner().tasks;
    assert_eq!(done.len(), 1);
    let request = v1::GetTaskRequest {
        task_id: done.first().unwrap().id,
    };
    let whole = tasks.get(request).await.unwrap().into_inner().task.unwrap();
    let attempt = whole.attempts.first().unwrap();
    assert_eq!(
        (attempt.outcome.as_str(), attempt.worker.as_str()),
        ("completed", "a")
    );
    assert!(whole.output_json.contains("permutation"));
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_beyond_the_limit_are_told_so() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut client = client(&handle).await;
    let (job, _) = client.submit(place.spec(), "").await.unwrap();
    let mut followers = Vec::new();
    for _ in 0..64 {
        followers.push(client.watch(&job.id, 0).await.unwrap());
    }
    let one_more = client.watch(&job.id, 0).await;
    assert!(matches!(one_more, Err(Error::Exhausted(why)) if why.contains("followed by 64 clients")));
    drop(followers);
    while client.watch(&job.id, 0).await.is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_cannot_be_decoded_fails_by_itself() {
    let place = Place::new();
    let handle = place.coordinator_of_crowds(2).await;
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let first = worker.assignment().await;
    let garbled = FromWorker::Completed(v1::Completed {
        lease: first.lease,
        output_json: bytes::Bytes::from_static(b"\xff\x00 no output"),
    });
    worker.say(garbled).await;
    assert_eq!(acknowledged(&mut worker).await, first.lease.unwrap());
    std::fs::create_dir_all(place.partial()).unwrap();
    let second = worker.assignment().await;
    assert_ne!(
        second.task_id, first.task_id,
        "the other task goes first: this one rests"
    );
    worker.complete(second.lease.unwrap()).await;
    acknowledged(&mut worker).await;
    let again = worker.assignment().await;
    assert_eq!(again.task_id, first.task_id);
    worker.complete(again.lease.unwrap()).await;
    acknowledged(&mut worker).await;
    assert_eq!(end_of(&handle, &job.id).await.state(), JobState::Succeeded);
    handle.shutdown(DEADLINE).await.unwrap();
}

/// Those of a coordinator that is found again where it was.
fn options_to_come_back_with(place: &Place) -> CoordinatorOptions {
    let mut options = place.options();
    options.listen = free_address();
    options
}

async fn start(options: &CoordinatorOptions) -> Handle {
    let started = Coordinator::start_with(options.clone(), Arc::new(Story)).await;
    started.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_watch_survives_a_restart() {
    let place = Place::new();
    let options = options_to_come_back_with(&place);
    let handle = start(&options).await;
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut following = client(&handle).await.watch(&job.id, 0).await.unwrap();
    let before = following.next().await.unwrap().unwrap();
    handle.shutdown(DEADLINE).await.unwrap();
    let handle = start(&options).await;
    client(&handle).await.cancel(&job.id, "enough").await.unwrap();
    let mut last = before.clone();
    while let Some(next) = following.next().await.unwrap() {
        assert!(next.revision > before.revision, "revisions never fall");
        last = next;
    }
    assert_eq!(last.state(), JobState::Cancelled);
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followed_events_go_on_after_a_restart_and_none_comes_twice() {
    let place = Place::new();
    let options = options_to_come_back_with(&place);
    let handle = start(&options).await;
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut events = client(&handle).await.events(&job.id, true).await.unwrap();
    let mut kinds = Vec::new();
    while kinds.last().map(String::as_str) != Some("stages_planned") {
        kinds.push(events.next().await.unwrap().expect("the plan comes").kind);
    }
    client(&handle).await.pause(&job.id, "lunch").await.unwrap();
    kinds.push(events.next().await.unwrap().expect("the pause comes").kind);
    assert_eq!(kinds, ["job_submitted", "stages_planned", "job_paused"]);
    handle.shutdown(DEADLINE).await.unwrap();
    let handle = start(&options).await;
    let before = kinds.len();
    client(&handle).await.cancel(&job.id, "enough").await.unwrap();
    let rest = async {
        while let Some(event) = events.next().await.unwrap() {
            assert!(!event.lagged, "{event:?}");
            kinds.push(event.kind);
        }
    };
    tokio::time::timeout(DEADLINE, rest).await.expect("no end of it");
    assert_eq!(kinds[before..], ["job_cancelled"], "{kinds:?}");
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followed_events_that_a_snapshot_has_swallowed_are_not_said_to_be_left_out() {
    let place = Place::new();
    let mut options = options_to_come_back_with(&place);
    options.segment_bytes = 1;
    let handle = start(&options).await;
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    client(&handle).await.pause(&job.id, "lunch").await.unwrap();
    let mut events = client(&handle).await.events(&job.id, true).await.unwrap();
    let (mut kinds, mut told) = (BTreeSet::new(), 0);
    while !["stages_planned", "job_paused"]
        .iter()
        .all(|kind| kinds.contains(*kind))
    {
        let event = events.next().await.unwrap().expect("both come");
        told = event.number >> 20;
        kinds.insert(event.kind);
    }
    let journal = place.options().data_dir.join("journal");
    let newest_snapshot = || {
        let names = std::fs::read_dir(&journal).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let frame = |name: String| {
            let digits = name.strip_prefix("snapshot-")?.strip_suffix(".snap")?;
            digits.parse::<u64>().ok()
        };
        names.filter_map(frame).max()
    };
    let mut workers = Vec::new();
    while newest_snapshot() < Some(told) {
        assert!(workers.len() < 200, "no snapshot is taken");
        // It is written down, and no event of the job.
        let name = format!("worker-{}", workers.len());
        workers.push(FakeWorker::connect(&handle, &name, 1, Vec::new()).await);
    }
    handle.shutdown(DEADLINE).await.unwrap();
    let handle = start(&options).await;
    client(&handle).await.cancel(&job.id, "enough").await.unwrap();
    let next = tokio::time::timeout(DEADLINE, events.next());
    let event = next.await.expect("no end of it").unwrap().unwrap();
    assert_eq!((event.kind.as_str(), event.lagged), ("job_cancelled", false));
    let mut anew = client(&handle).await.events(&job.id, false).await.unwrap();
    let first = anew.next().await.unwrap().unwrap();
    assert!(
        first.lagged,
        "what lies in the snapshot is missing, unsaid: {first:?}"
    );
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_job_starts_nothing_until_it_is_resumed_and_its_events_say_so() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut jobs = v1::jobs_client::JobsClient::new(channel(&handle).await);
    let (job, _) = client(&handle).await.submit(place.spec(), "").await.unwrap();
    let pause = v1::PauseRequest {
        job_id: job.id.clone(),
        reason: "lunch".to_owned(),
    };
    let paused = jobs.pause(pause).await.unwrap().into_inner().job.unwrap();
    assert_eq!(paused.state(), JobState::Paused);
    assert!(paused.message.contains("lunch"), "{}", paused.message);
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let get = v1::GetWorkerRequest { name: "a".to_owned() };
    let mut cluster = ClusterClient::new(channel(&handle).await);
    let idle = cluster
        .get_worker(get)
        .await
        .unwrap()
        .into_inner()
        .worker
        .unwrap();
    assert_eq!(idle.state(), WorkerState::Ready);
    assert!(idle.devices.iter().all(|device| device.attempt == 0));
    let resume = v1::ResumeRequest {
        job_id: job.id.clone(),
    };
    jobs.resume(resume).await.unwrap();
    run_one(&mut worker).await;
    let asked = v1::EventsRequest {
        job_id: job.id.clone(),
        follow: false,
        after: 0,
    };
    let mut events = jobs.events(asked).await.unwrap().into_inner();
    let mut kinds = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        assert!(!event.lagged);
        kinds.push(event.kind);
    }
    let story = [
        "job_submitted",
        "job_paused",
        "job_resumed",
        "attempt_started",
        "attempt_completed",
    ];
    let mut told = kinds.iter();
    for word in story {
        assert!(told.any(|kind| kind == word), "no {word} in its place: {kinds:?}");
    }
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cordoned_worker_gets_nothing_and_one_that_drains_is_told_again() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut cluster = ClusterClient::new(channel(&handle).await);
    let cordoned = FakeWorker::connect(&handle, "cordoned", 1, Vec::new()).await;
    let cordon = v1::CordonRequest {
        name: "cordoned".to_owned(),
        reason: "smells of smoke".to_owned(),
    };
    let shown = cluster.cordon(cordon).await.unwrap().into_inner().worker.unwrap();
    assert_eq!(
        (shown.state(), shown.message.as_str()),
        (WorkerState::Cordoned, "smells of smoke")
    );
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    let mut other = FakeWorker::connect(&handle, "other", 1, Vec::new()).await;
    let lease = other.assignment().await.lease.unwrap();
    let drain = v1::DrainWorkerRequest {
        name: "other".to_owned(),
        reason: String::new(),
    };
    cluster.drain_worker(drain).await.unwrap();
    assert!(matches!(other.next().await, FromCoordinator::Drain(_)));
    drop(other);
    let mut other = FakeWorker::connect(&handle, "other", 1, vec![lease]).await;
    assert!(matches!(other.next().await, FromCoordinator::Drain(drain) if drain.term == 1));
    let nobody = v1::UncordonRequest {
        name: "nobody".to_owned(),
    };
    assert_eq!(cluster.uncordon(nobody).await.unwrap_err().code(), Code::NotFound);
    drop(cordoned);
    handle.shutdown(DEADLINE).await.unwrap();
}
