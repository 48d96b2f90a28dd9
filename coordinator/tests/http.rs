//! What a browser, a probe and a scraper see on the port that gRPC has too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use espalier_coordinator::{Coordinator, CoordinatorOptions};
use espalier_proto::task::FailureKind;
use espalier_proto::v1::tasks_client::TasksClient;
use espalier_proto::v1::worker_message::Message;
use espalier_proto::v1::{Log, TaskLogsRequest};

use common::{Crowd, DEADLINE, FakeWorker, Place, acknowledged, client, end_of, free_address, run_one};

/// The status and body of a page.
async fn page(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    tokio::time::timeout(DEADLINE, read)
        .await
        .expect("no answer")
        .unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

#[tokio::test]
async fn probes_and_grpc_share_a_port() {
    let place = Place::new();
    let coordinator = place.coordinator().await;
    let address = coordinator.address();
    assert_eq!(page(address, "/healthz").await.0, 200);
    assert_eq!(
        page(address, "/readyz").await,
        (200, r#"{"status":"ok"}"#.to_owned())
    );
    assert_eq!(page(address, "/nothing").await.0, 404);
    let (jobs, _) = client(&coordinator).await.list(10, "", &[]).await.unwrap();
    assert!(jobs.is_empty());
    coordinator.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_answered_while_the_journal_is_replayed() {
    let place = Place::new();
    let address = free_address();
    let mut options = place.options();
    options.listen = address;
    // A journal that cannot be read to its end before somebody writes to it.
    let journal = options.data_dir.join("journal");
    std::fs::create_dir_all(&journal).unwrap();
    let segment = journal.join(format!("journal-{:020}.log", 1));
    let made = std::process::Command::new("mkfifo")
        .arg(&segment)
        .status()
        .unwrap();
    assert!(made.success());
    let starting = tokio::spawn(Coordinator::start_with(options, Arc::new(Crowd(1))));
    let began = Instant::now();
    while TcpStream::connect(address).await.is_err() {
        assert!(
            began.elapsed() < DEADLINE,
            "nobody listens while the journal is read"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(page(address, "/healthz").await.0, 200);
    let (status, why) = page(address, "/readyz").await;
    assert!(
        status == 503 && why.contains("the journal is being replayed"),
        "{status}: {why}"
    );
    assert_eq!(page(address, "/").await.0, 200);
    assert!(!starting.is_finished());
    let end = move || {
        let writer = std::fs::OpenOptions::new().write(true).open(&segment).unwrap();
        std::fs::remove_file(&segment).unwrap();
        std::fs::write(&segment, "").unwrap();
        drop(writer);
    };
    tokio::task::spawn_blocking(end).await.unwrap();
    let started = tokio::time::timeout(DEADLINE, starting).await.unwrap().unwrap();
    let coordinator = started.unwrap();
    assert_eq!(page(address, "/readyz").await.0, 200);
    coordinator.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn a_client_that_says_nothing_does_not_hold_up_the_end() {
    let place = Place::new();
    let coordinator = place.coordinator().await;
    let silent = TcpStream::connect(coordinator.address()).await.unwrap();
    let mut halting = TcpStream::connect(coordinator.address()).await.unwrap();
    halting
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: x")
        .await
        .unwrap();
    let mut half_open = TcpStream::connect(coordinator.address()).await.unwrap();
    half_open
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    // Whoever came before this one is connected.
    assert_eq!(page(coordinator.address(), "/healthz").await.0, 200);
    coordinator.shutdown(DEADLINE).await.unwrap();
    drop((silent, halting, half_open));
}

/// The text between the quotes of every label.
fn label_values(text: &str) -> Vec<&str> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let labels = samples.filter_map(|line| line.split_once('{')?.1.split_once('}'));
    labels
        .flat_map(|(labels, _)| labels.split('"').skip(1).step_by(2))
        .collect()
}

#[tokio::test]
async fn a_job_of_ten_thousand_tasks_answers_small() {
    let place = Place::new();
    let mut options = CoordinatorOptions::new(place.directory.path().join("data"));
    options.listen = "127.0.0.1:0".parse().unwrap();
    let coordinator = Coordinator::start_with(options, Arc::new(Crowd(10_000)))
        .await
        .unwrap();
    let address = coordinator.address();
    let (job, _) = client(&coordinator).await.submit(place.spec(), "").await.unwrap();
    let path = format!("/api/v1/jobs/{}", job.id);
    let began = Instant::now();
    while !page(address, &path).await.1.contains(r#""tasks":10000"#) {
        assert!(began.elapsed() < DEADLINE, "the stage is not planned");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for path in ["/".to_owned(), path.clone(), "/metrics".to_owned()] {
        let (status, body) = page(address, &path).await;
        assert!(
            status == 200 && body.len() < 64 << 10,
            "{path}: {status}, {} bytes",
            body.len()
        );
    }
    let (mut seen, mut token) = (0, String::new());
    loop {
        let (_, body) = page(
            address,
            &format!("{path}/tasks?page_size=1000&page_token={token}"),
        )
        .await;
        assert!(body.len() < 512 << 10, "{} bytes", body.len());
        let tasks: serde_json::Value = serde_json::from_str(&body).unwrap();
        seen += tasks["tasks"].as_array().unwrap().len();
        token = tasks["next_page_token"].as_str().unwrap().to_owned();
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, 10_000);
    let (_, none) = page(address, &format!("{path}/tasks?state=failed")).await;
    assert_eq!(none, r#"{"next_page_token":"","tasks":[]}"#);
    coordinator.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn metrics_never_carry_ids() {
    let place = Place::new();
    let coordinator = place.coordinator().await;
    let (job, _) = client(&coordinator).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&coordinator, "node-17", 1, Vec::new()).await;
    for _ in 0..3 {
        run_one(&mut worker).await;
    }
    end_of(&coordinator, &job.id).await;
    let (status, text) = page(coordinator.address(), "/metrics").await;
    assert_eq!(status, 200);
    assert!(
        text.contains(r#"espalier_tasks_total{state="completed",kind="score"} 2"#),
        "{text}"
    );
    assert!(text.contains(r#"espalier_task_duration_seconds_count{kind="sort"} 1"#));
    assert!(text.contains("espalier_journal_fsync_seconds_count"));
    for value in label_values(&text) {
        let is_bound = value.parse::<f64>().is_ok() || value == "+Inf";
        let is_word = value
            .chars()
            .all(|letter| letter.is_ascii_lowercase() || letter == '_');
        assert!(
            is_bound || is_word || value == env!("CARGO_PKG_VERSION"),
            "label `{value}`"
        );
    }
    assert!(!text.contains("node-17") && !text.contains(&job.id));
    let (_, html) = page(coordinator.address(), "/").await;
    assert!(html.contains("node-17") && html.contains(&job.id));
    coordinator.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn logs_outlive_their_worker() {
    let place = Place::new();
    let coordinator = place.coordinator().await;
    client(&coordinator).await.submit(place.spec(), "").await.unwrap();
    let mut worker = FakeWorker::connect(&coordinator, "doomed", 1, Vec::new()).await;
    let assign = worker.assignment().await;
    let trace: Vec<&str> = assign.traceparent.split('-').collect();
    assert_eq!(
        trace.iter().map(|part| part.len()).collect::<Vec<_>>(),
        [2, 32, 16, 2]
    );
    let lines = vec![
        "step 1".to_owned(),
        "cuda error: \u{1b}[31mout of memory".to_owned(),
    ];
    let log = Log {
        lease: assign.lease,
        lines,
        ..Log::default()
    };
    worker.say(Message::Log(log)).await;
    let lease = assign.lease.unwrap();
    worker.fail(lease, FailureKind::Crashed, "killed").await;
    assert_eq!(acknowledged(&mut worker).await, lease);
    drop(worker);
    coordinator.shutdown(DEADLINE).await.unwrap();

    let coordinator = place.coordinator().await;
    let mut tasks = TasksClient::new(
        tonic::transport::Channel::from_shared(coordinator.endpoint())
            .unwrap()
            .connect()
            .await
            .unwrap(),
    );
    let request = TaskLogsRequest {
        task_id: assign.task_id,
        attempt: lease.attempt,
        ..TaskLogsRequest::default()
    };
    let mut stream = tasks.logs(request).await.unwrap().into_inner();
    let message = stream.message().await.unwrap().expect("a log");
    assert_eq!(message.attempt, lease.attempt);
    assert_eq!(message.lines.len(), 2);
    assert!(message.lines[0].ends_with("Z step 1"), "{:?}", message.lines);
    assert!(message.lines[1].ends_with(r"cuda error: \u{1b}[31mout of memory"));
    assert!(!message.lagged && stream.message().await.unwrap().is_none());
    coordinator.shutdown(DEADLINE).await.unwrap();
}
