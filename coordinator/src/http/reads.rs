//! What the pages ask: the same services that answer gRPC, called in this process, so that both know the same
//! limits, pages and errors.

use espalier_proto::v1::cluster_server::Cluster;
use espalier_proto::v1::jobs_server::Jobs;
use espalier_proto::v1::tasks_server::Tasks;
use espalier_proto::v1::{
    GetRequest, GetResponse, GetTaskRequest, GetTaskResponse, ListRequest, ListResponse, ListTasksRequest,
    ListTasksResponse, ListWorkersRequest, ListWorkersResponse,
};
use tonic::{Request, Response, Status};

/// Answers what the pages ask.
#[tonic::async_trait]
pub trait Reads: Send + Sync + 'static {
    /// A page of jobs.
    async fn jobs(&self, request: ListRequest) -> Result<ListResponse, Status>;
    /// One job.
    async fn job(&self, request: GetRequest) -> Result<GetResponse, Status>;
    /// A page of a job's tasks.
    async fn tasks(&self, request: ListTasksRequest) -> Result<ListTasksResponse, Status>;
    /// One task.
    async fn task(&self, request: GetTaskRequest) -> Result<GetTaskResponse, Status>;
    /// Every worker.
    async fn workers(&self) -> Result<ListWorkersResponse, Status>;
}

/// The services.
#[derive(Debug)]
pub struct Services<J, T, C> {
    /// Of jobs.
    pub jobs: J,
    /// Of tasks.
    pub tasks: T,
    /// Of workers.
    pub cluster: C,
}

#[tonic::async_trait]
impl<J: Jobs, T: Tasks, C: Cluster> Reads for Services<J, T, C> {
    async fn jobs(&self, request: ListRequest) -> Result<ListResponse, Status> {
        self.jobs
            .list(Request::new(request))
            .await
            .map(Response::into_inner)
    }

    async fn job(&self, request: GetRequest) -> Result<GetResponse, Status> {
        self.jobs
            .get(Request::new(request))
            .await
            .map(Response::into_inner)
    }

    async fn tasks(&self, request: ListTasksRequest) -> Result<ListTasksResponse, Status> {
        self.tasks
            .list(Request::new(request))
            .await
            .map(Response::into_inner)
    }

    async fn task(&self, request: GetTaskRequest) -> Result<GetTaskResponse, Status> {
        self.tasks
            .get(Request::new(request))
            .await
            .map(Response::into_inner)
    }

    async fn workers(&self) -> Result<ListWorkersResponse, Status> {
        let request = Request::new(ListWorkersRequest {});
        self.cluster.list_workers(request).await.map(Response::into_inner)
    }
}
