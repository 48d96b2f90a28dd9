//! `espalier run`: one job with a coordinator in this process and workers in processes of their own.
//!
//! Whatever happens, the workers are stopped and joined, the coordinator is shut down and the state is
//! removed (unless it is to be kept) before the command ends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use espalier_coordinator::client::Client;
use espalier_coordinator::{Coordinator, CoordinatorOptions, Handle};
use espalier_proto::v1::{Job, submit_request::Spec};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::args::Run;
use crate::commands::{asked_to_stop, read_spec, verdict};
use crate::progress::Progress;
use crate::{failure, output};

const CALL: Duration = Duration::from_secs(30);
const SHUTDOWN: Duration = Duration::from_secs(20);
/// How long a cancelled job may take to stop its attempts.
const CANCELLING: Duration = Duration::from_secs(15);
const DRAIN: &str = "5s";

pub(crate) async fn run(arguments: Run) -> anyhow::Result<()> {
    let spec = read_spec(&arguments.spec, arguments.output.clone())?;
    let output = PathBuf::from(spec.output.clone().unwrap_or_default());
    let json = serde_json::to_string(&spec).context("the spec cannot be written as JSON")?;
    let state = State::create(&output, arguments.keep_state)?;
    let mut options = CoordinatorOptions::new(state.directory.path());
    options.listen.set_port(0);
    let coordinator = Coordinator::start(options).await?;
    let mut workers = Workers::default();
    let ended = supervise(&arguments, &coordinator, &mut workers, &state, json).await;
    workers.stop().await;
    let stopped = coordinator.shutdown(SHUTDOWN).await;
    state.finish();
    let job = ended?;
    if !job.outcome_json.is_empty() {
        output::print_outcome(&job.outcome_json, arguments.format)?;
        output::say(&format!("report: {}", output.join("report.html").display()));
    }
    verdict(&job)?;
    Ok(stopped?)
}

/// Submits the job and follows it to its end, an interrupt, or the loss of the coordinator or a worker.
async fn supervise(
    arguments: &Run,
    coordinator: &Handle,
    workers: &mut Workers,
    state: &State,
    spec: String,
) -> anyhow::Result<Job> {
    let endpoint = coordinator.endpoint();
    let mut client = Client::connect(&endpoint, CALL).await?;
    let (job, _) = client.submit(Spec::Json(spec), "").await?;
    workers.start(arguments, &endpoint, state.directory.path())?;
    let mut progress = Progress::new();
    let mut follower = client.clone();
    let ended = tokio::select! {
        ended = follow(&mut follower, &job.id, &mut progress) => ended,
        asked = asked_to_stop() => match asked {
            Ok(()) => {
                output::say("stopping; press Ctrl-C again to stop at once");
                stop_job(&mut client, &job.id).await;
                Err(failure::interrupted())
            }
            Err(error) => Err(error),
        },
        reason = coordinator.failed() => Err(failure::job(reason)),
        lost = workers.lost() => Err(lost),
    };
    progress.finish();
    ended
}

async fn follow(client: &mut Client, job_id: &str, progress: &mut Progress) -> anyhow::Result<Job> {
    let mut following = client.watch(job_id, 0).await?;
    let mut last = None;
    while let Some(job) = following.next().await? {
        progress.show(&job);
        let ended = output::has_ended(&job);
        last = Some(job);
        if ended {
            break;
        }
    }
    last.context("the coordinator ended the watch without a word")
}

/// Cancels the job and waits until its attempts have stopped, or a second interrupt.
async fn stop_job(client: &mut Client, job_id: &str) {
    let cancelled = async {
        let cancelled = client.cancel(job_id, "interrupted").await;
        if let Err(error) = cancelled {
            tracing::warn!(%error, "the job could not be cancelled");
            return;
        }
        if let Ok(mut following) = client.watch(job_id, 0).await {
            while let Ok(Some(_)) = following.next().await {}
        }
    };
    tokio::select! {
        waited = timeout(CANCELLING, cancelled) => {
            if waited.is_err() {
                tracing::warn!("attempts did not stop in time and are ended");
            }
        }
        _ = asked_to_stop() => {}
    }
}

/// Journal, artifacts and logs of one embedded run, beside the output so that they share its file system.
struct State {
    directory: TempDir,
    keep: bool,
}

impl State {
    fn create(output: &Path, keep: bool) -> anyhow::Result<Self> {
        let mut beside = output.parent();
        while let Some(directory) = beside.filter(|directory| !directory.is_dir()) {
            beside = directory.parent();
        }
        let beside = beside.unwrap_or_else(|| Path::new("/"));
        let directory = tempfile::Builder::new()
            .prefix(".espalier-")
            .tempdir_in(beside)
            .with_context(|| {
                format!(
                    "cannot create a directory for the run's state in {}",
                    beside.display()
                )
            })?;
        Ok(Self { directory, keep })
    }

    fn finish(mut self) {
        if self.keep {
            self.directory.disable_cleanup(true);
            output::say(&format!("state kept in {}", self.directory.path().display()));
            return;
        }
        let path = self.directory.path().to_owned();
        if let Err(error) = self.directory.close() {
            output::say(&format!("cannot remove {}: {error}", path.display()));
        }
    }
}

/// The worker processes; stopped by [`Workers::stop`], killed when dropped.
#[derive(Default)]
struct Workers {
    children: Vec<(Child, PathBuf)>,
}

impl Workers {
    fn start(&mut self, arguments: &Run, endpoint: &str, state: &Path) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = match arguments.threads {
            0 => (processors / usize::from(arguments.workers)).max(1),
            threads => threads,
        };
        for number in 1..=arguments.workers {
            let name = format!("worker-{number}");
            let log_path = state.join(format!("{name}.log"));
            let log =
                File::create(&log_path).with_context(|| format!("cannot create {}", log_path.display()))?;
            let mut command = Command::new(&program);
            command
                .args([
                    "worker",
                    "run",
                    "--with-parent",
                    "--coordinator",
                    endpoint,
                    "--name",
                    &name,
                ])
                .args(["--threads", &threads.to_string(), "--drain-timeout", DRAIN])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log)
                // A group of its own: Ctrl-C reaches this process alone, which then stops the workers in order.
                .process_group(0)
                .kill_on_drop(true);
            let child = command.spawn().context("cannot start a worker")?;
            self.children.push((child, log_path));
        }
        Ok(())
    }

    /// Waits until a worker ends though nobody told it to.
    async fn lost(&mut self) -> anyhow::Error {
        loop {
            for (child, log) in &mut self.children {
                if let Ok(Some(status)) = child.try_wait() {
                    return failure::job(lost_message(status, log));
                }
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    async fn stop(mut self) {
        for (child, _) in &self.children {
            let Some(id) = child.id().and_then(|id| libc::pid_t::try_from(id).ok()) else {
                continue;
            };
            // SAFETY: kill touches no memory; the child has not been waited for, so the id is still its own.
            unsafe { libc::kill(id, libc::SIGTERM) };
        }
        for (child, _) in &mut self.children {
            if timeout(SHUTDOWN, child.wait()).await.is_err() {
                tracing::warn!("a worker did not stop in time and is killed");
                let _ = child.kill().await;
            }
        }
    }
}

fn lost_message(status: ExitStatus, log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("its log is empty");
    format!("a worker ended unexpectedly ({status}): {last}")
}
