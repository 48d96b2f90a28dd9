//! `espalier run`: one job with a coordinator in this process and workers in processes of their own.
//!
//! Whatever happens, the workers are stopped and joined, the coordinator is shut down and the state is removed, unless
//! [`state`] says otherwise, before the command ends. A worker that ends though nobody told it to is started again: the
//! job goes on from what it had reported.

mod state;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use espalier_coordinator::client::Client;
use espalier_coordinator::spec::{Device, Engine, JobSpec};
use espalier_coordinator::{Coordinator, CoordinatorOptions, Handle};
use espalier_proto::v1::{Job, submit_request::Spec};
use espalier_worker::discovery::{Shares, Wanted};
use espalier_worker::engine::vllm::Environment;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::args::{Logging, Run};
use crate::commands::{choose_devices, look_for_vllm, read_spec, verdict};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::{failure, output};
use state::{Left, State};

const CALL: Duration = Duration::from_secs(30);
const SHUTDOWN: Duration = Duration::from_secs(20);
/// How long a cancelled job may take to stop its attempts.
const CANCELLING: Duration = Duration::from_secs(15);
const DRAIN: &str = "5s";

/// `espalier profile run`: the same, of a job that ends once its target is measured.
pub(crate) async fn profile(arguments: Run, logging: &Logging) -> anyhow::Result<()> {
    let mut spec = read_spec(&arguments.spec, arguments.output_dir.clone())?;
    spec.profile_only = true;
    run_spec(spec, arguments, logging).await
}

pub(crate) async fn run(arguments: Run, logging: &Logging) -> anyhow::Result<()> {
    let spec = read_spec(&arguments.spec, arguments.output_dir.clone())?;
    run_spec(spec, arguments, logging).await
}

async fn run_spec(mut spec: JobSpec, arguments: Run, logging: &Logging) -> anyhow::Result<()> {
    spec.target.measure_anew |= arguments.anew;
    let devices = devices_of(&arguments, &mut spec).await?;
    let output = PathBuf::from(spec.output.clone().unwrap_or_default());
    if output.symlink_metadata().is_ok() {
        return Err(failure::conflict(format!(
            "output: {} exists; name a directory that does not, or remove it",
            output.display()
        )));
    }
    let json = serde_json::to_string(&spec).context("the spec cannot be written as JSON")?;
    let state = State::create(&output, arguments.keep_state)?;
    let mut options = CoordinatorOptions::new(state.path());
    options.listen.set_port(0);
    options.cost_tables.clone_from(&arguments.cost_tables);
    let mut signals = Signals::new()?;
    let coordinator = tokio::select! {
        started = Coordinator::start(options) => started?,
        () = signals.next() => return Err(failure::interrupted()),
    };
    let mut workers = Workers {
        logging: logging.arguments(),
        devices,
        slots: Vec::new(),
    };
    let ended = supervise(&arguments, &coordinator, &mut workers, &state, json, &mut signals).await;
    // Without any there was no job yet.
    let left = Left::by(&ended, !workers.slots.is_empty());
    let commands = workers.commands();
    let stopping = async {
        workers.stop().await;
        coordinator.shutdown(SHUTDOWN).await
    };
    let stopped = tokio::select! {
        stopped = stopping => Some(stopped),
        // What is dropped on the way is killed.
        () = signals.next() => None,
    };
    state.finish(&left, arguments.cost_tables.as_deref(), &commands);
    let job = ended?;
    if !job.outcome_json.is_empty() {
        output::print_outcome(&job.outcome_json, arguments.format)?;
        let report = if spec.profile_only {
            "cost-table.json"
        } else {
            "report.html"
        };
        output::say(&format!("report: {}", output.join(report).display()));
    }
    verdict(&job)?;
    match stopped {
        Some(stopped) => Ok(stopped?),
        None => Err(failure::interrupted()),
    }
}

