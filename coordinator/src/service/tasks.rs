//! The `Tasks` service: tasks of a job, their attempts and their logs.

use std::pin::Pin;

use espalier_proto::v1::{self, tasks_server::Tasks};
use futures::Stream;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use super::jobs::{ask, parse_id};
use super::owner::{self, Query, TaskListing};
use crate::scheduler::TaskId;

const PAGE: u32 = 200;
const LARGEST_PAGE: u32 = 1000;

/// The service.
#[derive(Debug)]
pub struct Service {
    pub(super) requests: mpsc::Sender<owner::Request>,
}

#[tonic::async_trait]
impl Tasks for Service {
    async fn list(
        &self,
        request: Request<v1::ListTasksRequest>,
    ) -> Result<Response<v1::ListTasksResponse>, Status> {
        let v1::ListTasksRequest {
            job_id,
            states,
            stage,
            page_size,
            page_token,
        } = request.into_inner();
        let after = match page_token.as_str() {
            "" => TaskId(0),
            token => TaskId(
                token
                    .parse()
                    .map_err(|_| Status::invalid_argument("page_token: is not one that List has given"))?,
            ),
        };
        let size = match page_size {
            0 => PAGE,
            size => size.min(LARGEST_PAGE),
        };
        let listing = TaskListing {
            job: parse_id(&job_id)?,
            after,
            size: usize::try_from(size).unwrap_or(1),
            states,
            stage,
        };
        let (tasks, next) = ask(&self.requests, |reply| {
            owner::Request::Query(Query::Tasks { listing, reply })
        })
        .await?;
        let next_page_token = next.map(|task| task.0.to_string()).unwrap_or_default();
        Ok(Response::new(v1::ListTasksResponse {
            tasks,
            next_page_token,
        }))
    }

    async fn get(
        &self,
        request: Request<v1::GetTaskRequest>,
    ) -> Result<Response<v1::GetTaskResponse>, Status> {
        let task = TaskId(request.into_inner().task_id);
        let task = ask(&self.requests, |reply| {
            owner::Request::Query(Query::Task { task, reply })
        })
        .await?;
        Ok(Response::new(v1::GetTaskResponse { task: Some(task) }))
    }

    type LogsStream = Pin<Box<dyn Stream<Item = Result<v1::TaskLogsResponse, Status>> + Send>>;

    async fn logs(&self, _: Request<v1::TaskLogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        Err(Status::unimplemented("logs are not kept yet"))
    }
}
