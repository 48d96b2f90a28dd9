//! `/api/v1/…`: what is, as JSON, in pages of bounded size.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use espalier_proto::json;
use espalier_proto::v1::{GetRequest, GetTaskRequest, JobState, ListRequest, ListTasksRequest, TaskState};
use serde::Deserialize;
use serde_json::Value;
use tonic::{Code, Status};

use super::{Sources, problem};

/// Tasks on a page unless asked otherwise, so that the first page of a large job is small too.
const TASKS: u32 = 100;

/// A page and what is on it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    state: String,
    stage: String,
    page_size: u32,
    page_token: String,
}

type Asked = Result<Query<Wanted>, QueryRejection>;

/// `/api/v1/jobs?state=&page_size=&page_token=`.
pub async fn jobs(State(sources): State<Sources>, asked: Asked) -> Result<Json<Value>, Refused> {
    let Query(wanted) = asked?;
    let request = ListRequest {
        page_size: wanted.page_size,
        page_token: wanted.page_token,
        states: states(&wanted.state, JOB_STATES, json::job_state)?
            .into_iter()
            .map(i32::from)
            .collect(),
    };
    let page = sources.reads.jobs(request).await?;
    let jobs: Value = page.jobs.iter().map(|job| json::job(job, false)).collect();
    Ok(Json(
        serde_json::json!({ "jobs": jobs, "next_page_token": page.next_page_token }),
    ))
}

/// `/api/v1/jobs/{id}`.
pub async fn job(State(sources): State<Sources>, Path(id): Path<String>) -> Result<Json<Value>, Refused> {
    let found = sources
        .reads
        .job(GetRequest { job_id: id })
        .await?
        .job
        .unwrap_or_default();
    Ok(Json(json::job(&found, true)))
}

/// `/api/v1/jobs/{id}/tasks?state=&stage=&page_size=&page_token=`.
pub async fn tasks(
    State(sources): State<Sources>,
    Path(job_id): Path<String>,
    asked: Asked,
) -> Result<Json<Value>, Refused> {
    let Query(wanted) = asked?;
    let request = ListTasksRequest {
        job_id,
        states: states(&wanted.state, TASK_STATES, json::task_state)?
            .into_iter()
            .map(i32::from)
            .collect(),
        stage: wanted.stage,
        page_size: if wanted.page_size == 0 {
            TASKS
        } else {
            wanted.page_size
        },
        page_token: wanted.page_token,
    };
    let page = sources.reads.tasks(request).await?;
    let tasks: Value = page.tasks.iter().map(|task| json::task(task, false)).collect();
    Ok(Json(
        serde_json::json!({ "tasks": tasks, "next_page_token": page.next_page_token }),
    ))
}

/// `/api/v1/tasks/{id}`.
pub async fn task(State(sources): State<Sources>, Path(id): Path<String>) -> Result<Json<Value>, Refused> {
    let wrong = || Status::invalid_argument(format!("`{id}` is not a task id: one is a number"));
    let task_id = id.parse().map_err(|_| wrong())?;
    let found = sources.reads.task(GetTaskRequest { task_id }).await?;
    Ok(Json(json::task(&found.task.unwrap_or_default(), true)))
}

/// `/api/v1/workers`.
pub async fn workers(State(sources): State<Sources>) -> Result<Json<Value>, Refused> {
    let workers = sources.reads.workers().await?.workers;
    Ok(Json(
        serde_json::json!({ "workers": workers.iter().map(json::worker).collect::<Value>() }),
    ))
}

/// `/api/v1/health`.
pub async fn health(State(sources): State<Sources>) -> Json<Value> {
    let (alive, ready) = (sources.vitals.alive(), sources.vitals.ready());
    let ship_lag = sources.metrics.ship_lag();
    Json(serde_json::json!({
        "alive": alive.is_ok(),
        "ready": ready.is_ok(),
        "reason": ready.err().unwrap_or_default(),
        "disk_full": sources.vitals.is_disk_full(),
        "unreadable_archives": sources.metrics.unreadable_archives(),
        "ship_lag_ms": ship_lag.map(|lag| u64::try_from(lag.as_millis()).unwrap_or(u64::MAX)),
        "version": env!("CARGO_PKG_VERSION"),
    }))
}

const JOB_STATES: &[JobState] = &[
    JobState::Queued,
    JobState::Running,
    JobState::Paused,
    JobState::Succeeded,
    JobState::Failed,
    JobState::Cancelled,
];
const TASK_STATES: &[TaskState] = &[
    TaskState::Waiting,
    TaskState::Running,
    TaskState::Done,
    TaskState::Failed,
    TaskState::Abandoned,
];

/// `running,failed` as states; none for an empty text.
fn states<S: Copy>(text: &str, known: &[S], name: fn(S) -> &'static str) -> Result<Vec<S>, Status> {
    let words = text.split(',').filter(|word| !word.is_empty());
    let state = |word: &str| {
        let found = known.iter().copied().find(|state| name(*state) == word);
        found.ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|state| name(*state)).collect();
            Status::invalid_argument(format!("state: `{word}` is none: expected {}", names.join(", ")))
        })
    };
    words.map(state).collect()
}

/// Why there is no answer.
#[derive(Debug)]
pub struct Refused(StatusCode, String);

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        let code = match status.code() {
            Code::InvalidArgument => StatusCode::BAD_REQUEST,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::ResourceExhausted | Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(code, status.message().to_owned())
    }
}

impl From<QueryRejection> for Refused {
    fn from(rejection: QueryRejection) -> Self {
        Self(StatusCode::BAD_REQUEST, rejection.body_text())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        problem(self.0, &self.1)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn states_are_read_and_a_wrong_one_is_told_what_would_be_right() {
        let read = |text| states(text, TASK_STATES, json::task_state);
        assert!(read("").unwrap().is_empty());
        assert_eq!(
            read("running,failed").unwrap(),
            [TaskState::Running, TaskState::Failed]
        );
        let wrong = read("broken").unwrap_err();
        assert!(
            wrong
                .message()
                .contains("`broken` is none: expected waiting, running")
        );
    }
}
