//! A coordinator in this process, a planner that tells a short story, and a worker that speaks real gRPC.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

pub mod bench;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use espalier_coordinator::client::Client;
use espalier_coordinator::scheduler::{Needs, StagePlan, TaskPlan};
use espalier_coordinator::service::{Planned, Planner, StageSnapshot};
use espalier_coordinator::{Coordinator, CoordinatorOptions, Handle};
use espalier_proto::task::{ArtifactId, Failure, FailureKind, TaskOutput};
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::submit_request::Spec;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::workers_client::WorkersClient;
use espalier_proto::v1::{self, Job, WorkerMessage};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// Longer than anything here takes on a busy machine; only a failure waits for it.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// `sort` (one task), then `score` (two), then the outcome.
pub struct Story;

impl Planner for Story {
    fn plan(&self, spec: &str, stages: &[StageSnapshot]) -> Result<Planned, String> {
        if stages.iter().any(|stage| stage.outputs.is_none()) {
            return Ok(Planned::Stages(Vec::new()));
        }
        assert!(spec.contains("\"parent\""));
        Ok(match stages.len() {
            0 => Planned::Stages(vec![stage("sort", 1)]),
            1 => Planned::Stages(vec![stage("score", 2)]),
            _ => Planned::Outcome("{\"story\":\"told\"}".into()),
        })
    }

    fn write_report(&self, outcome: &str, directory: &Path) -> Result<(), String> {
        std::fs::write(directory.join("report.json"), outcome).map_err(|error| error.to_string())
    }
}

/// One stage of so many tasks, then the outcome.
pub struct Crowd(pub usize);

impl Planner for Crowd {
    fn plan(&self, _: &str, stages: &[StageSnapshot]) -> Result<Planned, String> {
        Ok(match stages.first().map(|stage| stage.outputs.is_some()) {
            None => Planned::Stages(vec![stage("crowd", self.0)]),
            Some(false) => Planned::Stages(Vec::new()),
            Some(true) => Planned::Outcome("{}".into()),
        })
    }

    fn write_report(&self, outcome: &str, directory: &Path) -> Result<(), String> {
        Story.write_report(outcome, directory)
    }
}

fn stage(name: &str, tasks: usize) -> StagePlan {
    let task = |index| TaskPlan {
        name: format!("{name} {index}"),
        payload: "{}".into(),
        exclusive: false,
        needs: Needs::default(),
    };
    StagePlan {
        name: name.to_owned(),
        kind: name.to_owned(),
        decision: None,
        note: String::new(),
        in_output: false,
        tasks: (0..tasks).map(task).collect(),
    }
}

/// Where a test's files lie.
pub struct Place {
    pub directory: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("parent")).unwrap();
        std::fs::write(directory.path().join("text.txt"), "some text\n").unwrap();
        Self { directory }
    }

    pub fn output(&self) -> PathBuf {
        self.directory.path().join("out")
    }

    pub fn partial(&self) -> PathBuf {
        self.directory.path().join("out.partial")
    }

    pub fn spec(&self) -> Spec {
        let at = self.directory.path().display();
        Spec::Yaml(format!(
            "parent: {at}/parent\ndata: {{train: [{at}/text.txt]}}\ntarget:\n  workload: {{prompt_tokens: 8, \
             output_tokens: 8, concurrency: 1}}\n  limits: {{latency: 75%}}\noutput: {at}/out\n"
        ))
    }

    /// One that gives no worker up while a test lasts, however slow the machine.
    pub async fn coordinator(&self) -> Handle {
        Coordinator::start_with(self.options(), Arc::new(Story))
            .await
            .unwrap()
    }

    /// One whose jobs are one stage of so many tasks.
    pub async fn coordinator_of_crowds(&self, tasks: usize) -> Handle {
        let planner = Arc::new(Crowd(tasks));
        Coordinator::start_with(self.options(), planner).await.unwrap()
    }

    pub fn options(&self) -> CoordinatorOptions {
        let mut options = CoordinatorOptions::new(self.directory.path().join("data"));
        options.listen = "127.0.0.1:0".parse().unwrap();
        options.worker_lost = DEADLINE;
        options.heartbeat_interval = Duration::from_millis(100);
        options
    }
}

