//! One trace a job, through coordinator, worker and child, as a collector receives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod kit;

use std::collections::BTreeSet;
use std::net::TcpListener as Listener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kit::{DEADLINE, Process, endpoint_of, espalier};
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

/// The spec of a job that fails at its first task: its parent is none.
fn write_spec(directory: &Path) -> PathBuf {
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
    spec
}

/// A coordinator and a worker that send their spans to the collector, as its child does. They go on until they are
/// dropped: what is told to end has little time left for the last spans.
fn start(directory: &Path, collector: &str) -> (String, [Process; 2]) {
    let traced = |arguments: &[&str], log: &str| {
        let mut command = espalier(arguments);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", collector);
        Process::spawn(command.stdout(Stdio::null()), directory.join(log))
    };
    let state = directory.join("state");
    let listen = ["coordinator", "--listen", "127.0.0.1:0", "--data-dir"];
    let coordinator = traced(
        &[&listen[..], &[state.to_str().unwrap()]].concat(),
        "coordinator.log",
    );
    let endpoint = endpoint_of(&coordinator);
    let worker = traced(&["worker", "run", "--coordinator", &endpoint], "worker.log");
    (endpoint, [coordinator, worker])
}

/// What the collector is sent, until each of these is there: a service, and how the span's name begins.
fn received<const N: usize>(
    spans: &mpsc::Receiver<(String, Span)>,
    wanted: [(&str, &str); N],
) -> (Vec<Span>, [Span; N]) {
    let (mut all, mut found) = (Vec::new(), [const { None }; N]);
    let began = Instant::now();
    while found.iter().any(Option::is_none) {
        let left = DEADLINE.saturating_sub(began.elapsed());
        let (service, span) = spans
            .recv_timeout(left)
            .unwrap_or_else(|_| panic!("of {wanted:?} only {found:?} came: {all:#?}"));
        for ((of, name), found) in wanted.iter().zip(&mut found) {
            if service == *of && span.name.starts_with(name) {
                found.get_or_insert_with(|| span.clone());
            }
        }
        all.push(span);
    }
    (all, found.map(Option::unwrap))
}

#[test]
fn a_job_is_one_trace_through_coordinator_worker_and_child() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (collector, spans) = collector(&runtime);
    let directory = tempfile::tempdir().unwrap();
    let (endpoint, _running) = start(directory.path(), &collector);
    let spec = write_spec(directory.path());
    let submit = [
        "job",
        "submit",
        spec.to_str().unwrap(),
        "--coordinator",
        &endpoint,
    ];
    let submitted = espalier(&submit).output().unwrap();
    assert!(submitted.status.success(), "{submitted:?}");
    let wanted = [
        ("espalier-coordinator", "job job-1"),
        ("espalier-coordinator", "attempt"),
        ("espalier-worker", "attempt"),
        ("espalier-child", "attempt"),
    ];
    let (all, [job, attempt, agents, childs]) = received(&spans, wanted);
    let traces: BTreeSet<&[u8]> = all.iter().map(|span| span.trace_id.as_slice()).collect();
    assert_eq!(traces.len(), 1, "{all:#?}");
    assert!(job.parent_span_id.is_empty());
    assert_eq!(
        agents.parent_span_id, attempt.span_id,
        "the worker's hang below the attempt's"
    );
    assert_eq!(
        childs.parent_span_id, agents.span_id,
        "the child's hang below the worker's"
    );
    assert!(attempt.start_time_unix_nano <= attempt.end_time_unix_nano);
}

/// Runs a job that ends soon; gives how long that took.
fn run_a_job(endpoint: &str) -> Duration {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_spec(directory.path());
    let began = Instant::now();
    let output = espalier(&["run", spec.to_str().unwrap()])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code().unwrap_or_else(|| panic!("killed: {errors}"));
    assert_eq!(code, 1, "the job has to fail at its first task: {errors}");
    began.elapsed()
}

#[test]
fn a_collector_that_does_not_answer_delays_nothing() {
    // It takes connections and says nothing.
    let silent = Listener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    for endpoint in [silent.as_str(), "no address at all"] {
        let took = run_a_job(endpoint);
        assert!(took < DEADLINE, "{endpoint}: {took:?}");
    }
}