/// Which devices the workers take, as they are told it: those that were asked for, which the result is then fitted
/// to, or those of the spec's kind. What cannot be had is refused here, before anything is started.
async fn devices_of(arguments: &Run, spec: &mut JobSpec) -> anyhow::Result<Vec<String>> {
    let named = arguments.devices.iter().filter(|wanted| **wanted != Wanted::Auto);
    let mut wanted: Vec<Wanted> = named.copied().collect();
    let cpu = wanted.contains(&Wanted::Cpu);
    match (wanted.is_empty(), cpu) {
        (true, _) => wanted.push(match spec.target.device {
            Device::Cpu => Wanted::Cpu,
            Device::Cuda => Wanted::EveryGpu,
        }),
        (false, true) if wanted.iter().any(|wanted| *wanted != Wanted::Cpu) => {
            return Err(failure::usage(
                "--device names the processor and GPUs, expected one kind: a result is fitted to one",
            ));
        }
        (false, true) => spec.target.device = Device::Cpu,
        (false, false) => spec.target.device = Device::Cuda,
    }
    spec.check()
        .map_err(|error| failure::usage(format!("{}: {error}", arguments.spec.display())))?;
    if spec.target.device == Device::Cuda && arguments.workers > 1 {
        return Err(failure::usage(format!(
            "--workers is {}, expected 1: one worker serves every GPU of a machine",
            arguments.workers
        )));
    }
    let in_vllm = arguments.vllm.environment();
    if spec.target.engine == Engine::Vllm && in_vllm.is_none() {
        return Err(failure::usage(
            "target.engine is vllm, and no vLLM was named: give --vllm-python, the python of an environment that has it",
        ));
    }
    look_for_vllm(in_vllm.clone()).await?;
    let shares = Shares {
        threads: arguments.threads,
        memory_limit: arguments.share.device_memory,
    };
    let chosen = choose_devices(wanted, shares).await?;
    let ids: Vec<String> = chosen.into_iter().map(|device| device.id).collect();
    // It would wait for the others for ever: nobody else can join this cluster.
    let devices = ids.len().saturating_mul(usize::from(arguments.workers));
    let stages = spec.recovery.pipeline_stages;
    let trains = spec.budget.recovery_tokens > 0;
    if trains && usize::try_from(stages).is_ok_and(|stages| stages > devices) {
        return Err(failure::usage(format!(
            "{}: recovery.pipeline_stages: found {stages}, expected at most {devices}, the devices that this run has: a \
             stage needs one of its own. Ask for fewer, run on more, or submit the job to a cluster that has as many",
            arguments.spec.display()
        )));
    }
    let mut told = vec!["--device".to_owned(), ids.join(",")];
    if let Some(limit) = shares.memory_limit {
        told.extend(["--device-memory".to_owned(), format!("{limit}B")]);
    }
    told.extend(in_vllm.iter().flat_map(Environment::arguments));
    Ok(told)
}

