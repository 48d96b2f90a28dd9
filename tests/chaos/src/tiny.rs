//! The whole pipeline on the tiny parent, run by the real program on real processes, and disturbed.
//!
//! The cost table is imported, so that no measured time chooses the candidate: whatever happens in between, the
//! checkpoint must come out the same to the bit.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::process::{Process, program};
use crate::proxy::Proxy;

/// Silence after which a worker is given up.
pub const WORKER_LOST: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);
/// Longer than a disturbed job takes on a busy machine; only a failure waits for it.
const END: Duration = Duration::from_secs(600);

/// A coordinator and workers of the real program.
#[derive(Debug)]
pub struct Cluster {
    place: TempDir,
    data_dir: PathBuf,
    port: u16,
    /// The coordinator; none between a kill and the next start.
    pub coordinator: Option<Process>,
    /// The workers; none for one that was killed and not started again.
    pub workers: Vec<Option<Process>>,
    /// One for each worker.
    pub wires: Vec<Proxy>,
}

impl Cluster {
    /// Starts a coordinator on a data directory of the cluster's own, and so many workers, each on a wire of its own.
    ///
    /// # Errors
    /// When a process cannot be started.
    pub fn start(workers: usize) -> Result<Self> {
        let place = tempfile::Builder::new().prefix("espalier-chaos-").tempdir()?;
        let data_dir = place.path().join("data");
        Self::start_in(place, data_dir, workers)
    }

    /// The same, with the data directory given.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub fn start_in(place: TempDir, data_dir: PathBuf, workers: usize) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut cluster = Self {
            place,
            data_dir,
            port,
            coordinator: None,
            workers: Vec::new(),
            wires: Vec::new(),
        };
        cluster.start_coordinator()?;
        for number in 0..workers {
            cluster.wires.push(Proxy::start(port)?);
            cluster.workers.push(None);
            cluster.start_worker(number)?;
        }
        Ok(cluster)
    }

    /// A path in the cluster's place.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// The coordinator's endpoint, past the wires.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Starts the coordinator, where it was.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_coordinator(&mut self) -> Result<()> {
        let mut command = Command::new(program("espalier")?);
        command
            .args([
                "coordinator",
                "--listen",
                &format!("127.0.0.1:{}", self.port),
                "--data-dir",
            ])
            .arg(&self.data_dir)
            .arg("--store")
            .arg(self.path("store"))
            .args([
                "--heartbeat-interval",
                "500ms",
                "--worker-lost",
                &format!("{}s", WORKER_LOST.as_secs()),
            ]);
        self.coordinator = Some(Process::start(&mut command, &self.path("coordinator.log"))?);
        Ok(())
    }

    /// Starts a worker on its wire, under the name it always has.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_worker(&mut self, number: usize) -> Result<()> {
        let wire = self.wires.get(number).context("there is no such wire")?;
        let name = format!("worker-{number}");
        let mut command = Command::new(program("espalier")?);
        command.args([
            "worker",
            "run",
            "--threads",
            "1",
            "--coordinator",
            &wire.endpoint(),
            "--name",
            &name,
        ]);
        let worker = Process::start(&mut command, &self.path(&format!("{name}.log")))?;
        if let Some(place) = self.workers.get_mut(number) {
            *place = Some(worker);
        }
        Ok(())
    }

    /// Kills the coordinator and starts it again.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn kill_coordinator(&mut self) -> Result<()> {
        if let Some(mut coordinator) = self.coordinator.take() {
            coordinator.kill()?;
        }
        self.start_coordinator()
    }

    /// Kills a worker and starts it again.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn kill_worker(&mut self, number: usize) -> Result<()> {
        if let Some(mut worker) = self.workers.get_mut(number).and_then(Option::take) {
            worker.kill()?;
        }
        self.start_worker(number)
    }

    /// Runs the program's client.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn client(&self, arguments: &[&str]) -> Result<std::process::Output> {
        let mut command = Command::new(program("espalier")?);
        command.args(arguments).args(["--coordinator", &self.endpoint()]);
        Ok(command.output()?)
    }

    /// Submits the tiny job; safe to repeat.
    ///
    /// # Errors
    /// When it is refused.
    pub fn submit(&mut self, spec: &Path) -> Result<()> {
        let start = Instant::now();
        let (spec, output) = (spec.to_string_lossy(), self.path("out"));
        let output = output.to_string_lossy();
        loop {
            let tried = self.client(&[
                "job",
                "submit",
                &spec,
                "--output-dir",
                &output,
                "--request-id",
                "the tiny job",
            ])?;
            if tried.status.success() {
                return Ok(());
            }
            let why = String::from_utf8_lossy(&tried.stderr).into_owned();
            // Exit code 4: the coordinator is not there yet.
            ensure!(
                tried.status.code() == Some(4) && start.elapsed() < END,
                "the job was refused: {why}"
            );
            self.check_coordinator()?;
            std::thread::sleep(PAUSE);
        }
    }

    /// A coordinator that nobody killed must not have ended.
    fn check_coordinator(&mut self) -> Result<()> {
        let Some(coordinator) = &mut self.coordinator else {
            return Ok(());
        };
        let Some(status) = coordinator.ended()? else {
            return Ok(());
        };
        let log = fs::read_to_string(self.path("coordinator.log")).unwrap_or_default();
        bail!(
            "the coordinator ended by itself ({status}): {}",
            log.lines().last().unwrap_or_default()
        )
    }

    /// The job as it is now; none while no coordinator answers.
    ///
    /// # Errors
    /// When the client cannot be started.
    pub fn job(&self) -> Result<Option<Value>> {
        let shown = self.client(&["job", "get", "job-1", "-o", "json"])?;
        Ok(serde_json::from_slice(&shown.stdout).ok())
    }

    /// Follows the job to its end; `disturb` is called with every view of it.
    ///
    /// # Errors
    /// When the job does not succeed, or `disturb` fails.
    pub fn follow(&mut self, mut disturb: impl FnMut(&mut Self, &Value) -> Result<()>) -> Result<Value> {
        let start = Instant::now();
        loop {
            ensure!(
                start.elapsed() < END,
                "the job has not ended; files are in {}",
                self.keep().display()
            );
            self.check_coordinator()?;
            std::thread::sleep(PAUSE);
            let Some(job) = self.job()? else { continue };
            match job["state"].as_str() {
                Some("succeeded") => return Ok(job),
                Some("failed" | "cancelled") => {
                    let message = job["message"].clone();
                    bail!(
                        "the job did not succeed: {message}; files are in {}",
                        self.keep().display()
                    );
                }
                _ => disturb(self, &job)?,
            }
        }
    }

    /// What the job made: file names below the checkpoint with the hash of their content.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn checkpoint(&self) -> Result<Vec<(String, String)>> {
        let directory = self.path("out").join("checkpoint");
        let mut files = Vec::new();
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            files.push((name, espalier_artifact::hash_file(&path)?.to_string()));
        }
        files.sort();
        ensure!(!files.is_empty(), "{} is empty", directory.display());
        Ok(files)
    }

    /// Keeps the cluster's files, for a look at what went wrong.
    pub fn keep(&mut self) -> PathBuf {
        self.place.disable_cleanup(true);
        self.place.path().to_owned()
    }
}

