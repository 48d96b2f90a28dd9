//! What is left of jobs that ended long ago, over real gRPC on loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use common::{DEADLINE, FakeWorker, Place, acknowledged, client, end_of, run_one};
use espalier_coordinator::{Handle, doctor};
use espalier_proto::v1::submit_request::Spec;
use espalier_proto::v1::tasks_client::TasksClient;
use espalier_proto::v1::worker_message::Message;
use espalier_proto::v1::{Job, JobEvent, JobState, Log, TaskDetail, TaskLogsRequest};

/// One more than may stay in the state.
const JOBS: usize = 17;

/// The place's spec with an output of its own.
fn spec(place: &Place, number: usize) -> Spec {
    let Spec::Yaml(text) = place.spec() else {
        panic!("the spec is not YAML")
    };
    Spec::Yaml(text.replace("/out\n", &format!("/out-{number}\n")))
}

async fn story(handle: &Handle, job: &str) -> Vec<JobEvent> {
    let mut following = client(handle).await.events(job, false).await.unwrap();
    let mut events = Vec::new();
    while let Some(event) = following.next().await.unwrap() {
        events.push(event);
    }
    events
}

async fn seen(handle: &Handle, job: &str) -> (Job, Vec<TaskDetail>, TaskDetail) {
    let mut client = client(handle).await;
    let mut whole = client.get(job).await.unwrap();
    whole.revision = 0;
    let tasks = client.tasks(job, &[], "").await.unwrap();
    let task = client.task(tasks[0].id).await.unwrap();
    (whole, tasks, task)
}

/// Whether a segment of the journal has this text in it, read while the coordinator writes.
fn journal_says(place: &Place, text: &str) -> bool {
    let journal = place.directory.path().join("data/journal");
    let segments = std::fs::read_dir(journal)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut segments = segments.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
    segments.any(|segment| {
        let bytes = std::fs::read(segment).unwrap();
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_looks_the_same_after_it_was_archived_and_the_coordinator_restarted() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let mut before = None;
    for number in 0..JOBS {
        let submitted = client(&handle).await.submit(spec(&place, number), "").await;
        let job = submitted.unwrap().0.id;
        let partial = place.directory.path().join(format!("out-{number}.partial"));
        std::fs::create_dir_all(partial.join("checkpoint")).unwrap();
        for _ in 0..3 {
            run_one(&mut worker).await;
        }
        assert_eq!(end_of(&handle, &job).await.state(), JobState::Succeeded);
        if before.is_none() {
            before = Some((seen(&handle, &job).await, story(&handle, &job).await));
        }
    }
    let ((job, tasks, task), events_before) = before.unwrap();
    let archive = place.directory.path().join("data/archive/job-1.archive");
    let began = Instant::now();
    while !archive.is_file() {
        assert!(began.elapsed() < DEADLINE, "job-1 was not archived");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let began = Instant::now();
    while !journal_says(&place, "\"job_archived\"") {
        assert!(began.elapsed() < DEADLINE, "the journal does not say so");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(worker);
    handle.shutdown(DEADLINE).await.unwrap();
    let mut events = Vec::new();
    doctor::export(&place.directory.path().join("data"), &mut events).unwrap();
    assert!(String::from_utf8(events).unwrap().contains("job_archived"));
    let handle = place.coordinator().await;
    let began = Instant::now();
    while handle.tables().reflects() == 0 {
        assert!(began.elapsed() < DEADLINE, "the tables do not open");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (job_after, tasks_after, task_after) = seen(&handle, "job-1").await;
    assert_eq!(job_after, job);
    assert_eq!(tasks_after, tasks);
    assert_eq!(task_after.output_json, task.output_json);
    assert_eq!(task_after.spec_json, task.spec_json);
    let events_after = story(&handle, "job-1").await;
    assert_eq!(events_after, events_before);
    let untimed = events_after.iter().filter(|event| event.unix_ms == 0).count();
    assert_eq!((events_after.len(), untimed), (11, 0), "{events_after:#?}");
    handle.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archive_of_a_job_that_the_journal_has_lost_is_kept_from_the_one_that_gets_its_number() {
    let place = Place::new();
    place.coordinator().await.shutdown(DEADLINE).await.unwrap();
    let archives = place.directory.path().join("data/archive");
    std::fs::create_dir_all(&archives).unwrap();
    std::fs::write(archives.join("job-1.archive"), "what is left of it").unwrap();
    place.coordinator().await.shutdown(DEADLINE).await.unwrap();
    let names: Vec<String> = std::fs::read_dir(&archives)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(names[0].starts_with("job-1.archive.unknown-"), "{names:?}");
    assert_eq!(
        std::fs::read_to_string(archives.join(&names[0])).unwrap(),
        "what is left of it"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_and_logs_of_a_task_done_long_ago_are_there_while_its_job_goes_on() {
    /// So many that the first is no longer among what the loop remembers of the job.
    const TASKS: usize = 600;
    let place = Place::new();
    let handle = place.coordinator_of_crowds(TASKS).await;
    let mut client = client(&handle).await;
    client.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&handle, "a", 1, Vec::new()).await;
    let first = worker.assignment().await;
    let log = Log {
        lease: first.lease,
        lines: vec!["step 1".to_owned()],
        ..Log::default()
    };
    worker.say(Message::Log(log)).await;
    worker.complete(first.lease.unwrap()).await;
    acknowledged(&mut worker).await;
    for _ in 2..TASKS {
        run_one(&mut worker).await;
    }
    let began = Instant::now();
    let attempt = loop {
        let task = client.task(first.task_id).await.unwrap();
        let attempt = task
            .attempts
            .first()
            .expect("it is done, and by no attempt")
            .clone();
        if !attempt.device.is_empty() {
            break attempt;
        }
        assert!(began.elapsed() < DEADLINE, "the tables are not asked");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(
        (
            attempt.outcome.as_str(),
            attempt.worker.as_str(),
            attempt.device.as_str()
        ),
        ("completed", "a", "cpu")
    );
    let channel = tonic::transport::Channel::from_shared(handle.endpoint()).unwrap();
    let mut tasks = TasksClient::new(channel.connect().await.unwrap());
    let asked = TaskLogsRequest {
        task_id: first.task_id,
        follow: true,
        ..TaskLogsRequest::default()
    };
    let mut log = tasks.logs(asked).await.unwrap().into_inner();
    let lines = log.message().await.unwrap().expect("a log").lines;
    assert!(
        lines.first().is_some_and(|line| line.ends_with("step 1")),
        "{lines:?}"
    );
    assert!(
        log.message().await.unwrap().is_none(),
        "it goes on though its attempt has ended"
    );
    handle.shutdown(DEADLINE).await.unwrap();
}
