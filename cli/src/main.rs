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
mod signals;
mod telemetry;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use espalier_worker::engine::vllm::{Deadlines, VllmOptions};

use args::{Arguments, Command, DeviceCommand, Logging, ProfileCommand, WorkerCommand};
use commands::keep;

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
        Command::Run(_) | Command::Profile(ProfileCommand::Run(_)) => (true, "espalier"),
        Command::Coordinator(_) => (false, "espalier-coordinator"),
        Command::Worker(WorkerCommand::Run(_)) => (false, "espalier-worker"),
        Command::DeviceChild { .. } => (false, "espalier-child"),
        _ => (true, "espalier-client"),
    };
    let filter = arguments.logging.log.as_deref();
    let filter = filter.unwrap_or(if quiet { "error" } else { "info" });
    let telemetry = telemetry::start(filter, arguments.logging.log_format, service)?;
    let ended = run(arguments.command, &arguments.logging, &telemetry);
    telemetry.end();
    ended
}

fn run(command: Command, logging: &Logging, telemetry: &telemetry::Telemetry) -> anyhow::Result<()> {
    match command {
        Command::Schema => output::print_json(&espalier_coordinator::spec::json_schema()),
        // The child runs attempts on this very thread and has no use for a runtime.
        Command::DeviceChild {
            device,
            memory_limit,
            hang_timeout,
            vllm,
        } => {
            let vllm = VllmOptions {
                environment: vllm.environment(),
                deadlines: Deadlines::default().within(hang_timeout),
                ..VllmOptions::default()
            };
            let assigned = espalier_worker::Assigned {
                device,
                memory_limit,
                vllm,
            };
            Ok(espalier_worker::run_child(assigned, telemetry.end_of_child())?)
        }
        Command::DeviceLook { device } => commands::device::look(device),
        Command::Plan(asked) => runtime()?.block_on(commands::plan::run(&asked)),
        Command::Profile(ProfileCommand::Run(run)) => runtime()?.block_on(embedded::profile(*run, logging)),
        Command::Profile(ProfileCommand::Tables(command)) => {
            runtime()?.block_on(commands::profile::run(command))
        }
        Command::Estimate(asked) => commands::estimate::run(&asked),
        Command::Device(DeviceCommand::List { how }) => commands::device::list(how),
        Command::Run(run) => runtime()?.block_on(embedded::run(run, logging)),
        Command::Coordinator(coordinator) => {
            espalier_coordinator::memory::stay_small();
            runtime()?.block_on(commands::coordinator(coordinator))
        }
        Command::Worker(worker) => runtime()?.block_on(worker_command(worker, logging)),
        Command::Job(job) => runtime()?.block_on(commands::job::run(job)),
        Command::Task(task) => runtime()?.block_on(commands::task::run(task)),
        Command::Doctor(doctor) => commands::doctor::run(doctor),
        Command::Completion { shell } => completion(shell),
    }
}

async fn worker_command(command: WorkerCommand, logging: &Logging) -> anyhow::Result<()> {
    match command {
        WorkerCommand::Run(arguments) => commands::worker(arguments, logging).await,
        WorkerCommand::List(arguments) => keep::list(arguments).await,
        WorkerCommand::Get(arguments) => keep::get(arguments).await,
        WorkerCommand::Cordon(arguments) => keep::cordon(arguments).await,
        WorkerCommand::Uncordon(arguments) => keep::uncordon(arguments).await,
        WorkerCommand::Drain(arguments) => keep::drain(arguments).await,
        WorkerCommand::Restart(arguments) => keep::restart(arguments).await,
    }
}

fn completion(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "espalier", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?)
}
