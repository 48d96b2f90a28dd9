//! Ways to upset the tiny job, each a story of one kind of fault.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use crate::proxy::Way;
use crate::tiny::{Cluster, WORKER_LOST, running, write_spec};

/// How long a task is given to be handed on once its worker has been given up.
const HANDED_ON: Duration = Duration::from_secs(2);
/// How long the stages before training may take.
const TRAINING: Duration = Duration::from_secs(300);
/// A stage that was over sooner may have been missed: it may never have been seen to run. Nor may one that was over
/// between two looks, where the machine let more time pass between them.
const SHORT: Duration = Duration::from_millis(500);
/// How long a coordinator may take to see that its disk is full: it does when it has something to write.
const NOTICED: Duration = Duration::from_secs(60);

/// One kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upset {
    /// None: what the others are compared with.
    Nothing,
    /// A worker is killed.
    WorkerKilled,
    /// The process of a worker's device is killed.
    ChildKilled,
    /// The coordinator is killed.
    CoordinatorKilled,
    /// A worker stands still until its tasks have been handed on, then goes on with them.
    WorkerStopped,
    /// The coordinator stands still for longer than silent workers are waited for.
    CoordinatorStopped,
    /// A worker's wire is cut until its tasks have been handed on, then mended.
    WireCut,
    /// The same in one direction only: now one, then the other.
    WireCutOneWay,
    /// The coordinator's disk is full until it has said so.
    DiskFull,
}

impl Upset {
    /// Every kind of fault.
    pub const ALL: [Self; 8] = [
        Self::WorkerKilled,
        Self::ChildKilled,
        Self::CoordinatorKilled,
        Self::WorkerStopped,
        Self::CoordinatorStopped,
        Self::WireCut,
        Self::WireCutOneWay,
        Self::DiskFull,
    ];

    /// One line for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::WorkerKilled => "a worker killed",
            Self::ChildKilled => "a device's process killed",
            Self::CoordinatorKilled => "the coordinator killed",
            Self::WorkerStopped => "a worker stopped and let go on",
            Self::CoordinatorStopped => "the coordinator stopped and let go on",
            Self::WireCut => "a worker's wire cut and mended",
            Self::WireCutOneWay => "a worker's wire cut in one direction and mended",
            Self::DiskFull => "the coordinator's disk filled and freed",
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
    /// Stages.
    pub stages: usize,
    /// Stages that no fault fell into, though they took a while.
    pub spared: Vec<String>,
    /// The same of stages that were over almost at once.
    pub too_short: usize,
    /// How long it took.
    pub took: Duration,
}

impl Outcome {
    /// Whether it came out as an undisturbed job does, though every stage was upset.
    pub fn holds(&self, truth: &Self) -> bool {
        self.checkpoint == truth.checkpoint && self.faults > 0 && self.spared.is_empty()
    }
}

/// Runs the tiny job on two workers, every stage upset in this way.
///
/// # Errors
/// When the job does not succeed, or the fault cannot be made on this machine.
pub fn run(upset: Upset, specs: &Path) -> Result<Outcome> {
    let spec = write_spec(specs)?;
    let start = Instant::now();
    let mut cluster = if upset == Upset::DiskFull {
        Cluster::start_on_small_disk(2)?
    } else {
        Cluster::start(2)?
    };
    cluster.submit(&spec)?;
    let mut mischief = Mischief::new();
    let job = cluster.follow(|cluster, job| mischief.make(upset, cluster, job))?;
    mischief.has_looked();
    mischief.put_right(&mut cluster)?;
    let short = SHORT.max(mischief.longest_gap * 2);
    let mut outcome = Outcome {
        checkpoint: cluster.checkpoint()?,
        faults: mischief.faults,
        stages: 0,
        spared: Vec::new(),
        too_short: 0,
        took: start.elapsed(),
    };
    for stage in job["stages"].as_array().into_iter().flatten() {
        outcome.stages += 1;
        let name = stage["name"].as_str().unwrap_or_default();
        let took = Duration::from_millis(stage["elapsed_ms"].as_u64().unwrap_or(0));
        if mischief.hit.contains(name) {
            continue;
        }
        if took < short {
            outcome.too_short += 1;
        } else {
            outcome.spared.push(name.to_owned());
        }
    }
    Ok(outcome)
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

#[derive(Debug)]
struct Mischief {
    /// Stages that ran as a fault was made, or while one lasted.
    hit: BTreeSet<String>,
    faults: usize,
    /// What is out of order, and since when.
    open: Option<(Upset, usize, Instant)>,
    /// The last look at the job.
    looked: Instant,
    /// The longest time between two looks in which the job could get on.
    longest_gap: Duration,
}

impl Mischief {
    fn new() -> Self {
        Self {
            hit: BTreeSet::new(),
            faults: 0,
            open: None,
            looked: Instant::now(),
            longest_gap: Duration::ZERO,
        }
    }

    fn has_looked(&mut self) {
        self.longest_gap = self.longest_gap.max(self.looked.elapsed());
        self.looked = Instant::now();
    }

    fn make(&mut self, upset: Upset, cluster: &mut Cluster, job: &Value) -> Result<()> {
        self.has_looked();
        let stages = running(job);
        if let Some((_, _, since)) = self.open {
            self.hit.extend(stages);
            if since.elapsed() > WORKER_LOST + HANDED_ON {
                self.put_right(cluster)?;
            }
            return Ok(());
        }
        if upset == Upset::Nothing || stages.iter().all(|stage| self.hit.contains(stage)) {
            return Ok(());
        }
        let number = busy_worker(job).unwrap_or(self.faults % 2);
        if upset == Upset::ChildKilled && !cluster.kill_child(number)? {
            // It is being started: it is there at the next look.
            return Ok(());
        }
        self.hit.extend(stages);
        self.faults += 1;
        match upset {
            Upset::Nothing | Upset::ChildKilled => {}
            Upset::WorkerKilled => cluster.kill_worker(number)?,
            Upset::CoordinatorKilled => cluster.kill_coordinator()?,
            Upset::CoordinatorStopped => {
                cluster.stop_coordinator(WORKER_LOST + HANDED_ON)?;
                // No stage began or ended meanwhile, nor on a full disk.
                self.looked = Instant::now();
            }
            Upset::DiskFull => {
                let noticed = cluster.fill_disk(NOTICED)?;
                ensure!(
                    noticed,
                    "the coordinator has not seen within {NOTICED:?} that its disk is full"
                );
                self.looked = Instant::now();
            }
            Upset::WorkerStopped => {
                if let Some(Some(worker)) = cluster.workers.get(number) {
                    worker.signal(libc::SIGSTOP)?;
                }
                self.open = Some((upset, number, Instant::now()));
            }
            Upset::WireCut | Upset::WireCutOneWay => {
                let way = if self.faults.is_multiple_of(2) {
                    Way::Down
                } else {
                    Way::Up
                };
                match cluster.wires.get(number) {
                    Some(wire) if upset == Upset::WireCut => wire.cut(),
                    Some(wire) => wire.cut_one_way(way),
                    None => bail!("worker {number} has no wire"),
                }
                self.open = Some((upset, number, Instant::now()));
            }
        }
        Ok(())
    }

    fn put_right(&mut self, cluster: &mut Cluster) -> Result<()> {
        match self.open.take() {
            Some((Upset::WorkerStopped, number, _)) => {
                if let Some(Some(worker)) = cluster.workers.get(number) {
                    worker.signal(libc::SIGCONT)?;
                }
            }
            Some((Upset::WireCut | Upset::WireCutOneWay, number, _)) => {
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
