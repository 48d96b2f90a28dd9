#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_proto::v1::{
    Device, GetRequest, GetResponse, GetTaskRequest, GetTaskResponse, Job, JobState, ListRequest,
    ListResponse, ListTasksRequest, ListTasksResponse, ListWorkersResponse, Stage, StageState, Task,
    TaskDetail, TaskState, Worker, WorkerDevice, WorkerState,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::*;

/// A job of ten thousand tasks on 128 workers of eight devices.
struct Large;

const TASKS: u32 = 10_000;

fn large_job() -> Job {
    let task = |id| Task {
        id,
        name: format!("block {id}"),
        worker: "node-007".to_owned(),
        device: "cuda-3".to_owned(),
        attempt: id,
        done: 3,
        total: 10,
        unit: "variants".to_owned(),
        ..Task::default()
    };
    let stage = |name: &str, state: StageState, tasks, tasks_done| Stage {
        name: name.to_owned(),
        kind: name.to_owned(),
        state: state.into(),
        tasks,
        tasks_done,
        elapsed_ms: 61_000,
        ..Stage::default()
    };
    let mut score = stage("score", StageState::Running, TASKS, 1234);
    score.active = (1..=32).map(task).collect();
    Job {
        id: "job-1".to_owned(),
        state: JobState::Running.into(),
        parent: "<script>alert(1)</script>".to_owned(),
        stages: vec![stage("sort", StageState::Done, 1, 1), score],
        spec_json: "{\"parent\":\"x\"}".to_owned(),
        ..Job::default()
    }
}

#[tonic::async_trait]
impl Reads for Large {
    async fn jobs(&self, _: ListRequest) -> Result<ListResponse, Status> {
        let jobs = vec![large_job()];
        Ok(ListResponse {
            jobs,
            next_page_token: String::new(),
        })
    }

    async fn job(&self, request: GetRequest) -> Result<GetResponse, Status> {
        match request.job_id.as_str() {
            "job-1" => Ok(GetResponse {
                job: Some(large_job()),
            }),
            other => Err(Status::not_found(format!("there is no {other}"))),
        }
    }

    async fn tasks(&self, request: ListTasksRequest) -> Result<ListTasksResponse, Status> {
        let first: u64 = match request.page_token.as_str() {
            "" => 1,
            token => token.parse().unwrap(),
        };
        let end = first + u64::from(request.page_size.clamp(1, 1000));
        let task = |id| TaskDetail {
            id,
            job_id: "job-1".to_owned(),
            stage: "score".to_owned(),
            state: request
                .states
                .first()
                .copied()
                .unwrap_or_else(|| TaskState::Waiting.into()),
            ..TaskDetail::default()
        };
        Ok(ListTasksResponse {
            tasks: (first..end).map(task).collect(),
            next_page_token: end.to_string(),
        })
    }

    async fn task(&self, request: GetTaskRequest) -> Result<GetTaskResponse, Status> {
        let task = TaskDetail {
            id: request.task_id,
            spec_json: "{}".to_owned(),
            ..TaskDetail::default()
        };
        Ok(GetTaskResponse { task: Some(task) })
    }

    async fn workers(&self) -> Result<ListWorkersResponse, Status> {
        let device = |index| WorkerDevice {
            device: Some(Device {
                id: format!("cuda-{index}"),
                ..Device::default()
            }),
            attempt: index,
            job_id: "job-1".to_owned(),
            stage: "score".to_owned(),
            ..WorkerDevice::default()
        };
        let worker = |index| Worker {
            name: format!("node-{index:03}"),
            state: WorkerState::Ready.into(),
            devices: (0..8).map(device).collect(),
            ..Worker::default()
        };
        Ok(ListWorkersResponse {
            workers: (0..128).map(worker).collect(),
        })
    }
}

/// Serves the pages until dropped; asks for one.
async fn page_of(path: &str) -> (u16, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let sources = Sources {
        reads: Arc::new(Large),
        metrics: Metrics::default(),
        vitals: Vitals::default(),
    };
    sources.vitals.replayed();
    let stop = CancellationToken::new();
    let router = router(sources, tonic::service::Routes::default());
    let server = tokio::spawn(serve(listener, router, stop.clone()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    stop.cancel();
    server.await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn a_dashboard_of_ten_thousand_tasks_stays_small() {
    let (status, page) = page_of("/").await;
    assert_eq!(status, 200);
    assert!(page.len() < 400 << 10, "{} bytes", page.len());
    assert!(page.contains("1234/10000"));
    assert!(page.contains("and 26 more"));
    let (_, tasks) = page_of("/api/v1/jobs/job-1/tasks?state=running").await;
    let tasks: serde_json::Value = serde_json::from_str(&tasks).unwrap();
    assert_eq!(tasks["tasks"].as_array().unwrap().len(), 100);
    assert_eq!(tasks["tasks"][0]["state"], "running");
    assert_eq!(tasks["next_page_token"], "101");
}

#[tokio::test]
async fn what_a_user_wrote_is_shown_and_never_run() {
    let (_, page) = page_of("/").await;
    assert!(!page.contains("<script>alert"));
    assert!(page.contains("&lt;script&gt;alert(1)"));
}

#[tokio::test]
async fn what_the_page_hides_stays_hidden_whatever_its_class() {
    let (_, page) = page_of("/").await;
    assert!(page.contains("id=\"gone\" hidden"), "{page}");
    assert!(page.contains("[hidden]{display:none!important}"), "{page}");
}

#[tokio::test]
async fn the_api_says_what_is_wrong_in_json() {
    let error = |body: &str| serde_json::from_str::<serde_json::Value>(body).unwrap()["error"].to_string();
    let (status, body) = page_of("/api/v1/jobs/job-7").await;
    assert_eq!((status, error(&body).as_str()), (404, "\"there is no job-7\""));
    let (status, body) = page_of("/api/v1/jobs?state=broken").await;
    assert!(
        status == 400 && error(&body).contains("expected queued, running"),
        "{body}"
    );
    let (status, body) = page_of("/api/v1/jobs?pagesize=3").await;
    assert!(status == 400 && error(&body).contains("pagesize"), "{body}");
    assert_eq!(page_of("/api/v1/tasks/x").await.0, 400);
}

#[tokio::test]
async fn the_api_shows_jobs_tasks_workers_and_health() {
    let json = async |path: &str| serde_json::from_str::<serde_json::Value>(&page_of(path).await.1).unwrap();
    let job = json("/api/v1/jobs/job-1").await;
    assert_eq!(job["stages"][1]["tasks_done"], 1234);
    assert_eq!(job["spec"]["parent"], "x");
    assert!(json("/api/v1/jobs").await["jobs"][0].get("spec").is_none());
    assert_eq!(json("/api/v1/tasks/5").await["id"], 5);
    assert_eq!(
        json("/api/v1/workers").await["workers"][127]["devices"][0]["id"],
        "cuda-0"
    );
    assert_eq!(json("/api/v1/health").await["ready"], true);
}
