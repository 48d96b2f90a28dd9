//! Clients that follow jobs, as `job watch` does.

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

/// Follows the newest unfinished job, and the next one when that ends, until standard input closes.
#[tokio::main(flavor = "current_thread")]
pub async fn run(options: &Options) -> Result<()> {
    let mut clients = JoinSet::new();
    for _ in 0..options.clients {
        clients.spawn(follow(options.endpoint.clone()));
    }
    tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await?;
    let mut snapshots = 0;
    while let Some(ended) = clients.try_join_next() {
        snapshots += ended??;
    }
    clients.shutdown().await;
    anyhow::ensure!(snapshots == 0, "a client ended before it was told to");
    Ok(())
}

async fn follow(endpoint: String) -> Result<u64> {
    let mut client = Client::connect(&endpoint, DEADLINE).await?;
    let mut snapshots: u64 = 1;
    loop {
        let (jobs, _) = client.list(8, "", &[]).await?;
        let running = jobs.iter().rev().find(|job| job.finished_unix_ms == 0);
        let Some(job) = running else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let mut following = client.watch(&job.id, 0).await?;
        while following.next().await?.is_some() {
            snapshots = snapshots.saturating_add(1);
        }
    }
}
