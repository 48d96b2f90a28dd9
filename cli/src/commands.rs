//! The commands that talk to a coordinator, and those that are one or a worker.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use espalier_coordinator::client::Client;
use espalier_coordinator::spec::JobSpec;
use espalier_coordinator::{Coordinator, CoordinatorOptions};
use espalier_proto::v1::{Job, JobState, submit_request::Spec};
use espalier_worker::WorkerOptions;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::{self, Format, Remote};
use crate::{failure, output, progress};

const SHUTDOWN: Duration = Duration::from_secs(20);

/// Reads a spec from its file; `output`, given on the command line, is taken from the working directory.
pub(crate) fn read_spec(path: &Path, output: Option<PathBuf>) -> anyhow::Result<JobSpec> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| failure::usage(format!("cannot read the spec {shown}: {error}")))?;
    let path = std::path::absolute(path)?;
    let base = path.parent().unwrap_or_else(|| Path::new("/"));
    let wrong = |error| failure::usage(format!("{shown}: {error}"));
    let mut spec = JobSpec::from_yaml(&text, base).map_err(wrong)?;
    if let Some(output) = output {
        spec.output = Some(std::path::absolute(output)?.to_string_lossy().into_owned());
    }
    spec.check_files().map_err(wrong)?;
    spec.import_files().map_err(wrong)?;
    match &spec.output {
        None => Err(failure::usage(format!(
            "{shown}: output: missing; name the directory to write the outcome to, or give --output"
        ))),
        Some(output) if Path::new(output).symlink_metadata().is_ok() => Err(failure::conflict(format!(
            "output: {output} exists; name a directory that does not, or remove it"
        ))),
        Some(_) => Ok(spec),
    }
}

/// Ends when the process is asked to.
pub(crate) async fn asked_to_stop() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hung_up = signal(SignalKind::hangup())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        _ = terminate.recv() => {}
        _ = hung_up.recv() => {}
    }
    Ok(())
}

pub(crate) async fn coordinator(arguments: args::Coordinator) -> anyhow::Result<()> {
    let mut options = CoordinatorOptions::new(arguments.data_dir);
    options.listen = arguments.listen;
    options.store = arguments.store;
    let handle = Coordinator::start(options).await?;
    let failed = tokio::select! {
        asked = asked_to_stop() => { asked?; None }
        reason = handle.failed() => Some(reason),
    };
    handle.shutdown(SHUTDOWN).await?;
    failed.map_or(Ok(()), |reason| Err(failure::job(reason)))
}

pub(crate) async fn worker(arguments: args::Worker) -> anyhow::Result<()> {
    if arguments.with_parent {
        end_with_parent();
    }
    let name = arguments.name.unwrap_or_else(host_name);
    let mut options = WorkerOptions::cpu(&arguments.coordinator, &name, arguments.threads);
    options.host = host_name();
    options.drain_timeout = arguments.drain_timeout;
    let shutdown = CancellationToken::new();
    let running = espalier_worker::run(options, shutdown.clone());
    tokio::pin!(running);
    tokio::select! {
        ended = &mut running => return Ok(ended?),
        asked = asked_to_stop() => asked?,
    }
    shutdown.cancel();
    Ok(running.await?)
}

/// Asks the kernel to terminate this process when the thread that started it ends.
fn end_with_parent() {
    // SAFETY: prctl and getppid touch no memory of ours.
    let orphaned = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
        libc::getppid() == 1
    };
    if orphaned && std::process::id() != 1 {
        tracing::warn!("the process that started this worker may be gone already");
    }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain = |character: &char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.');
    let name: String = name.trim().chars().filter(plain).take(48).collect();
    if name.is_empty() {
        "worker".to_owned()
    } else {
        name
    }
}

async fn connect(remote: &Remote) -> anyhow::Result<Client> {
    Ok(Client::connect(&remote.coordinator, remote.call_timeout).await?)
}

pub(crate) async fn submit(arguments: args::Submit) -> anyhow::Result<()> {
    let spec = read_spec(&arguments.spec, arguments.output_dir)?;
    let json = serde_json::to_string(&spec).context("the spec cannot be written as JSON")?;
    let mut client = connect(&arguments.remote).await?;
    let (job, existed) = client.submit(Spec::Json(json), &arguments.request_id).await?;
    if existed {
        output::say("an earlier submission with this request id had made the job");
    }
    match arguments.remote.format {
        Format::Table => output::print(&format!("{}\n", job.id)),
        Format::Json => output::print_job(&job, Format::Json),
    }
}

pub(crate) async fn list(arguments: args::List) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let mut jobs: Vec<Job> = Vec::new();
    let mut token = String::new();
    let limit = usize::try_from(arguments.limit).unwrap_or(usize::MAX);
    while jobs.len() < limit {
        let (page, next) = client.list(arguments.limit.min(500), &token, &[]).await?;
        jobs.extend(page);
        match next {
            Some(next) => token = next,
            None => break,
        }
    }
    jobs.truncate(limit);
    output::print_jobs(&jobs, arguments.remote.format)
}

pub(crate) async fn get(arguments: args::One) -> anyhow::Result<()> {
    let job = connect(&arguments.remote).await?.get(&arguments.job).await?;
    output::print_job(&job, arguments.remote.format)
}

pub(crate) async fn watch(arguments: args::One) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let mut following = client.watch(&arguments.job, 0).await?;
    let mut changes = progress::Changes::default();
    let mut last = None;
    while let Some(job) = following.next().await? {
        match arguments.remote.format {
            Format::Json => output::print(&format!("{}\n", output::job_json(&job)))?,
            Format::Table => {
                for line in changes.lines(&job) {
                    output::print(&format!("{line}\n"))?;
                }
            }
        }
        last = Some(job);
    }
    last.map_or(Ok(()), |job| verdict(&job))
}

pub(crate) async fn wait(arguments: args::Wait) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let job_id = arguments.job.clone();
    let ended = async {
        let mut following = client.watch(&job_id, 0).await?;
        let mut last = None;
        while let Some(job) = following.next().await? {
            last = Some(job);
        }
        last.context("the coordinator ended the watch without a word")
    };
    let job = match arguments.timeout {
        None => ended.await?,
        Some(timeout) => tokio::time::timeout(timeout, ended)
            .await
            .map_err(|_| failure::timed_out(format!("{} has not ended in time", arguments.job)))??,
    };
    if arguments.remote.format == Format::Json {
        output::print_job(&job, Format::Json)?;
    }
    verdict(&job)
}

pub(crate) async fn cancel(arguments: args::Cancel) -> anyhow::Result<()> {
    let job = connect(&arguments.remote)
        .await?
        .cancel(&arguments.job, &arguments.reason)
        .await?;
    output::print_job(&job, arguments.remote.format)
}

/// The exit that an ended job asks for.
pub(crate) fn verdict(job: &Job) -> anyhow::Result<()> {
    let because = |what: &str| match job.message.as_str() {
        "" => format!("{} {what}", job.id),
        message => message.to_owned(),
    };
    match job.state() {
        JobState::Failed => Err(failure::job(because("failed"))),
        JobState::Cancelled => Err(failure::job(format!("cancelled: {}", because("was cancelled")))),
        JobState::Succeeded => match output::missed_limits(&job.outcome_json)? {
            missed if missed.is_empty() => Ok(()),
            missed => Err(failure::job(format!(
                "the exported model is outside the limits: {missed}; it and its report are kept in {}",
                job.output
            ))),
        },
        _ => Err(failure::timed_out(format!(
            "{} has not ended: the coordinator went away",
            job.id
        ))),
    }
}
