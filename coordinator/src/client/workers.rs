//! Workers as their keepers see them.

use espalier_proto::v1;

use super::Client;
use crate::{Error, Result};

impl Client {
    /// Every worker, by name.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when the coordinator goes away.
    pub async fn workers(&mut self) -> Result<Vec<v1::Worker>> {
        let request = self.timed(v1::ListWorkersRequest {});
        let response = self.cluster.list_workers(request).await;
        let response = response.map_err(|status| self.error("list workers", &status))?;
        Ok(response.into_inner().workers)
    }

    /// One worker.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none.
    pub async fn worker(&mut self, name: &str) -> Result<v1::Worker> {
        let request = self.timed(v1::GetWorkerRequest {
            name: name.to_owned(),
        });
        let response = self.cluster.get_worker(request).await;
        let response = response.map_err(|status| self.error("get worker", &status))?;
        present(response.into_inner().worker)
    }

    /// Gives a worker nothing more; what it runs is let end.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none, or [`Error::Conflict`] when it is not in a state for it.
    pub async fn cordon(&mut self, name: &str, reason: &str) -> Result<v1::Worker> {
        let request = self.timed(v1::CordonRequest {
            name: name.to_owned(),
            reason: reason.to_owned(),
        });
        let response = self.cluster.cordon(request).await;
        let response = response.map_err(|status| self.error("cordon", &status))?;
        present(response.into_inner().worker)
    }

    /// Gives a worker work again.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none, or [`Error::Conflict`] when it is not in a state for it.
    pub async fn uncordon(&mut self, name: &str) -> Result<v1::Worker> {
        let request = self.timed(v1::UncordonRequest {
            name: name.to_owned(),
        });
        let response = self.cluster.uncordon(request).await;
        let response = response.map_err(|status| self.error("uncordon", &status))?;
        present(response.into_inner().worker)
    }

    /// Asks a worker to checkpoint and hand back what it runs, and to leave.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none, or [`Error::Conflict`] when it is not in a state for it.
    pub async fn drain(&mut self, name: &str, reason: &str) -> Result<v1::Worker> {
        let request = self.timed(v1::DrainWorkerRequest {
            name: name.to_owned(),
            reason: reason.to_owned(),
        });
        let response = self.cluster.drain_worker(request).await;
        let response = response.map_err(|status| self.error("drain", &status))?;
        present(response.into_inner().worker)
    }

    /// Replaces the children of a worker's devices.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none, or [`Error::Conflict`] when it is not in a state for it.
    pub async fn restart(&mut self, name: &str, reason: &str) -> Result<v1::Worker> {
        let request = self.timed(v1::RestartWorkerRequest {
            name: name.to_owned(),
            reason: reason.to_owned(),
        });
        let response = self.cluster.restart_worker(request).await;
        let response = response.map_err(|status| self.error("restart", &status))?;
        present(response.into_inner().worker)
    }
}

fn present(worker: Option<v1::Worker>) -> Result<v1::Worker> {
    worker.ok_or_else(|| Error::Internal("the coordinator's answer has no worker".to_owned()))
}
