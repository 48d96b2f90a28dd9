//! The real agent with children that run errands; what is acknowledged to it goes into the ledger.

use std::fmt::Debug;

use anyhow::Result;
use clap::Parser;
use espalier_chaos::ledger::{What, note};
use espalier_chaos::process::program;
use espalier_worker::WorkerOptions;
use espalier_worker::agent::Shutdown;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

#[derive(Debug, Parser)]
struct Arguments {
    /// The coordinator's endpoint.
    #[arg(long)]
    coordinator: String,
    /// The worker's name.
    #[arg(long)]
    name: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    tracing_subscriber::registry()
        .with(text.with_filter(tracing_subscriber::filter::LevelFilter::INFO))
        .with(Acknowledgements)
        .init();
    let mut options = WorkerOptions::cpu(&arguments.coordinator, &arguments.name, 1);
    options.child.program = Some(program("chaos-child")?);
    options.child.arguments = Vec::new();
    Ok(espalier_worker::agent::run(options, Shutdown::default()).await?)
}

/// Takes acknowledgements from the agent's own log.
struct Acknowledgements;

impl<S: Subscriber> Layer<S> for Acknowledgements {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !event.metadata().target().starts_with("espalier_worker::agent") {
            return;
        }
        let mut seen = Seen::default();
        event.record(&mut seen);
        if let (true, Some(attempt)) = (seen.acknowledged, seen.attempt) {
            // A ledger that cannot be written shows as an acknowledgement that is missing.
            let _ = note(std::process::id(), attempt, What::Acknowledged);
        }
    }
}

#[derive(Default)]
struct Seen {
    acknowledged: bool,
    attempt: Option<u64>,
}

impl Visit for Seen {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "attempt" {
            self.attempt = Some(value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.acknowledged = format!("{value:?}") == "acknowledged";
        }
    }
}
