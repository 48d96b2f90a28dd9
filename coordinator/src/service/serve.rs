//! What is served on the port: the gRPC services, and the pages beside them.

use std::sync::Arc;
use std::time::Duration;

use espalier_proto::MESSAGE_LIMIT_BYTES;
use espalier_proto::v1::cluster_server::ClusterServer;
use espalier_proto::v1::cost_tables_server::CostTablesServer;
use espalier_proto::v1::jobs_server::JobsServer;
use espalier_proto::v1::tasks_server::TasksServer;
use espalier_proto::v1::workers_server::WorkersServer;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::inbox::Inbox;
use super::{cluster, jobs, kept, tasks, workers};
use crate::cost_tables::CostTables;
use crate::http;
use crate::logs::Logs;
use crate::metrics::Metrics;

const BETWEEN_HEALTH_REPORTS: Duration = Duration::from_secs(1);

/// What the services and pages are made from.
#[derive(Debug, Clone)]
pub struct Shown {
    /// The way to the loop.
    pub inbox: Inbox,
    /// Where tasks are counted that are waited for at the end.
    pub tasks: TaskTracker,
    /// Ends all of it.
    pub stop: CancellationToken,
    /// How the loop does.
    pub vitals: http::Vitals,
    /// What is counted.
    pub metrics: Metrics,
    /// Logs of attempts.
    pub logs: Logs,
    /// What is kept of targets.
    pub cost_tables: CostTables,
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

    fn kept(&self) -> kept::Service {
        kept::Service {
            tables: self.cost_tables.clone(),
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

/// Serves until told to stop.
pub async fn serve(listener: TcpListener, shown: Shown) {
    let jobs = JobsServer::new(shown.jobs())
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    let task_lists = TasksServer::new(shown.tasks()).max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    let cluster = ClusterServer::new(shown.cluster());
    let kept = CostTablesServer::new(shown.kept())
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    let workers = WorkersServer::new(shown.workers())
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    let (reporter, health) = tonic_health::server::health_reporter();
    let reporting = report_health(reporter, shown.vitals.clone(), shown.stop.clone());
    shown.tasks.spawn(reporting);
    let mut grpc = tonic::service::Routes::new(jobs)
        .add_service(task_lists)
        .add_service(cluster)
        .add_service(kept)
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
