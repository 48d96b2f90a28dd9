//! The `Cluster` service: workers as their keepers see them.

use espalier_proto::v1::{self, cluster_server::Cluster};
use tonic::{Request, Response, Status};

use super::inbox::Inbox;
use super::jobs::line;
use super::owner::{self, Query, WorkerOrder};

/// The service.
#[derive(Debug)]
pub struct Service {
    pub(super) inbox: Inbox,
}

impl Service {
    async fn order(&self, name: String, order: WorkerOrder) -> Result<Option<v1::Worker>, Status> {
        let answer = self
            .inbox
            .ask(|reply| owner::Request::KeepWorker { name, order, reply });
        answer.await.map(Some)
    }
}

#[tonic::async_trait]
impl Cluster for Service {
    async fn list_workers(
        &self,
        _: Request<v1::ListWorkersRequest>,
    ) -> Result<Response<v1::ListWorkersResponse>, Status> {
        let workers = self
            .inbox
            .ask(|reply| owner::Request::Query(Query::Workers { reply }))
            .await?;
        Ok(Response::new(v1::ListWorkersResponse { workers }))
    }

    async fn get_worker(
        &self,
        request: Request<v1::GetWorkerRequest>,
    ) -> Result<Response<v1::GetWorkerResponse>, Status> {
        let name = request.into_inner().name;
        let worker = self
            .inbox
            .ask(|reply| owner::Request::Query(Query::Worker { name, reply }))
            .await?;
        let worker = Some(worker);
        Ok(Response::new(v1::GetWorkerResponse { worker }))
    }

    async fn cordon(
        &self,
        request: Request<v1::CordonRequest>,
    ) -> Result<Response<v1::CordonResponse>, Status> {
        let v1::CordonRequest { name, reason } = request.into_inner();
        let reason = line(reason, "cordoned by a user");
        let worker = self.order(name, WorkerOrder::Cordon { reason }).await?;
        Ok(Response::new(v1::CordonResponse { worker }))
    }

    async fn uncordon(
        &self,
        request: Request<v1::UncordonRequest>,
    ) -> Result<Response<v1::UncordonResponse>, Status> {
        let name = request.into_inner().name;
        let worker = self.order(name, WorkerOrder::Uncordon).await?;
        Ok(Response::new(v1::UncordonResponse { worker }))
    }

    async fn drain_worker(
        &self,
        request: Request<v1::DrainWorkerRequest>,
    ) -> Result<Response<v1::DrainWorkerResponse>, Status> {
        let v1::DrainWorkerRequest { name, reason } = request.into_inner();
        let reason = line(reason, "drained by a user");
        let worker = self.order(name, WorkerOrder::Drain { reason }).await?;
        Ok(Response::new(v1::DrainWorkerResponse { worker }))
    }

    async fn restart_worker(
        &self,
        request: Request<v1::RestartWorkerRequest>,
    ) -> Result<Response<v1::RestartWorkerResponse>, Status> {
        let v1::RestartWorkerRequest { name, reason } = request.into_inner();
        let reason = line(reason, "restarted by a user");
        let worker = self.order(name, WorkerOrder::Restart { reason }).await?;
        Ok(Response::new(v1::RestartWorkerResponse { worker }))
    }
}
