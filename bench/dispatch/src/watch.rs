//! Clients that follow jobs, as `job watch` does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use espalier_coordinator::client::Client;
use tokio::task::JoinSet;

const DEADLINE: Duration = Duration::from_secs(10);

/// How many, and where.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The coordinator.
    #[arg(long)]
    endpoint: String,
    /// How many follow.
    #[arg(long, default_value_t = 50)]
    clients: usize,
}

/// Follows the newest unfinished job, and the next one when that ends, until standard input closes; then
/// prints how many snapshots the client that saw the fewest has seen.
#[tokio::main(flavor = "current_thread")]
pub async fn run(options: &Options) -> Result<()> {
    let mut clients = JoinSet::new();
    let mut seen = Vec::new();
    for _ in 0..options.clients {
        let snapshots = Arc::new(AtomicU64::new(0));
        seen.push(Arc::clone(&snapshots));
        clients.spawn(follow(options.endpoint.clone(), snapshots));
    }
    let (mut stdin, mut nowhere) = (tokio::io::stdin(), tokio::io::sink());
    tokio::select! {
        closed = tokio::io::copy(&mut stdin, &mut nowhere) => closed.map(drop)?,
        Some(ended) = clients.join_next() => anyhow::bail!("a client ended early: {:?}", ended?.err()),
    }
    clients.shutdown().await;
    let fewest = seen
        .iter()
        .map(|snapshots| snapshots.load(Ordering::Relaxed))
        .min();
    say(fewest.unwrap_or(0));
    Ok(())
}

#[allow(clippy::print_stdout)] // the answer of this process
fn say(fewest: u64) {
    println!("{fewest}");
}

/// Ends only when it fails.
async fn follow(endpoint: String, snapshots: Arc<AtomicU64>) -> Result<()> {
    let mut client = Client::connect(&endpoint, DEADLINE).await?;
    loop {
        let (jobs, _) = client.list(8, "", &[]).await?;
        let running = jobs.iter().rev().find(|job| job.finished_unix_ms == 0);
        let Some(job) = running else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let mut following = client.watch(&job.id, 0).await?;
        while following.next().await?.is_some() {
            snapshots.fetch_add(1, Ordering::Relaxed);
        }
    }
}
