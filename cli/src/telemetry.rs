//! Logs to standard error, and traces to a collector where one is named.
//!
//! Logs are text or JSON, one line each. Traces go over OTLP when the standard variables name an endpoint;
//! they are sent by threads of their own, and a collector that is slow, gone or wrong costs spans, never work.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Context;
use opentelemetry::global;
use opentelemetry::trace::{SpanId, TraceId, TracerProvider};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, IdGenerator, RandomIdGenerator, SdkTracerProvider,
};
use tokio::runtime::Runtime;
use tracing::{Level, Metadata};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, filter};

use crate::args::LogFormat;
use crate::failure;

/// The standard variables that name a collector.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
];
/// A span waits no longer before it is sent: a child may be killed at any time.
const DELAY: Duration = Duration::from_millis(50);
/// How long the collector may take over a batch.
const EXPORT: Duration = Duration::from_secs(3);
/// How long the end of the process may wait for the last spans.
const FLUSH: Duration = Duration::from_secs(2);
/// The same for a device child: its agent kills it when that takes long.
const CHILD_FLUSH: Duration = Duration::from_millis(500);

/// What runs until the process ends.
pub(crate) struct Telemetry(Option<Traces>);

struct Traces {
    provider: SdkTracerProvider,
    runtime: Runtime,
}

/// Starts logging, and tracing where a collector is named. `service` names this process in traces.
pub(crate) fn start(filter: &str, format: LogFormat, service: &'static str) -> anyhow::Result<Telemetry> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| failure::usage(format!("--log: `{filter}` is no log filter: {error}")))?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none());
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let traces = is_wanted().then(|| traces(service)).transpose();
    let spans = traces.as_ref().ok().and_then(Option::as_ref).map(|traces| {
        let tracer = traces.provider.tracer("espalier");
        let spans = tracing_opentelemetry::layer().with_tracer(tracer);
        spans.with_filter(filter::filter_fn(is_ours))
    });
    tracing_subscriber::registry()
        .with(spans)
        .with(lines.with_filter(filter))
        .init();
    let traces = traces.unwrap_or_else(|error| {
        tracing::warn!(error = format!("{error:#}"), "no traces are sent");
        None
    });
    Ok(Telemetry(traces))
}

impl Telemetry {
    /// Sends what is left, within a deadline.
    pub(crate) fn end(self) {
        let Some(Traces { provider, runtime }) = self.0 else {
            return;
        };
        send_the_last(&provider, FLUSH);
        runtime.shutdown_background();
    }

    /// The same for a device child, which ends on a thread of its own and never gets to [`Telemetry::end`].
    pub(crate) fn end_of_child(&self) -> impl FnOnce() + Send + use<> {
        let provider = self.0.as_ref().map(|traces| traces.provider.clone());
        move || {
            if let Some(provider) = provider {
                send_the_last(&provider, CHILD_FLUSH);
            }
        }
    }
}

fn send_the_last(provider: &SdkTracerProvider, within: Duration) {
    if let Err(error) = provider.shutdown_with_timeout(within) {
        tracing::debug!(%error, "the last spans are not sent");
    }
}

fn is_wanted() -> bool {
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_disabled =
        std::env::var("OTEL_SDK_DISABLED").is_ok_and(|value| value.eq_ignore_ascii_case("true"));
    ENDPOINTS.iter().any(is_set) && !is_disabled
}

/// The program's own spans; libraries' would drown them.
fn is_ours(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && *metadata.level() <= Level::INFO && metadata.target().starts_with("espalier")
}

fn traces(service: &'static str) -> anyhow::Result<Traces> {
    // The exporter speaks gRPC and needs a runtime, in the child too, which has none.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("espalier-traces")
        .enable_all()
        .build()
        .context("cannot start a thread for traces")?;
    let entered = runtime.enter();
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_timeout(EXPORT)
        .build()
        .context("the collector's address cannot be used")?;
    drop(entered);
    let config = BatchConfigBuilder::default().with_scheduled_delay(DELAY).build();
    let processor = BatchSpanProcessor::builder(exporter)
        .with_batch_config(config)
        .build();
    let mut resource = Resource::builder();
    if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
        resource = resource.with_service_name(service);
    }
    let provider = SdkTracerProvider::builder()
        .with_span_processor(processor)
        .with_id_generator(Ids::default())
        .with_resource(resource.build())
        .build();
    global::set_tracer_provider(provider.clone());
    global::set_text_map_propagator(TraceContextPropagator::new());
    espalier_coordinator::trace::exporter_is_in_place();
    Ok(Traces { provider, runtime })
}

/// Random ids, save for spans whose ids the coordinator derives.
#[derive(Debug, Default)]
struct Ids {
    random: RandomIdGenerator,
}

impl IdGenerator for Ids {
    fn new_trace_id(&self) -> TraceId {
        let claimed = espalier_coordinator::trace::claimed_trace_id();
        claimed.unwrap_or_else(|| self.random.new_trace_id())
    }

    fn new_span_id(&self) -> SpanId {
        let claimed = espalier_coordinator::trace::claimed_span_id();
        claimed.unwrap_or_else(|| self.random.new_span_id())
    }
}
