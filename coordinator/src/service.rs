//! A running coordinator: one loop that owns the state, and the gRPC services that talk to it.
//!
//! The loop ([`owner`]) is the only one to touch the state and the journal; everybody else sends it
//! [`owner::Request`]s over one bounded channel. Planning, report writing and removal run beside it on
//! blocking threads and report back the same way. What the loop has of the world comes through
//! [`surroundings`].

mod adapter;
mod cluster;
mod history;
mod inbox;
mod jobs;
mod log;
mod outcome;
pub mod owner;
mod planner;
mod store;
pub mod surroundings;
mod tasks;
mod view;
mod watch;
pub mod workers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use espalier_artifact::ArtifactStore;
use espalier_proto::MESSAGE_LIMIT_BYTES;
use espalier_proto::v1::cluster_server::ClusterServer;
use espalier_proto::v1::jobs_server::JobsServer;
use espalier_proto::v1::tasks_server::TasksServer;
use espalier_proto::v1::workers_server::WorkersServer;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, watch as signal};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::collect::{self, COLLECT_AFTER, Collector};
use crate::journal;
use crate::journal::disk::SystemDisk;
use crate::lock::DirectoryLock;
use crate::logs::{self, Logs};
use crate::metrics::Metrics;
use crate::shipping::{self, SHIP_INTERVAL};
use crate::tables::Tables;
use crate::term::{Fence, OwnDirectory, TERM_LEASE};
use crate::{Error, Result, http};
pub use adapter::PipelinePlanner;
use inbox::Inbox;
use owner::{BATCH, Owner, Request, TICK};
pub use planner::{Planned, Planner, StageSnapshot};
use surroundings::{BlockingThreads, Clock, Surroundings, SystemClock};

/// Requests that may wait for the loop.
const REQUESTS: usize = 2048;
const BETWEEN_HEALTH_REPORTS: Duration = Duration::from_secs(1);
/// How long a stop waits for room in the loop's inbox.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// How a coordinator runs.
#[derive(Debug, Clone)]
pub struct CoordinatorOptions {
    /// Where it listens; port 0 takes a free one. Default: `127.0.0.1:7474`.
    pub listen: SocketAddr,
    /// Where its journal lies; made when missing.
    pub data_dir: PathBuf,
    /// Where artifacts lie: a directory or a URL that workers can reach too. Default: `artifacts` in `data_dir`.
    pub store: Option<String>,
    /// Names the coordinators that follow one another on one store. Only with a `store`: that is where the journal
    /// is shipped and terms are claimed. Default: `espalier`.
    pub cluster: String,
    /// How often the journal is shipped to the store: what losing the disk can cost. Default: 5 s.
    pub ship_interval: Duration,
    /// How long a coordinator may promote after it last saw that no other had taken over. The same for all of a
    /// cluster. Default: 10 s.
    pub term_lease: Duration,
    /// A segment of the journal that has grown larger is closed, and a snapshot of the state may be taken.
    /// Default: 16 MiB.
    pub segment_bytes: u64,
    /// Artifacts that nobody needs stay at least this long after they were last put. Default: 24 h.
    pub collect_after: Duration,
    /// Workers are asked for a heartbeat this often. Default: 2 s.
    pub heartbeat_interval: Duration,
    /// Silence after which a worker's tasks are handed on. Default: 30 s.
    pub worker_lost: Duration,
    /// How long a worker out of touch goes on working. Default: 30 min.
    pub orphan_grace: Duration,
}

impl CoordinatorOptions {
    /// The defaults, with the journal in this directory.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7474)),
            data_dir: data_dir.into(),
            store: None,
            cluster: "espalier".to_owned(),
            ship_interval: SHIP_INTERVAL,
            term_lease: TERM_LEASE,
            segment_bytes: journal::Options::default().segment_bytes,
            collect_after: COLLECT_AFTER,
            heartbeat_interval: Duration::from_secs(2),
            worker_lost: Duration::from_secs(30),
            orphan_grace: Duration::from_secs(30 * 60),
        }
    }
}

/// Starts coordinators.
#[derive(Debug)]
pub struct Coordinator;

