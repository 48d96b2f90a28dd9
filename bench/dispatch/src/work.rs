//! Workers that do nothing, as fast as they are told to, and measure how long they waited.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use espalier_coordinator::client::Client;
use espalier_proto::task::{ArtifactId, TaskOutput};
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::submit_request::Spec;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::workers_client::WorkersClient;
use espalier_proto::v1::{self, WorkerMessage};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::time::DelayQueue;
use tonic::transport::Channel;

use crate::process;

const DEADLINE: Duration = Duration::from_secs(30);

/// How they work.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The coordinator.
    #[arg(long)]
    endpoint: String,
    /// The coordinator's process, whose processor time is read.
    #[arg(long)]
    pid: u32,
    /// Another process whose processor time is no disturbance: the followers.
    #[arg(long)]
    beside: Option<u32>,
    /// How many workers.
    #[arg(long, default_value_t = 64)]
    workers: usize,
    /// Devices of each.
    #[arg(long, default_value_t = 8)]
    devices: usize,
    /// Milliseconds that a task takes.
    #[arg(long, default_value_t = 0)]
    hold_ms: u64,
    /// Tasks of each job, as the coordinator plans them.
    #[arg(long, default_value_t = 20_000)]
    tasks: u64,
    /// Seconds before the measurement.
    #[arg(long, default_value_t = 2)]
    warm_up: u64,
    /// Seconds of the measurement.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Ends when so many tasks are acknowledged, and measures from the first on; 0: by time.
    #[arg(long, default_value_t = 0)]
    total: u64,
}

/// What was measured.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Measured {
    /// Attempts whose completion was acknowledged.
    pub attempts: u64,
    /// In so many seconds.
    pub seconds: f64,
    /// Processor time of the coordinator for each, microseconds.
    pub processor_us: f64,
    /// The most memory the coordinator had, MiB.
    pub peak_mib: u64,
    /// Milliseconds from a slot's becoming free to its next task: half of them took less.
    pub wait_p50_ms: f64,
    /// The same: of a hundred, one took longer.
    pub wait_p99_ms: f64,
    /// Processors that neither the coordinator nor the workers used but somebody else did.
    pub others: f64,
}

#[derive(Default)]
struct Counters {
    assigned: AtomicU64,
    acknowledged: AtomicU64,
}

/// Runs them and prints what was measured.
#[tokio::main(flavor = "current_thread")]
pub async fn run(options: &Options) -> Result<()> {
    let counters = Arc::new(Counters::default());
    let mut workers = JoinSet::new();
    for number in 0..options.workers {
        workers.spawn(work(options.clone(), number, Arc::clone(&counters)));
    }
    let submitter = tokio::spawn(submit(options.clone(), Arc::clone(&counters)));
    let measured = tokio::select! {
        measured = measure(options, &counters) => measured?,
        Some(ended) = workers.join_next() => bail!("a worker ended early: {:?}", ended?.err()),
    };
    submitter.abort();
    let waits = collect(&mut workers).await?;
    report(&measured, &waits)
}

struct Span {
    attempts: u64,
    took: Duration,
    coordinator: Duration,
    peak_mib: u64,
    others: f64,
}

