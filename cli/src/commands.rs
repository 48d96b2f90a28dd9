//! The commands that are a coordinator or a worker, and what those share that talk to one.

pub(crate) mod device;
pub(crate) mod doctor;
pub(crate) mod estimate;
pub(crate) mod job;
pub(crate) mod keep;
pub(crate) mod logs;
pub(crate) mod plan;
pub(crate) mod profile;
mod shapes;
pub(crate) mod task;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use espalier_coordinator::client::{Client, RECONNECTING};
use espalier_coordinator::spec::JobSpec;
use espalier_coordinator::{Coordinator, CoordinatorOptions};
use espalier_proto::v1::{Job, JobState};
use espalier_worker::agent::options::DeviceOptions;
use espalier_worker::discovery::{self, Shares, Wanted};
use espalier_worker::engine::vllm::Environment;
use espalier_worker::{Shutdown, WorkerOptions};

use crate::args::{self, Listed, Logging, Remote};
use crate::output::Listing;
use crate::signals::Signals;
use crate::{failure, output};

const SHUTDOWN: Duration = Duration::from_secs(20);
/// A watched listing is asked for this often.
const BETWEEN_LISTINGS: Duration = Duration::from_secs(2);

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
            "{shown}: output: missing; name the directory to write the outcome to, or give --output-dir"
        ))),
        Some(_) => Ok(spec),
    }
}

pub(crate) async fn coordinator(arguments: args::Coordinator) -> anyhow::Result<()> {
    let (heartbeat, lost) = (arguments.heartbeat_interval, arguments.worker_lost);
    if lost < heartbeat * 2 {
        return Err(failure::usage(format!(
            "--worker-lost is {lost:?}, expected at least two heartbeats ({:?}): a worker would be given up for one \
             that came late",
            heartbeat * 2
        )));
    }
    let mut options = CoordinatorOptions::new(arguments.data_dir);
    options.listen = arguments.listen;
    options.store = arguments.store;
    options.cost_tables = arguments.cost_tables;
    options.cluster = arguments.cluster;
    options.ship_interval = arguments.ship_interval;
    options.term_lease = arguments.term_lease;
    options.collect_after = arguments.collect_after;
    options.heartbeat_interval = arguments.heartbeat_interval;
    options.worker_lost = arguments.worker_lost;
    options.orphan_grace = arguments.orphan_grace;
    let mut signals = Signals::new()?;
    let handle = tokio::select! {
        started = Coordinator::start(options) => started?,
        // It may wait for room for days. Nothing was acknowledged, so this is as good an end as after a start.
        () = signals.next() => return Ok(()),
    };
    let failed = tokio::select! {
        () = signals.next() => None,
        reason = handle.failed() => Some(reason),
    };
    tokio::select! {
        stopped = handle.shutdown(SHUTDOWN) => stopped?,
        // Nothing acknowledged is lost with it.
        () = signals.next() => return Err(failure::interrupted()),
    }
    failed.map_or(Ok(()), |reason| Err(failure::machine(reason)))
}

pub(crate) async fn worker(arguments: args::Worker, logging: &Logging) -> anyhow::Result<()> {
    if arguments.with_parent {
        end_with_parent();
    }
    let name = arguments.name.unwrap_or_else(host_name);
    let shares = Shares {
        threads: arguments.threads,
        memory_limit: arguments.share.device_memory,
    };
    let mut devices = choose_devices(arguments.devices, shares).await?;
    let in_vllm = arguments.vllm.environment();
    let version = look_for_vllm(in_vllm.clone()).await?;
    for device in &mut devices {
        device.vllm.clone_from(&version);
    }
    let mut options = WorkerOptions::new(&arguments.coordinator, &name, devices);
    options.host = host_name();
    options.drain_timeout = arguments.drain_timeout;
    options.child.hang_timeout = arguments.hang_timeout;
    options.child.arguments.extend(logging.arguments());
    options
        .child
        .arguments
        .extend(in_vllm.iter().flat_map(Environment::arguments));
    let shutdown = Shutdown::default();
    let running = espalier_worker::run(options, shutdown.clone());
    tokio::pin!(running);
    let mut signals = Signals::new()?;
    for ask in [shutdown.leave, shutdown.kill] {
        tokio::select! {
            ended = &mut running => return Ok(ended?),
            () = signals.next() => {}
        }
        ask.cancel();
    }
    Ok(running.await?)
}

