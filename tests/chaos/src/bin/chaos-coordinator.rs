//! The real coordinator, planning errands.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;
use espalier_chaos::story::Story;
use espalier_coordinator::{Coordinator, CoordinatorOptions};

#[derive(Debug, Parser)]
struct Arguments {
    /// Where it listens.
    #[arg(long)]
    listen: SocketAddr,
    /// Its data directory.
    #[arg(long)]
    data_dir: PathBuf,
    /// JSON of the story that it plans.
    #[arg(long)]
    story: String,
    /// Silence after which a worker is given up, milliseconds.
    #[arg(long)]
    worker_lost_ms: u64,
    /// An artifact store outside the data directory.
    #[arg(long)]
    store: Option<String>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::INFO)
        .init();
    let story: Story = serde_json::from_str(&arguments.story)?;
    let mut options = CoordinatorOptions::new(&arguments.data_dir);
    options.listen = arguments.listen;
    options.store = arguments.store;
    options.worker_lost = Duration::from_millis(arguments.worker_lost_ms);
    options.heartbeat_interval = Duration::from_millis(500);
    let handle = Coordinator::start_with(options, Arc::new(story)).await?;
    bail!("the coordinator has stopped: {}", handle.failed().await)
}