impl Coordinator {
    /// Replays the journal and serves. Returns once it listens.
    ///
    /// # Errors
    /// When the data directory is another's or damaged, or the address cannot be listened on.
    pub async fn start(options: CoordinatorOptions) -> Result<Handle> {
        Self::start_with(options, Arc::new(PipelinePlanner)).await
    }

    /// The same, with another planner in the pipeline's place.
    ///
    /// # Errors
    /// As [`Coordinator::start`].
    pub async fn start_with(options: CoordinatorOptions, planner: Arc<dyn Planner>) -> Result<Handle> {
        let listener = TcpListener::bind(options.listen)
            .await
            .map_err(|source| Error::Listen {
                address: options.listen,
                source,
            })?;
        let address = listener.local_addr().map_err(|source| Error::Listen {
            address: options.listen,
            source,
        })?;
        let lock = DirectoryLock::of(&options.data_dir)?;
        let data_dir = options.data_dir.clone();
        let (requests, inbox) = mpsc::channel(REQUESTS);
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let (failure, failed) = signal::channel(None);
        let metrics = Metrics::default();
        metrics.journal_lies_in(options.data_dir.join("journal"));
        let clock = Arc::new(SystemClock::default());
        let store = store::open(&options)?;
        let shipping = prepare_shipping(&options, &store, Arc::clone(&clock)).await?;
        let fence: Arc<dyn Fence> = match &shipping {
            Some(prepared) => Arc::clone(&prepared.keeper) as Arc<dyn Fence>,
            None => Arc::new(OwnDirectory),
        };
        let (location, store_id) = (store.location(), store::identify(&options, &store).await?);
        let collector = Collector::new(
            store,
            collecting(&options),
            Arc::clone(&fence),
            Arc::clone(&clock) as Arc<dyn Clock>,
            metrics.clone(),
        );
        let tables = Tables::default();
        let (opened, logs, log_writer, shipping) = {
            let own_tables = tables.clone();
            let beside = BlockingThreads {
                runtime: tokio::runtime::Handle::current(),
                tasks: tasks.clone(),
                requests: requests.downgrade(),
            };
            let open = move || {
                let surroundings = Surroundings {
                    clock,
                    beside: Arc::new(beside),
                    disk: Arc::new(SystemDisk),
                    tables: own_tables,
                    store: location,
                    store_id,
                    witness: None,
                };
                let directory = options.data_dir.join("logs");
                let kept = Logs::open(&directory, logs::Options::default());
                let (logs, writer) = kept.map_err(|source| Error::File {
                    action: "keep logs in",
                    path: directory,
                    source,
                })?;
                let owner = Owner::open_fenced(options, planner, surroundings, fence)?;
                if let Some(prepared) = &shipping {
                    prepared.settled()?;
                }
                Ok::<_, Error>((owner, logs, writer, shipping))
            };
            tokio::task::spawn_blocking(open)
                .await
                .map_err(|error| Error::Internal(error.to_string()))??
        };
        let tables_writer = tables
            .start(Arc::new(SystemDisk), &data_dir, opened.position())
            .map_err(|error| Error::Internal(format!("the tables' thread cannot be started: {error}")))?;
        let opened = opened.seen_by(metrics.clone(), logs.clone());
        let vitals = http::Vitals::default();
        vitals.set_authority(opened.holds());
        vitals.replayed();
        let progress = shipping::Progress::default();
        progress.durable(opened.durable());
        let loop_is_over = CancellationToken::new();
        if let Some(prepared) = shipping {
            metrics.ships(progress.clone());
            let shipper = prepared.shipper(opened.state().term().0, progress.clone());
            // What the loop's last turn makes durable is shipped too: a worker may have been told of it already.
            tasks.spawn(shipper.run(loop_is_over.clone()));
            tasks.spawn(prepared.keeper.keep(stop.clone()));
        }
        tasks.spawn(collector.run(stop.clone()));
        let owner = thread::Builder::new().name("espalier-owner".to_owned()).spawn({
            let (stop, vitals, metrics) = (stop.clone(), vitals.clone(), metrics.clone());
            move || {
                let _lock = lock;
                let _over = loop_is_over.drop_guard();
                let ended = run(opened, inbox, &vitals, &metrics, &progress, &stop);
                if let Err(error) = ended {
                    tracing::error!(%error, "the coordinator stops");
                    failure.send_replace(Some(error.to_string()));
                }
                stop.cancel();
                tables_writer.stop();
            }
        });
        let owner = owner.map_err(|error| Error::Internal(error.to_string()))?;
        let shown = Shown {
            inbox: Inbox::new(requests.clone(), vitals.clone()),
            tasks: tasks.clone(),
            stop: stop.clone(),
            vitals,
            metrics,
            logs,
        };
        let server = tokio::spawn(serve(listener, shown));
        let ticker = tokio::spawn(tick(requests.clone(), stop.clone()));
        tracing::info!(%address, "the coordinator listens");
        Ok(Handle {
            address,
            requests,
            failed,
            stop,
            tasks,
            tables,
            owner,
            server,
            ticker,
            log_writer,
        })
    }
}

