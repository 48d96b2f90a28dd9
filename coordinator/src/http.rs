//! What people and probes see over HTTP, on the port that gRPC has too.
//!
//! [`server`] serves both over one listener, [`health`] says whether the coordinator lives and is ready.
//! Nothing here changes anything, and nothing here touches the state: what is shown was asked for.

pub mod health;
pub mod server;

use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};

pub use health::Vitals;
pub use server::serve;

/// What the pages are made from.
#[derive(Debug, Clone)]
pub struct Sources {
    /// Whether the coordinator lives and is ready.
    pub vitals: Vitals,
}

/// The pages and the gRPC services as one router.
pub fn router(sources: Sources, grpc: tonic::service::Routes) -> Router {
    let pages = Router::new()
        .route("/healthz", get(health::alive))
        .route("/readyz", get(health::ready))
        .with_state(sources);
    grpc.into_axum_router().merge(pages).fallback(unknown)
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
