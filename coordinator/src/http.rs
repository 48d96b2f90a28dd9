//! What people and probes see over HTTP, on the port that gRPC has too.
//!
//! [`server`] serves both over one listener, [`health`] says whether the coordinator lives and is ready,
//! [`api`] answers in JSON and [`page`] for people. Nothing here changes anything, and nothing here touches
//! the state: what is shown was asked for, through [`reads`].

mod api;
pub mod health;
mod page;
pub mod reads;
pub mod server;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};

use crate::metrics::Metrics;
pub use health::Vitals;
pub use reads::{Reads, Services};
pub use server::serve;

/// What the pages are made from.
#[derive(Clone)]
pub struct Sources {
    /// Jobs, tasks and workers.
    pub reads: Arc<dyn Reads>,
    /// What is counted.
    pub metrics: Metrics,
    /// Whether the coordinator lives and is ready.
    pub vitals: Vitals,
}

/// The pages and the gRPC services as one router.
pub fn router(sources: Sources, grpc: tonic::service::Routes) -> Router {
    let pages = Router::new()
        .route("/", get(page::status))
        .route("/status.js", get(page::script))
        .route("/api/v1/jobs", get(api::jobs))
        .route("/api/v1/jobs/{job}", get(api::job))
        .route("/api/v1/jobs/{job}/tasks", get(api::tasks))
        .route("/api/v1/tasks/{task}", get(api::task))
        .route("/api/v1/workers", get(api::workers))
        .route("/api/v1/health", get(api::health))
        .route("/metrics", get(metrics))
        .route("/healthz", get(health::alive))
        .route("/readyz", get(health::ready))
        .with_state(sources);
    grpc.into_axum_router().merge(pages).fallback(unknown)
}

/// `/metrics`, as OpenMetrics. Looks at the disk for the journal's size, and so runs apart.
async fn metrics(State(sources): State<Sources>) -> Response {
    let content = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match tokio::task::spawn_blocking(move || sources.metrics.text()).await {
        Ok(text) => ([(header::CONTENT_TYPE, content)], text).into_response(),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// A path that nobody serves, said in the caller's own language.
async fn unknown(request: Request) -> Response {
    let content = request.headers().get(header::CONTENT_TYPE);
    let is_grpc = content.is_some_and(|content| content.as_bytes().starts_with(b"application/grpc"));
    if is_grpc {
        return tonic::Status::unimplemented("this coordinator has no such method").into_http();
    }
    problem(StatusCode::NOT_FOUND, "there is no such page")
}

/// A refusal as JSON, one line.
fn problem(status: StatusCode, message: &str) -> Response {
    let body = serde_json::json!({ "error": message });
    (status, Json(body)).into_response()
}