/// A running coordinator.
#[derive(Debug)]
pub struct Handle {
    address: SocketAddr,
    requests: mpsc::Sender<Request>,
    failed: signal::Receiver<Option<String>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    tables: Tables,
    owner: thread::JoinHandle<()>,
    server: JoinHandle<()>,
    ticker: JoinHandle<()>,
    log_writer: thread::JoinHandle<()>,
}

impl Handle {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The endpoint that clients and workers connect to.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The tables, for questions that the loop does not answer.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Waits until the coordinator cannot go on, as when its journal fails; says why.
    pub async fn failed(&self) -> String {
        let mut failed = self.failed.clone();
        let reason = failed.wait_for(Option::is_some).await;
        reason
            .ok()
            .and_then(|reason| reason.clone())
            .unwrap_or_else(|| "the coordinator has stopped".to_owned())
    }

    /// Stops: streams are closed, what runs beside the loop is waited for until the deadline.
    ///
    /// # Errors
    /// When something still ran at the deadline.
    pub async fn shutdown(self, deadline: Duration) -> Result<()> {
        let deadline = Instant::now() + deadline;
        let late = |_| Error::Internal("the coordinator did not stop in time".to_owned());
        self.tasks.close();
        // The loop may be gone already, having failed, or its inbox full, waiting for authority: then it sees
        // the token.
        let patience = deadline.min(Instant::now() + STOP_PATIENCE);
        let _ = timeout_at(patience, self.requests.send(Request::Stop)).await;
        self.stop.cancel();
        let mut server = self.server;
        if timeout_at(deadline, &mut server).await.is_err() {
            server.abort();
        }
        timeout_at(deadline, self.ticker).await.map(drop).map_err(late)?;
        timeout_at(deadline, self.tasks.wait()).await.map_err(late)?;
        let owner = tokio::task::spawn_blocking(move || self.owner.join());
        timeout_at(deadline, owner).await.map(drop).map_err(late)?;
        // Nobody is left to send it lines.
        let log_writer = tokio::task::spawn_blocking(move || self.log_writer.join());
        timeout_at(deadline, log_writer).await.map(drop).map_err(late)
    }
}

fn collecting(options: &CoordinatorOptions) -> collect::Options {
    collect::Options {
        data_dir: options.data_dir.clone(),
        cluster: options.store.as_ref().map(|_| options.cluster.clone()),
        collect_after: options.collect_after,
    }
}

/// Makes ready to ship and to claim a term, where a store is given; one inside the data directory would be lost
/// with it.
async fn prepare_shipping(
    options: &CoordinatorOptions,
    store: &ArtifactStore,
    clock: Arc<SystemClock>,
) -> Result<Option<shipping::Prepared>> {
    if options.store.is_none() {
        return Ok(None);
    }
    let shipping = shipping::Options {
        data_dir: options.data_dir.clone(),
        cluster: options.cluster.clone(),
        interval: options.ship_interval,
        lease: options.term_lease,
    };
    shipping::prepare(store, shipping, clock).await.map(Some)
}

