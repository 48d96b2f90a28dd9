//! The `Tasks` service: tasks of a job, their attempts and their logs.

use std::pin::Pin;

use espalier_proto::v1::{self, tasks_server::Tasks};
use futures::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::inbox::Inbox;
use super::jobs::parse_id;
use super::log;
use super::owner::{self, Query, TaskListing};
use crate::logs::{self, Logs};
use crate::scheduler::{AttemptId, TaskId};

const PAGE: u32 = 200;
const LARGEST_PAGE: u32 = 1000;

/// The service.
#[derive(Debug)]
pub struct Service {
    pub(super) inbox: Inbox,
    pub(super) logs: Logs,
    pub(super) stop: CancellationToken,
}

impl Service {
    async fn detail(&self, task: TaskId) -> Result<v1::TaskDetail, Status> {
        self.inbox
            .ask(|reply| owner::Request::Query(Query::Task { task, reply }))
            .await
    }
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
        let (tasks, next) = self
            .inbox
            .ask(|reply| owner::Request::Query(Query::Tasks { listing, reply }))
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
        let task = self.detail(task).await?;
        Ok(Response::new(v1::GetTaskResponse { task: Some(task) }))
    }

    type LogsStream = Pin<Box<dyn Stream<Item = Result<v1::TaskLogsResponse, Status>> + Send>>;

    async fn logs(
        &self,
        request: Request<v1::TaskLogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let v1::TaskLogsRequest {
            task_id,
            attempt,
            tail,
            follow,
        } = request.into_inner();
        let detail = self.detail(TaskId(task_id)).await?;
        let job = parse_id(&detail.job_id)?;
        let attempt = which(&detail, attempt)?;
        let tail = usize::try_from(tail).unwrap_or(usize::MAX);
        if !follow {
            let kept = self
                .logs
                .read(job, attempt, tail)
                .await
                .map_err(|error| unreadable(&error))?;
            return Ok(Response::new(Box::pin(log::kept(attempt, kept))));
        }
        let followed = self.logs.follow(job, attempt, tail).await;
        let (kept, news) = followed.map_err(|error| unreadable(&error))?;
        // An attempt that had ended before it was followed ends no more.
        let detail = self.detail(TaskId(task_id)).await?;
        let news = is_running(&detail, attempt).then(|| log::news(attempt, news));
        let news = futures::stream::iter(news).flatten();
        let stream = log::kept(attempt, kept).chain(news);
        let stream = stream.take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Box::pin(stream)))
    }
}

/// The attempt that is meant: this one of the task's, or with 0 its newest.
fn which(task: &v1::TaskDetail, attempt: u64) -> Result<AttemptId, Status> {
    let known = |made: &&v1::AttemptDetail| attempt == 0 || made.id == attempt;
    let found = task.attempts.iter().rev().find(known);
    let missing = || match attempt {
        0 => Status::not_found(format!("task {} has had no attempt yet", task.id)),
        attempt => Status::not_found(format!(
            "attempt {attempt} is none of the last of task {}",
            task.id
        )),
    };
    found.map(|made| AttemptId(made.id)).ok_or_else(missing)
}

fn is_running(task: &v1::TaskDetail, attempt: AttemptId) -> bool {
    let mut made = task.attempts.iter();
    made.any(|made| made.id == attempt.0 && made.outcome == "running")
}

fn unreadable(error: &logs::Error) -> Status {
    match error {
        logs::Error::Busy | logs::Error::TooManyFollowed => Status::resource_exhausted(error.to_string()),
        logs::Error::Io { .. } => Status::internal(error.to_string()),
    }
}
