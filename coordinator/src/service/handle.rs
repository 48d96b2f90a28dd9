//! A running coordinator, as whoever started it holds it.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use tokio::sync::{mpsc, watch as signal};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::owner::Request;
use crate::tables::Tables;
use crate::{Error, Result};

/// How long a stop waits for room in the loop's inbox.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// A running coordinator.
#[derive(Debug)]
pub struct Handle {
    pub(super) address: SocketAddr,
    pub(super) requests: mpsc::Sender<Request>,
    pub(super) failed: signal::Receiver<Option<String>>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
    pub(super) tables: Tables,
    pub(super) owner: thread::JoinHandle<()>,
    pub(super) server: JoinHandle<()>,
    pub(super) ticker: JoinHandle<()>,
    pub(super) log_writer: thread::JoinHandle<()>,
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
        timeout_at(deadline, log_writer).await.map(drop).map_err(late)?;
        tracing::info!("the coordinator has stopped");
        Ok(())
    }
}