/// The version of the vLLM that was named; none where none was.
pub(crate) async fn look_for_vllm(environment: Option<Environment>) -> anyhow::Result<Option<String>> {
    let Some(environment) = environment else {
        return Ok(None);
    };
    let looked = tokio::task::spawn_blocking(move || environment.look()).await?;
    Ok(Some(looked.map_err(|error| failure::usage(error.to_string()))?))
}

/// The devices that were asked for, as they are on this machine.
pub(crate) async fn choose_devices(
    wanted: Vec<Wanted>,
    shares: Shares,
) -> anyhow::Result<Vec<DeviceOptions>> {
    let chosen =
        tokio::task::spawn_blocking(move || discovery::choose(&wanted, shares, || discovery::find(None)));
    Ok(chosen.await??)
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
    Ok(Client::connect(&remote.coordinator, remote.call()).await?)
}

/// Prints a listing; where it is watched, again whenever it has changed, until interrupted.
async fn show(
    listed: &Listed,
    mut ask: impl AsyncFnMut(&mut Client) -> anyhow::Result<Listing>,
) -> anyhow::Result<()> {
    if !listed.watch {
        let mut client = connect(&listed.remote).await?;
        return ask(&mut client).await?.print(listed.remote.how);
    }
    let mut signals = Signals::new()?;
    tokio::select! {
        ended = keep_showing(listed, ask) => ended,
        () = signals.next() => Err(failure::interrupted()),
    }
}

async fn keep_showing(
    listed: &Listed,
    mut ask: impl AsyncFnMut(&mut Client) -> anyhow::Result<Listing>,
) -> anyhow::Result<()> {
    let mut client = connect(&listed.remote).await?;
    let clear = if std::io::stdout().is_terminal() {
        "\x1b[H\x1b[2J"
    } else {
        ""
    };
    let mut shown = None;
    let mut answered = Instant::now();
    loop {
        match ask(&mut client).await {
            Ok(listing) => {
                answered = Instant::now();
                let text = listing.text(listed.remote.how, false)?;
                if shown.as_ref() != Some(&text) {
                    output::print(&format!("{clear}{text}"))?;
                    shown = Some(text);
                }
            }
            Err(error) if !failure::is_away(&error) || answered.elapsed() > RECONNECTING => {
                return Err(error);
            }
            Err(_) => {}
        }
        tokio::time::sleep(BETWEEN_LISTINGS).await;
    }
}

/// Refuses a stage that a job does not have, where one is named.
async fn require_stage(client: &mut Client, job: &str, stage: &str) -> anyhow::Result<()> {
    if stage.is_empty() {
        return Ok(());
    }
    has_stage(&client.get(job).await?, stage)
}

fn has_stage(job: &Job, stage: &str) -> anyhow::Result<()> {
    let stages: Vec<&str> = job.stages.iter().map(|known| known.name.as_str()).collect();
    if stages.contains(&stage) {
        return Ok(());
    }
    let known = match stages.as_slice() {
        [] => "none yet".to_owned(),
        stages => stages.join(", "),
    };
    Err(failure::not_found(format!(
        "{} has no stage `{stage}` so far; it has {known}",
        job.id
    )))
}

/// Asks before what cannot be taken back, where somebody sits at a terminal.
fn confirm(what: &str, yes: bool) -> anyhow::Result<()> {
    if yes || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Ok(());
    }
    output::say(&format!(
        "{what}? Type yes to go on; --yes leaves the question out."
    ));
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if matches!(answer.trim(), "y" | "yes") {
        return Ok(());
    }
    Err(failure::declined())
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
                "the exported model was not measured inside the limits: {missed}; it and its report are kept in {}",
                job.output
            ))),
        },
        _ => Err(failure::timed_out(format!(
            "{} has not ended: the coordinator went away",
            job.id
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use espalier_proto::v1::Stage;

    use super::*;

    #[test]
    fn a_stage_that_a_job_does_not_have_is_said_with_those_it_has() {
        let mut job = Job {
            id: "job-1".to_owned(),
            ..Job::default()
        };
        let none = has_stage(&job, "score").unwrap_err().to_string();
        assert!(none.contains("none yet"), "{none}");
        for name in ["ingest", "score"] {
            let name = name.to_owned();
            job.stages.push(Stage {
                name,
                ..Stage::default()
            });
        }
        has_stage(&job, "score").unwrap();
        let other = has_stage(&job, "nope").unwrap_err().to_string();
        assert!(
            other.contains("job-1 has no stage `nope`") && other.contains("ingest, score"),
            "{other}"
        );
    }
}