/// Submits the job and follows it to its end, an interrupt, the loss of the coordinator, or a worker that
/// keeps ending.
async fn supervise(
    arguments: &Run,
    coordinator: &Handle,
    workers: &mut Workers,
    state: &State,
    spec: String,
    signals: &mut Signals,
) -> anyhow::Result<Job> {
    let endpoint = coordinator.endpoint();
    let mut client = Client::connect(&endpoint, CALL).await?;
    let (job, _) = client.submit(Spec::Json(spec), "").await?;
    workers.start(arguments, &endpoint, state.path())?;
    let mut progress = Progress::new();
    let mut follower = client.clone();
    let ended = tokio::select! {
        ended = follow(&mut follower, &job.id, &mut progress) => ended,
        () = signals.next() => {
            output::say("stopping; press Ctrl-C again to stop at once");
            stop_job(&mut client, &job.id, signals).await;
            Err(failure::interrupted())
        }
        reason = coordinator.failed() => Err(failure::machine(reason)),
        lost = workers.tend() => Err(lost),
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
async fn stop_job(client: &mut Client, job_id: &str, signals: &mut Signals) {
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
        () = signals.next() => {}
    }
}

/// How often one worker may end unexpectedly, one time soon after another, before the run does.
const MOST_ENDS: u32 = 5;
/// A worker that has lived this long was well: ends before that are forgotten.
const WELL: Duration = Duration::from_secs(600);
/// The pause before a worker is started again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The worker processes; stopped by [`Workers::stop`], killed when dropped.
struct Workers {
    /// How they log.
    logging: Vec<String>,
    /// What each is told of devices.
    devices: Vec<String>,
    slots: Vec<Slot>,
}

/// One worker: a process, started again when it ends though nobody told it to.
struct Slot {
    launch: Launch,
    child: Option<Child>,
    started: Instant,
    ends: u32,
    again_at: Option<Instant>,
}

/// How a worker's process is started.
struct Launch {
    program: PathBuf,
    name: String,
    endpoint: String,
    threads: usize,
    devices: Vec<String>,
    logging: Vec<String>,
    log: PathBuf,
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
            let launch = Launch {
                program: program.clone(),
                log: state.join(format!("{name}.log")),
                name,
                endpoint: endpoint.to_owned(),
                threads,
                devices: self.devices.clone(),
                logging: self.logging.clone(),
            };
            let child = Some(launch.spawn()?);
            self.slots.push(Slot {
                launch,
                child,
                started: Instant::now(),
                ends: 0,
                again_at: None,
            });
        }
        Ok(())
    }

    /// Starts again whatever ends though nobody told it to; ends itself when one ends too often.
    async fn tend(&mut self) -> anyhow::Error {
        loop {
            for slot in &mut self.slots {
                if let Err(error) = slot.tend() {
                    return error;
                }
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// How somebody starts the same ones by hand.
    fn commands(&self) -> Vec<String> {
        let launches = self.slots.iter().map(|slot| slot.launch.arguments());
        launches
            .map(|arguments| {
                let words = arguments.iter().map(|argument| state::word(argument));
                format!("espalier worker run {}", words.collect::<Vec<_>>().join(" "))
            })
            .collect()
    }

    async fn stop(mut self) {
        let children = || self.slots.iter().filter_map(|slot| slot.child.as_ref());
        for child in children() {
            let Some(id) = child.id().and_then(|id| libc::pid_t::try_from(id).ok()) else {
                continue;
            };
            // SAFETY: kill touches no memory; the child has not been waited for, so the id is still its own.
            unsafe { libc::kill(id, libc::SIGTERM) };
        }
        for child in self.slots.iter_mut().filter_map(|slot| slot.child.as_mut()) {
            if timeout(SHUTDOWN, child.wait()).await.is_err() {
                tracing::warn!("a worker did not stop in time and is killed");
                let _ = child.kill().await;
            }
        }
    }
}

/// Counts an end of a worker that lived so long after `before` others.
fn ends_in_a_row(before: u32, lived: Duration) -> u32 {
    if lived >= WELL {
        1
    } else {
        before.saturating_add(1)
    }
}

impl Slot {
    fn tend(&mut self) -> anyhow::Result<()> {
        if let Some(at) = self.again_at {
            if Instant::now() >= at {
                self.again_at = None;
                self.child = Some(self.launch.spawn()?);
                self.started = Instant::now();
            }
            return Ok(());
        }
        let Some(Ok(Some(status))) = self.child.as_mut().map(Child::try_wait) else {
            return Ok(());
        };
        self.child = None;
        self.ends = ends_in_a_row(self.ends, self.started.elapsed());
        let lost = lost_message(&self.launch.name, status, &self.launch.log);
        if self.ends > MOST_ENDS {
            let ends = self.ends;
            return Err(failure::job(format!(
                "{lost}; it has ended {ends} times in a row"
            )));
        }
        let pause = FIRST_PAUSE * 2_u32.saturating_pow(self.ends - 1);
        output::say(&format!(
            "{lost}; started again in {} s ({} of {MOST_ENDS})",
            pause.as_secs(),
            self.ends
        ));
        self.again_at = Some(Instant::now() + pause);
        Ok(())
    }
}

impl Launch {
    /// What tells the worker from others.
    fn arguments(&self) -> Vec<String> {
        let threads = self.threads.to_string();
        let own = ["--name", &self.name, "--threads", &threads];
        let own = own.into_iter().map(str::to_owned);
        own.chain(self.devices.iter().cloned()).collect()
    }

    fn spawn(&self) -> anyhow::Result<Child> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("cannot write to {}", self.log.display()))?;
        let mut command = Command::new(&self.program);
        command
            .args(["worker", "run", "--with-parent", "--coordinator", &self.endpoint])
            .args(self.arguments())
            .args(["--drain-timeout", DRAIN])
            .args(&self.logging)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // A group of its own: Ctrl-C reaches this process alone, which then stops the workers in order.
            .process_group(0)
            .kill_on_drop(true);
        command.spawn().context("cannot start a worker")
    }
}

fn lost_message(name: &str, status: ExitStatus, log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("its log is empty");
    format!("{name} ended unexpectedly ({status}): {last}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_worker_that_ends_now_and_then_over_days_does_not_end_the_run() {
        let mut ends = 0;
        for _ in 0..100 {
            ends = ends_in_a_row(ends, WELL);
        }
        assert!(ends <= MOST_ENDS);
        for _ in 0..MOST_ENDS {
            ends = ends_in_a_row(ends, FIRST_PAUSE);
        }
        assert!(ends > MOST_ENDS, "one that cannot stay up does");
    }
}
