//! `espalier`: fits a language model to a measured limit.
//!
//! Standard output is data, standard error everything else. [`args`] says what can be asked, one module
//! a command does it, [`output`] writes what they found, [`failure`] turns errors into exit codes.

mod args;
mod commands;
mod embedded;
mod failure;
mod output;
mod progress;
mod telemetry;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command, JobCommand, WorkerCommand};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let ended = start(arguments);
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error),
    }
}

fn start(arguments: Arguments) -> anyhow::Result<()> {
    let (quiet, service) = match arguments.command {
        Command::Run(_) => (true, "espalier"),
        Command::Coordinator(_) => (false, "espalier-coordinator"),
        Command::Worker(_) => (false, "espalier-worker"),
        Command::DeviceChild => (false, "espalier-child"),
        _ => (true, "espalier-client"),
    };
    let filter = arguments.log.as_deref();
    let filter = filter.unwrap_or(if quiet { "error" } else { "info" });
    let telemetry = telemetry::start(filter, arguments.log_format, service)?;
    let ended = run(arguments.command);
    telemetry.end();
    ended
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Schema => output::print_json(&espalier_coordinator::spec::json_schema()),
        // The child runs attempts on this very thread and has no use for a runtime.
        Command::DeviceChild => Ok(espalier_worker::run_child()?),
        Command::Run(run) => runtime()?.block_on(embedded::run(run)),
        Command::Coordinator(coordinator) => runtime()?.block_on(commands::coordinator(coordinator)),
        Command::Worker(WorkerCommand::Run(worker)) => runtime()?.block_on(commands::worker(worker)),
        Command::Job(job) => runtime()?.block_on(job_command(job)),
    }
}

async fn job_command(command: JobCommand) -> anyhow::Result<()> {
    match command {
        JobCommand::Submit(arguments) => commands::submit(arguments).await,
        JobCommand::List(arguments) => commands::list(arguments).await,
        JobCommand::Get(arguments) => commands::get(arguments).await,
        JobCommand::Watch(arguments) => commands::watch(arguments).await,
        JobCommand::Wait(arguments) => commands::wait(arguments).await,
        JobCommand::Cancel(arguments) => commands::cancel(arguments).await,
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?)
}