/// Names of the stages that have begun.
pub fn begun(job: &Value) -> Vec<String> {
    let stages = job["stages"].as_array().cloned().unwrap_or_default();
    let begun = stages
        .iter()
        .filter(|stage| matches!(stage["state"].as_str(), Some("running" | "done")));
    begun
        .filter_map(|stage| Some(stage["name"].as_str()?.to_owned()))
        .collect()
}

/// The spec of the tiny job, small enough to be run many times.
///
/// # Errors
/// When it cannot be written.
pub fn write_spec(directory: &Path) -> Result<PathBuf> {
    write_with_recovery(directory, 16_384)
}

/// The same, with training that takes a while.
///
/// # Errors
/// When it cannot be written.
pub fn write_long_spec(directory: &Path) -> Result<PathBuf> {
    write_with_recovery(directory, 262_144)
}

fn write_with_recovery(directory: &Path, tokens: u64) -> Result<PathBuf> {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../examples")
        .canonicalize()?;
    let examples = examples.display();
    let text = format!(
        "parent: {examples}/tiny
data: {{train: [{examples}/data/train.jsonl.xz], validation: [{examples}/data/validation.jsonl.xz]}}
target:
  cost_table: {examples}/tiny/cost-table.json
  workload: {{prompt_tokens: 128, output_tokens: 32}}
  limits: {{block_parameters: 60%}}
search: {{mlp_grid: 64}}
budget: {{sequence_tokens: 64, calibration_tokens: 1024, scoring_tokens: 512, depth_tokens: 512,
  recovery_tokens: {tokens}, validation_tokens: 1024}}
"
    );
    let path = directory.join("job.yaml");
    fs::write(&path, text)?;
    Ok(path)
}
