//! `make check-dispatch`: a coordinator in a process of its own, workers that speak the real protocol over
//! loopback from another, and what handing out and taking back a task costs.
//!
//! `espalier-dispatch check` starts the others: `coordinate` (the real coordinator with a planner that knows
//! only tasks without content), `work` (workers of several devices that complete at once or after a while,
//! and measure) and `watch` (clients that follow jobs). No model, no data and no child process take part:
//! what is measured is the coordinator.

mod check;
mod coordinate;
mod process;
mod watch;
mod work;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(about = "Measures how fast a coordinator hands out and takes back tasks")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a coordinator until its standard input closes; prints its endpoint.
    Coordinate(coordinate::Options),
    /// Runs workers against a coordinator and prints one line of JSON.
    Work(work::Options),
    /// Follows every job of a coordinator with many clients until its standard input closes.
    Watch(watch::Options),
    /// Measures all of it and says whether the limits hold.
    Check(check::Options),
}

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .init();
    let arguments = Arguments::parse();
    match arguments.command {
        Command::Coordinate(options) => coordinate::run(&options),
        Command::Work(options) => work::run(&options),
        Command::Watch(options) => watch::run(&options),
        Command::Check(options) => check::run(&options),
    }
}
