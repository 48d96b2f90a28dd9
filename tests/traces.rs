//! One trace a job, through coordinator, worker and child, as a collector receives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::net::TcpListener as Listener;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Longer than anything here takes on a busy machine; only a failure waits for it.
const DEADLINE: Duration = Duration::from_secs(120);

/// Hands on every span with the name of the service that sent it.
struct Collector(mpsc::Sender<(String, Span)>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for from in request.into_inner().resource_spans {
            let attributes = from.resource.unwrap_or_default().attributes;
            let name = attributes
                .iter()
                .find(|attribute| attribute.key == "service.name");
            let name = name.and_then(|name| name.value.clone()?.value);
            let Some(Value::StringValue(service)) = name else {
                panic!("spans of a service without a name");
            };
            for span in from.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                self.0.send((service.clone(), span)).unwrap();
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector that lives as long as its runtime.
fn collector(runtime: &tokio::runtime::Runtime) -> (String, mpsc::Receiver<(String, Span)>) {
    let (sender, spans) = mpsc::channel();
    let listener = runtime
        .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
        .unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let server = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(Collector(sender)))
        .serve_with_incoming(TcpListenerStream::new(listener));
    runtime.spawn(server);
    (endpoint, spans)
}

/// Runs a job that ends soon: its parent is none.
fn run_a_job(directory: &Path, endpoint: &str) -> (i32, Duration) {
    let at = directory.display();
    std::fs::create_dir_all(directory.join("parent")).unwrap();
    std::fs::write(directory.join("parent/config.json"), "{}").unwrap();
    std::fs::write(directory.join("text.txt"), "some text\n").unwrap();
    let spec = directory.join("job.yaml");
    let text = format!(
        "parent: {at}/parent\ndata: {{train: [{at}/text.txt]}}\ntarget:\n  workload: {{prompt_tokens: 8, \
         output_tokens: 8, concurrency: 1}}\n  limits: {{latency: 75%}}\noutput: {at}/out\n"
    );
    std::fs::write(&spec, text).unwrap();
    let began = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(["run", spec.to_str().unwrap()])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code().unwrap_or_else(|| panic!("killed: {errors}"));
    assert_eq!(code, 1, "the job has to fail at its first task: {errors}");
    (code, began.elapsed())
}

#[test]
fn a_job_is_one_trace_through_coordinator_worker_and_child() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (endpoint, spans) = collector(&runtime);
    let directory = tempfile::tempdir().unwrap();
    run_a_job(directory.path(), &endpoint);
    let mut seen: Vec<(String, Span)> = Vec::new();
    let services = |seen: &[(String, Span)]| -> BTreeSet<String> {
        seen.iter().map(|(service, _)| service.clone()).collect()
    };
    let has_root = |seen: &[(String, Span)]| seen.iter().any(|(_, span)| span.parent_span_id.is_empty());
    let began = Instant::now();
    while services(&seen).len() < 3 || !has_root(&seen) {
        let left = DEADLINE.saturating_sub(began.elapsed());
        let span = spans.recv_timeout(left);
        seen.push(span.unwrap_or_else(|_| panic!("only {:?} sent spans: {seen:#?}", services(&seen))));
    }
    let expected = ["espalier", "espalier-child", "espalier-worker"].map(str::to_owned);
    assert_eq!(services(&seen), BTreeSet::from(expected));
    let traces: BTreeSet<&[u8]> = seen.iter().map(|(_, span)| span.trace_id.as_slice()).collect();
    assert_eq!(traces.len(), 1, "{seen:#?}");
    let named = |name: &str| {
        seen.iter()
            .map(|(_, span)| span)
            .find(|span| span.name.starts_with(name))
    };
    let job = named("job job-1").expect("the job's own span");
    let attempt = seen
        .iter()
        .find(|(service, span)| service == "espalier" && span.name.starts_with("attempt"))
        .map(|(_, span)| span)
        .expect("the coordinator's span of the attempt");
    let agent = seen
        .iter()
        .find(|(service, _)| service == "espalier-worker")
        .map(|(_, span)| span);
    assert!(job.parent_span_id.is_empty());
    assert_eq!(
        agent.unwrap().parent_span_id,
        attempt.span_id,
        "the worker's hang below the attempt's"
    );
    assert!(attempt.start_time_unix_nano <= attempt.end_time_unix_nano);
}

#[test]
fn a_collector_that_does_not_answer_delays_nothing() {
    // It takes connections and says nothing.
    let silent = Listener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let (_, took) = run_a_job(directory.path(), &endpoint);
    assert!(took < DEADLINE, "{took:?}");
    let elsewhere = tempfile::tempdir().unwrap();
    let (_, took) = run_a_job(elsewhere.path(), "no address at all");
    assert!(took < DEADLINE, "{took:?}");
}