async fn measure(options: &Options, counters: &Counters) -> Result<Span> {
    let own = std::process::id();
    let ours = || -> Result<Duration> {
        let beside = options
            .beside
            .map_or(Ok(Duration::ZERO), process::processor_time)?;
        Ok(process::processor_time(own)?.saturating_add(beside))
    };
    let done = || counters.acknowledged.load(Ordering::Relaxed);
    if options.total == 0 {
        tokio::time::sleep(Duration::from_secs(options.warm_up)).await;
    }
    let start = Instant::now();
    let at_start = (
        done(),
        process::processor_time(options.pid)?,
        ours()?,
        process::machine_time()?,
    );
    if options.total == 0 {
        tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    } else {
        while done() < options.total {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let took = start.elapsed();
    let coordinator = process::processor_time(options.pid)?.saturating_sub(at_start.1);
    let ours = ours()?.saturating_sub(at_start.2);
    let machine = process::machine_time()?.saturating_sub(at_start.3);
    let others = machine.saturating_sub(coordinator).saturating_sub(ours);
    Ok(Span {
        attempts: done().saturating_sub(at_start.0),
        took,
        coordinator,
        peak_mib: process::peak_mib(options.pid)?,
        others: others.as_secs_f64() / took.as_secs_f64(),
    })
}

/// Tells the workers to stop; gives every wait, microseconds, the shortest first.
async fn collect(workers: &mut JoinSet<Result<Vec<u32>>>) -> Result<Vec<u32>> {
    STOP.store(1, Ordering::Relaxed);
    let mut waits = Vec::new();
    while let Some(ended) = workers.join_next().await {
        waits.extend(ended??);
    }
    waits.sort_unstable();
    Ok(waits)
}

static STOP: AtomicU64 = AtomicU64::new(0);

#[allow(clippy::print_stdout)] // the answer of this process
fn report(span: &Span, waits: &[u32]) -> Result<()> {
    let at = |percent: usize| {
        let index = (waits.len() * percent / 100).min(waits.len().saturating_sub(1));
        waits.get(index).map_or(0.0, |wait| f64::from(*wait) / 1e3)
    };
    let attempts = u32::try_from(span.attempts)?;
    let measured = Measured {
        attempts: span.attempts,
        seconds: span.took.as_secs_f64(),
        processor_us: span.coordinator.as_secs_f64() * 1e6 / f64::from(attempts.max(1)),
        peak_mib: span.peak_mib,
        wait_p50_ms: at(50),
        wait_p99_ms: at(99),
        others: span.others,
    };
    println!("{}", serde_json::to_string(&measured)?);
    Ok(())
}

/// Keeps enough tasks waiting: at least one whole job beyond what was handed out.
async fn submit(options: Options, counters: Arc<Counters>) -> Result<()> {
    let place = tempfile::tempdir()?;
    let at = place.path().display().to_string();
    std::fs::create_dir(place.path().join("parent"))?;
    std::fs::write(place.path().join("text.txt"), "some text\n")?;
    let mut client = Client::connect(&options.endpoint, DEADLINE).await?;
    let mut submitted: u64 = 0;
    loop {
        let wanted = counters
            .assigned
            .load(Ordering::Relaxed)
            .saturating_add(options.tasks);
        let wanted = if options.total == 0 {
            wanted
        } else {
            wanted.min(options.total)
        };
        if submitted < wanted {
            let spec = format!(
                "parent: {at}/parent\ndata: {{train: [{at}/text.txt]}}\ntarget:\n  workload: {{prompt_tokens: 8, \
                 output_tokens: 8, concurrency: 1}}\n  limits: {{latency: 75%}}\noutput: {at}/out-{submitted}\n"
            );
            client.submit(Spec::Yaml(spec), "").await?;
            submitted = submitted.saturating_add(options.tasks);
            continue;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// One worker; gives the microseconds its slots stood free.
async fn work(options: Options, number: usize, counters: Arc<Counters>) -> Result<Vec<u32>> {
    let channel = Channel::from_shared(options.endpoint.clone())?
        .tcp_nodelay(true)
        .connect()
        .await?;
    let mut client = WorkersClient::new(channel);
    let (outbox, messages) = mpsc::channel(4096);
    let name = format!("worker-{number}");
    outbox
        .send(say(FromWorker::Hello(hello(&name, options.devices))))
        .await?;
    let mut inbox = client.connect(ReceiverStream::new(messages)).await?.into_inner();
    let first = inbox.message().await?.and_then(|message| message.message);
    let Some(FromCoordinator::Welcome(welcome)) = first else {
        bail!("no welcome came first, but {first:?}");
    };
    let mut beat = tokio::time::interval(Duration::from_secs(2));
    let output = TaskOutput::Sort {
        permutation: ArtifactId("00".to_owned()),
    };
    let output: Bytes = serde_json::to_vec(&output)?.into();
    let mut running = DelayQueue::new();
    let mut free: HashMap<String, Instant> = HashMap::new();
    let mut waits = Vec::new();
    let complete = |free: &mut HashMap<String, Instant>, assign: v1::Assign| {
        free.insert(assign.device_id, Instant::now());
        say(FromWorker::Completed(v1::Completed {
            lease: assign.lease,
            output_json: output.clone(),
        }))
    };
    loop {
        let message = tokio::select! {
            message = inbox.message() => message?.context("the coordinator closed the stream")?,
            Some(done) = std::future::poll_fn(|context| running.poll_expired(context)), if !running.is_empty() => {
                let message = complete(&mut free, done.into_inner());
                outbox.send(message).await?;
                continue;
            }
            _ = beat.tick() => {
                if STOP.load(Ordering::Relaxed) != 0 {
                    return Ok(waits);
                }
                let beat = v1::HeartbeatRequest { term: welcome.term, worker_id: welcome.worker_id, epoch: 1, attempts: Vec::new() };
                client.heartbeat(beat).await?;
                continue;
            }
        };
        match message.message {
            Some(FromCoordinator::Assign(assign)) => {
                counters.assigned.fetch_add(1, Ordering::Relaxed);
                if let Some(since) = free.remove(&assign.device_id) {
                    waits.push(u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX));
                }
                if options.hold_ms == 0 {
                    let message = complete(&mut free, assign);
                    outbox.send(message).await?;
                } else {
                    running.insert(assign, Duration::from_millis(options.hold_ms));
                }
            }
            Some(FromCoordinator::Acknowledged(_)) => {
                counters.acknowledged.fetch_add(1, Ordering::Relaxed);
            }
            other => bail!("the coordinator said {other:?}"),
        }
    }
}

fn hello(name: &str, devices: usize) -> v1::Hello {
    let device = |index| v1::Device {
        id: format!("cpu-{index}"),
        kind: "cpu".to_owned(),
        name: "nothing".to_owned(),
        memory_bytes: 1 << 30,
        threads: 1,
        engines: Vec::new(),
    };
    v1::Hello {
        protocol_version: espalier_proto::PROTOCOL_VERSION,
        oldest_protocol_version: espalier_proto::OLDEST_PROTOCOL_VERSION,
        worker: name.to_owned(),
        epoch: 1,
        version: "dispatch".to_owned(),
        devices: (0..devices).map(device).collect(),
        ..v1::Hello::default()
    }
}

fn say(message: FromWorker) -> WorkerMessage {
    WorkerMessage {
        message: Some(message),
    }
}