/// An address that nobody listens on. Its port is below those that systems hand out to whoever does not ask for a
/// certain one, so that no test beside this one gets it between two starts of a coordinator.
pub fn free_address() -> SocketAddr {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    // Processes beside each other begin in different places.
    let own = std::process::id().wrapping_mul(61);
    loop {
        let place = own.wrapping_add(GIVEN.fetch_add(7, Ordering::Relaxed)) % 12_000;
        let port = 20_000 + u16::try_from(place).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

pub async fn client(handle: &Handle) -> Client {
    Client::connect(&handle.endpoint(), DEADLINE).await.unwrap()
}

/// A worker whose moves the test makes.
pub struct FakeWorker {
    pub name: String,
    pub epoch: u64,
    pub welcome: v1::Welcome,
    outbox: mpsc::Sender<WorkerMessage>,
    inbox: Streaming<v1::CoordinatorMessage>,
    pub heart: WorkersClient<Channel>,
}

impl FakeWorker {
    pub async fn connect(handle: &Handle, name: &str, epoch: u64, attempts: Vec<v1::Lease>) -> Self {
        Self::try_connect(handle, name, epoch, attempts).await.unwrap()
    }

    pub async fn try_connect(
        handle: &Handle,
        name: &str,
        epoch: u64,
        attempts: Vec<v1::Lease>,
    ) -> Result<Self, tonic::Status> {
        Self::say_hello(handle, hello(name, epoch, attempts)).await
    }

    /// Connects with a hello of the test's making.
    pub async fn say_hello(handle: &Handle, hello: v1::Hello) -> Result<Self, tonic::Status> {
        let (name, epoch) = (hello.worker.clone(), hello.epoch);
        let channel = Channel::from_shared(handle.endpoint())
            .unwrap()
            .connect()
            .await
            .unwrap();
        let mut client = WorkersClient::new(channel);
        let (outbox, messages) = mpsc::channel(16);
        outbox
            .send(WorkerMessage {
                message: Some(FromWorker::Hello(hello)),
            })
            .await
            .unwrap();
        let mut inbox = client.connect(ReceiverStream::new(messages)).await?.into_inner();
        let Some(FromCoordinator::Welcome(welcome)) = inbox.message().await?.unwrap().message else {
            panic!("the first message is no welcome");
        };
        Ok(Self {
            name,
            epoch,
            welcome,
            outbox,
            inbox,
            heart: client,
        })
    }

    pub async fn next(&mut self) -> FromCoordinator {
        let next = tokio::time::timeout(DEADLINE, self.inbox.message());
        next.await
            .expect("nothing came")
            .unwrap()
            .expect("the stream ended")
            .message
            .unwrap()
    }

    pub async fn assignment(&mut self) -> v1::Assign {
        match self.next().await {
            FromCoordinator::Assign(assign) => assign,
            other => panic!("{other:?} instead of an assignment"),
        }
    }

    pub async fn say(&self, message: FromWorker) {
        self.outbox
            .send(WorkerMessage {
                message: Some(message),
            })
            .await
            .unwrap();
    }

    pub async fn complete(&self, lease: v1::Lease) {
        let output = TaskOutput::Sort {
            permutation: ArtifactId("00".to_owned()),
        };
        let output_json = serde_json::to_vec(&output).unwrap().into();
        self.say(FromWorker::Completed(v1::Completed {
            lease: Some(lease),
            output_json,
        }))
        .await;
    }

    pub async fn fail(&self, lease: v1::Lease, kind: FailureKind, message: &str) {
        let failure = Failure {
            kind,
            message: message.to_owned(),
        };
        let failure_json = serde_json::to_vec(&failure).unwrap().into();
        self.say(FromWorker::Failed(v1::Failed {
            lease: Some(lease),
            failure_json,
        }))
        .await;
    }

    pub async fn heartbeat(&mut self) -> Result<v1::HeartbeatResponse, tonic::Status> {
        let request = v1::HeartbeatRequest {
            term: self.welcome.term,
            worker_id: self.welcome.worker_id,
            epoch: self.epoch,
            attempts: Vec::new(),
        };
        self.heart
            .heartbeat(request)
            .await
            .map(tonic::Response::into_inner)
    }
}

/// What a worker of one device says first.
pub fn hello(name: &str, epoch: u64, attempts: Vec<v1::Lease>) -> v1::Hello {
    v1::Hello {
        protocol_version: espalier_proto::PROTOCOL_VERSION,
        oldest_protocol_version: espalier_proto::OLDEST_PROTOCOL_VERSION,
        worker: name.to_owned(),
        epoch,
        version: "test".to_owned(),
        devices: vec![v1::Device {
            id: "cpu".to_owned(),
            kind: "cpu".to_owned(),
            name: "test".to_owned(),
            memory_bytes: 1,
            threads: 1,
            engines: Vec::new(),
        }],
        attempts,
        ..v1::Hello::default()
    }
}

pub async fn acknowledged(worker: &mut FakeWorker) -> v1::Lease {
    match worker.next().await {
        FromCoordinator::Acknowledged(acknowledged) => acknowledged.lease.unwrap(),
        other => panic!("{other:?} instead of an acknowledgement"),
    }
}

/// Runs one task to its acknowledgement.
pub async fn run_one(worker: &mut FakeWorker) -> v1::Lease {
    let lease = worker.assignment().await.lease.unwrap();
    worker.complete(lease).await;
    assert_eq!(acknowledged(worker).await, lease);
    lease
}

/// Follows a job to its end.
pub async fn end_of(handle: &Handle, job: &str) -> Job {
    let mut client = client(handle).await;
    let mut following = client.watch(job, 0).await.unwrap();
    let mut last = None;
    let follow = async {
        while let Some(job) = following.next().await.unwrap() {
            last = Some(job);
        }
    };
    tokio::time::timeout(DEADLINE, follow)
        .await
        .expect("the job does not end");
    last.unwrap()
}
