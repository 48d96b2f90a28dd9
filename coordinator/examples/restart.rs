//! Measures how long a coordinator with a million past tasks takes to be ready: `make check-restart`.
//!
//! `restart build KIND DIR` makes a data directory, `restart start DIR` starts a coordinator on it and prints
//! the seconds until it has answered a listing of its jobs.

#![allow(clippy::print_stdout)] // its figure is its answer

#[path = "../tests/common/past.rs"]
mod past;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use espalier_coordinator::client::Client;
use espalier_coordinator::journal::Options;
use espalier_coordinator::journal::disk::{Disk, SystemDisk};
use espalier_coordinator::{Coordinator, CoordinatorOptions};
use past::Past;

/// Past tasks.
const TASKS: usize = 1_000_000;
/// Jobs they are in, where they are archived.
const JOBS: usize = 100;
/// Nobody waits longer for an answer.
const DEADLINE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["build", "archived", directory] => build_archived(Path::new(directory)),
        ["build", "live", directory] => build_live(Path::new(directory)),
        ["start", directory] => return start(Path::new(directory)),
        _ => {
            eprintln!("usage: restart build archived|live DIR, restart start DIR");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn open(directory: &Path) -> Past {
    let disk: Arc<dyn Disk> = Arc::new(SystemDisk);
    let mut past = Past::open(&disk, directory, Options::default());
    past.keeps_events = false;
    past
}

/// A hundred ended jobs in archives, and one that goes on.
fn build_archived(directory: &Path) {
    let mut past = open(directory);
    for _ in 0..JOBS {
        let job = past.job(TASKS / JOBS, TASKS / JOBS);
        past.end(job);
        past.archive(job);
    }
    past.job(1_000, 500);
}

/// One job that goes on, with a million tasks done.
fn build_live(directory: &Path) {
    open(directory).job(TASKS + 1_000, TASKS);
}

fn start(directory: &Path) -> ExitCode {
    match measure(directory) {
        Ok((seconds, jobs)) => {
            println!("{seconds:.2} s until ready, {jobs} jobs listed");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(directory: &Path) -> Result<(f64, usize), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let mut options = CoordinatorOptions::new(directory);
        options.listen = "127.0.0.1:0".parse()?;
        let began = Instant::now();
        let handle = Coordinator::start(options).await?;
        let mut client = Client::connect(&handle.endpoint(), DEADLINE).await?;
        let jobs = client.list(500, "", &[]).await?.0.len();
        let seconds = began.elapsed().as_secs_f64();
        handle.shutdown(DEADLINE).await?;
        Ok((seconds, jobs))
    })
}
