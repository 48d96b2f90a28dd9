//! Runs every measurement and says whether the limits hold.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::work::Measured;

/// Attempts a second that must be reached.
const RATE: f64 = 20_000.0;
/// Processor time of the coordinator for each, microseconds.
const PROCESSOR_US: f64 = 50.0;
/// Resident memory of the coordinator, MiB.
const MEMORY_MIB: u64 = 96;
/// From a free slot to its next task, milliseconds, for 99 of 100.
const WAIT_MS: f64 = 20.0;
/// What 50 followers may cost of the rate.
const FOLLOWERS_COST: f64 = 0.10;
/// Processors that others may use meanwhile before a figure means nothing.
const OTHERS: f64 = 0.15;
/// Runs with and without followers, in turn.
const PAIRS: usize = 3;
/// Snapshots that every follower sees in a run at the least: one a second, of ten.
const SNAPSHOTS: u64 = 8;
/// Processors that all of it is held to.
const PROCESSORS: usize = 2;

/// How it is checked.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Where journals lie meanwhile: a real disk. Default: the working directory.
    #[arg(long, default_value = ".")]
    directory: PathBuf,
    /// Seconds of each run without work.
    #[arg(long, default_value_t = 8)]
    seconds: u64,
    /// Tasks of 200 ms.
    #[arg(long, default_value_t = 100_000)]
    total: u64,
}

struct Coordinator {
    child: Child,
    endpoint: String,
    _directory: tempfile::TempDir,
}

impl Coordinator {
    fn start(options: &Options) -> Result<Self> {
        let directory = tempfile::tempdir_in(&options.directory)?;
        let mut child = ourselves()?
            .args(["coordinate", "--data-dir"])
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("the coordinator has no output")?;
        let mut endpoint = String::new();
        BufReader::new(stdout).read_line(&mut endpoint)?;
        let endpoint = endpoint.trim().to_owned();
        if endpoint.is_empty() {
            bail!("the coordinator did not start");
        }
        Ok(Self {
            child,
            endpoint,
            _directory: directory,
        })
    }

    fn work(&self, more: &[&str]) -> Result<Measured> {
        let mut child = ourselves()?
            .args([
                "work",
                "--endpoint",
                &self.endpoint,
                "--pid",
                &self.child.id().to_string(),
            ])
            .args(more)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut answer = String::new();
        child
            .stdout
            .take()
            .context("the workers have no output")?
            .read_to_string(&mut answer)?;
        if !child.wait()?.success() {
            bail!("the workers failed");
        }
        serde_json::from_str(&answer).with_context(|| format!("the workers answered {answer:?}"))
    }

    /// The same under 50 followers.
    fn work_followed(&self, more: &[&str]) -> Result<Measured> {
        let mut followers = ourselves()?
            .args(["watch", "--endpoint", &self.endpoint])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let beside = followers.id().to_string();
        let measured = self.work(&[more, &["--beside", &beside]].concat())?;
        drop(followers.stdin.take());
        let answer = followers.wait_with_output()?;
        anyhow::ensure!(answer.status.success(), "a follower lost its stream");
        let fewest: u64 = String::from_utf8(answer.stdout)?.trim().parse()?;
        anyhow::ensure!(fewest >= SNAPSHOTS, "a follower saw only {fewest} snapshots");
        Ok(measured)
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        // Its standard input closes; it ends by itself.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn ourselves() -> Result<Command> {
    Ok(Command::new(std::env::current_exe()?))
}

fn rate(measured: &Measured) -> f64 {
    f64::from(u32::try_from(measured.attempts).unwrap_or(u32::MAX)) / measured.seconds
}

#[allow(clippy::print_stdout)] // figures are the answer
fn say(what: &str, measured: &Measured) {
    println!(
        "{what}: {:.0} attempts/s, {:.1} us of the coordinator's processor each, {} MiB at most; free slot to \
         next task {:.1} ms (median), {:.1} ms (99 of 100); others used {:.2} processors",
        rate(measured),
        measured.processor_us,
        measured.peak_mib,
        measured.wait_p50_ms,
        measured.wait_p99_ms,
        measured.others,
    );
}

/// Measures all of it.
#[allow(clippy::print_stdout)] // figures are the answer
pub fn run(options: &Options) -> Result<()> {
    process::keep_to(PROCESSORS)?;
    let seconds = options.seconds.to_string();
    let empty = ["--seconds", seconds.as_str()];
    let (mut alone, mut followed) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        let coordinator = Coordinator::start(options)?;
        alone.push(coordinator.work(&empty)?);
        drop(coordinator);
        let coordinator = Coordinator::start(options)?;
        followed.push(coordinator.work_followed(&empty)?);
    }
    alone.iter().for_each(|measured| say("no work", measured));
    followed
        .iter()
        .for_each(|measured| say("no work, 50 followers", measured));
    let coordinator = Coordinator::start(options)?;
    let total = options.total.to_string();
    let real = [
        "--workers",
        "128",
        "--devices",
        "1",
        "--hold-ms",
        "200",
        "--total",
        total.as_str(),
    ];
    let held = coordinator.work(&real)?;
    say("128 workers, tasks of 200 ms", &held);
    drop(coordinator);
    std::process::exit(i32::from(!verdict(&alone, &followed, &held)));
}

#[allow(clippy::print_stdout)] // figures are the answer
fn verdict(alone: &[Measured], followed: &[Measured], held: &Measured) -> bool {
    let best = alone.iter().map(rate).fold(0.0, f64::max);
    let best_followed = followed.iter().map(rate).fold(0.0, f64::max);
    let cost = 1.0 - best_followed / best.max(1.0);
    let processor = alone
        .iter()
        .map(|measured| measured.processor_us)
        .fold(f64::INFINITY, f64::min);
    let all = || alone.iter().chain(followed).chain([held]);
    let memory = all().map(|measured| measured.peak_mib).max().unwrap_or(u64::MAX);
    let limits = [
        ("attempts a second", best, best >= RATE),
        ("us of processor each", processor, processor <= PROCESSOR_US),
        (
            "MiB",
            f64::from(u32::try_from(memory).unwrap_or(u32::MAX)),
            memory <= MEMORY_MIB,
        ),
        (
            "ms from a free slot to its next task, 99 of 100",
            held.wait_p99_ms,
            held.wait_p99_ms <= WAIT_MS,
        ),
        ("of the rate that 50 followers cost", cost, cost <= FOLLOWERS_COST),
    ];
    let noisy = all().any(|measured| measured.others > OTHERS);
    for (what, figure, holds) in &limits {
        println!(
            "{} {figure:.2} {what}",
            if *holds { "holds: " } else { "MISSED:" }
        );
    }
    let holds = limits.iter().all(|(_, _, holds)| *holds);
    if !holds && noisy {
        println!("too noisy: other processes used the machine meanwhile; run it again when it is quiet");
    }
    holds
}
