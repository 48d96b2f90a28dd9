//! Ways to upset the tiny job, each a story of one kind of fault.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::Value;

use crate::tiny::{Cluster, WORKER_LOST, begun, write_spec};

/// How long a task is given to be handed on once its worker has been given up.
const HANDED_ON: Duration = Duration::from_secs(2);
/// How long the stages before training may take.
const TRAINING: Duration = Duration::from_secs(300);

/// One kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upset {
    /// None: what the others are compared with.
    Nothing,
    /// A worker is killed at every stage.
    WorkerKilled,
    /// The coordinator is killed at every stage.
    CoordinatorKilled,
    /// At every second stage a worker stands still until its tasks have been handed on, then goes on with them.
    WorkerStopped,
    /// At every second stage a worker's wire is cut until its tasks have been handed on, then mended.
    WireCut,
}

impl Upset {
    /// Every kind of fault.
    pub const ALL: [Self; 4] = [
        Self::WorkerKilled,
        Self::CoordinatorKilled,
        Self::WorkerStopped,
        Self::WireCut,
    ];

    /// One line for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::WorkerKilled => "a worker killed at every stage",
            Self::CoordinatorKilled => "the coordinator killed at every stage",
            Self::WorkerStopped => "a worker stopped and let go on",
            Self::WireCut => "a worker's wire cut and mended",
        }
    }
}

/// What a disturbed job came to.
#[derive(Debug)]
pub struct Outcome {
    /// Files of the checkpoint with their hashes.
    pub checkpoint: Vec<(String, String)>,
    /// Faults that were made.
    pub faults: usize,
    /// How long it took.
    pub took: Duration,
}

/// Runs the tiny job on two workers, upset in this way.
///
/// # Errors
/// When the job does not succeed.
pub fn run(upset: Upset, specs: &Path) -> Result<Outcome> {
    let spec = write_spec(specs)?;
    let start = Instant::now();
    let mut cluster = Cluster::start(2)?;
    cluster.submit(&spec)?;
    let mut mischief = Mischief::default();
    cluster.follow(|cluster, job| mischief.make(upset, cluster, job))?;
    mischief.put_right(&mut cluster)?;
    Ok(Outcome {
        checkpoint: cluster.checkpoint()?,
        faults: mischief.faults,
        took: start.elapsed(),
    })
}

/// Waits until recovery has taken its first step.
///
/// # Errors
/// When the job ends before.
pub fn wait_for_training(cluster: &mut Cluster) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < TRAINING {
        std::thread::sleep(Duration::from_millis(50));
        let Some(job) = cluster.job()? else { continue };
        let stages = job["stages"].as_array().cloned().unwrap_or_default();
        let recover = stages.iter().filter(|stage| stage["kind"] == "recover");
        let mut active = recover.filter_map(|stage| stage["active"].as_array()).flatten();
        if active.any(|task| task["done"].as_u64() > Some(0)) {
            return Ok(());
        }
    }
    bail!("training has not begun within {TRAINING:?}")
}

#[derive(Debug, Default)]
struct Mischief {
    seen: BTreeSet<String>,
    faults: usize,
    /// What is out of order, and since when.
    open: Option<(Upset, usize, Instant)>,
}

impl Mischief {
    fn make(&mut self, upset: Upset, cluster: &mut Cluster, job: &Value) -> Result<()> {
        let due = self
            .open
            .is_some_and(|(_, _, since)| since.elapsed() > WORKER_LOST + HANDED_ON);
        if due {
            self.put_right(cluster)?;
        }
        let stages = begun(job);
        let new = stages
            .iter()
            .filter(|stage| self.seen.insert((*stage).clone()))
            .count();
        if new == 0 || self.open.is_some() {
            return Ok(());
        }
        let number = busy_worker(job).unwrap_or(self.seen.len() % 2);
        match upset {
            Upset::Nothing => return Ok(()),
            Upset::WorkerKilled => cluster.kill_worker(number)?,
            Upset::CoordinatorKilled => cluster.kill_coordinator()?,
            Upset::WorkerStopped | Upset::WireCut if self.seen.len().is_multiple_of(2) => return Ok(()),
            Upset::WorkerStopped => {
                if let Some(Some(worker)) = cluster.workers.get(number) {
                    worker.signal(libc::SIGSTOP)?;
                }
                self.open = Some((upset, number, Instant::now()));
            }
            Upset::WireCut => {
                if let Some(wire) = cluster.wires.get(number) {
                    wire.cut();
                }
                self.open = Some((upset, number, Instant::now()));
            }
        }
        self.faults += 1;
        Ok(())
    }

    fn put_right(&mut self, cluster: &mut Cluster) -> Result<()> {
        match self.open.take() {
            Some((Upset::WorkerStopped, number, _)) => {
                if let Some(Some(worker)) = cluster.workers.get(number) {
                    worker.signal(libc::SIGCONT)?;
                }
            }
            Some((Upset::WireCut, number, _)) => {
                if let Some(wire) = cluster.wires.get(number) {
                    wire.mend();
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The worker that a running task is on.
fn busy_worker(job: &Value) -> Option<usize> {
    let stages = job["stages"].as_array()?;
    let active = stages
        .iter()
        .filter_map(|stage| stage["active"].as_array())
        .flatten();
    let mut workers =
        active.filter_map(|task| task["worker"].as_str()?.strip_prefix("worker-")?.parse().ok());
    workers.next()
}