/// Gives the loop its turns until it is told to stop.
fn run(
    mut owner: Owner,
    mut inbox: mpsc::Receiver<Request>,
    vitals: &http::Vitals,
    metrics: &Metrics,
    progress: &shipping::Progress,
    stop: &CancellationToken,
) -> Result<()> {
    let mut batch = Vec::with_capacity(BATCH);
    while !owner.is_stopping() {
        if stop.is_cancelled() {
            // What waits is taken; nothing more comes, whoever could still send.
            inbox.close();
        }
        // Without authority requests stay in the batch; when it is full of them the inbox has to wait.
        let room = BATCH.saturating_sub(batch.len());
        if room == 0 {
            thread::sleep(TICK);
            if stop.is_cancelled() {
                break;
            }
        } else if inbox.blocking_recv_many(&mut batch, room) == 0 {
            break;
        }
        owner.turn(&mut batch)?;
        vitals.turned();
        vitals.set_disk_full(owner.is_full());
        metrics.set_disk_full(owner.is_full());
        vitals.set_authority(owner.holds());
        progress.durable(owner.durable());
    }
    inbox.close();
    Ok(())
}

/// Wakes the loop regularly, until told to stop.
async fn tick(requests: mpsc::Sender<Request>, stop: CancellationToken) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = interval.tick() => {}
        }
        if requests.send(Request::Tick).await.is_err() {
            return;
        }
    }
}

/// What the services and pages are made from.
struct Shown {
    inbox: Inbox,
    tasks: TaskTracker,
    stop: CancellationToken,
    vitals: http::Vitals,
    metrics: Metrics,
    logs: Logs,
}

impl Shown {
    fn jobs(&self) -> jobs::Service {
        jobs::Service {
            inbox: self.inbox.clone(),
            seats: Arc::new(Semaphore::new(jobs::EVENT_FOLLOWERS)),
        }
    }

    fn tasks(&self) -> tasks::Service {
        tasks::Service {
            inbox: self.inbox.clone(),
            logs: self.logs.clone(),
            stop: self.stop.clone(),
        }
    }

    fn cluster(&self) -> cluster::Service {
        cluster::Service {
            inbox: self.inbox.clone(),
        }
    }

    fn workers(&self) -> workers::Service {
        workers::Service {
            inbox: self.inbox.clone(),
            tasks: self.tasks.clone(),
            stop: self.stop.clone(),
        }
    }

    fn sources(&self) -> http::Sources {
        let reads = http::Services {
            jobs: self.jobs(),
            tasks: self.tasks(),
            cluster: self.cluster(),
        };
        http::Sources {
            reads: Arc::new(reads),
            metrics: self.metrics.clone(),
            vitals: self.vitals.clone(),
        }
    }
}

async fn serve(listener: TcpListener, shown: Shown) {
    let jobs = JobsServer::new(shown.jobs())
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    let task_lists = TasksServer::new(shown.tasks()).max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    let cluster = ClusterServer::new(shown.cluster());
    let workers = WorkersServer::new(shown.workers())
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    let (reporter, health) = tonic_health::server::health_reporter();
    let reporting = report_health(reporter, shown.vitals.clone(), shown.stop.clone());
    shown.tasks.spawn(reporting);
    let mut grpc = tonic::service::Routes::new(jobs)
        .add_service(task_lists)
        .add_service(cluster)
        .add_service(workers)
        .add_service(health);
    match reflection() {
        Ok(reflection) => grpc = grpc.add_service(reflection),
        Err(error) => tracing::error!(%error, "no reflection is served"),
    }
    let stop = shown.stop.clone();
    let router = http::router(shown.sources(), grpc);
    // The pages hold what they need; what is held here too would keep the logs' thread waiting.
    drop(shown);
    http::serve(listener, router, stop).await;
}

/// Lets clients ask which services there are, and of which messages.
fn reflection() -> std::result::Result<
    tonic_reflection::server::v1::ServerReflectionServer<impl tonic_reflection::server::v1::ServerReflection>,
    tonic_reflection::server::Error,
> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(espalier_proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
}

/// Tells gRPC health checks of the whole server what probes over HTTP are told.
async fn report_health(
    reporter: tonic_health::server::HealthReporter,
    vitals: http::Vitals,
    stop: CancellationToken,
) {
    let mut interval = tokio::time::interval(BETWEEN_HEALTH_REPORTS);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let status = match vitals.ready() {
            Ok(()) => tonic_health::ServingStatus::Serving,
            Err(_) => tonic_health::ServingStatus::NotServing,
        };
        reporter.set_service_status("", status).await;
        tokio::select! {
            () = stop.cancelled() => return,
            _ = interval.tick() => {}
        }
    }
}
