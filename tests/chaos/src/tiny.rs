//! The whole pipeline on the tiny parent, run by the real program on real processes, and disturbed.
//!
//! The cost table is imported, so that no measured time chooses the candidate: whatever happens in between, the
//! checkpoint must come out the same to the bit.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use espalier_coordinator::Error;
use espalier_coordinator::client::Client;
use serde_json::Value;
use tempfile::TempDir;

use crate::port;
use crate::process::{Process, program};
use crate::proxy::Proxy;
use crate::small_disk::SmallDisk;

/// Silence after which a worker is given up.
pub const WORKER_LOST: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);
/// Between looks at a job that is followed: short, so that no stage is over unseen.
const LOOK: Duration = Duration::from_millis(10);
/// One look; a coordinator that stands still gives none.
const CALL: Duration = Duration::from_secs(2);
/// Longer than a disturbed job takes on a busy machine; only a failure waits for it.
const END: Duration = Duration::from_secs(600);

/// A coordinator and workers of the real program.
#[derive(Debug)]
pub struct Cluster {
    /// The coordinator; none between a kill and the next start.
    pub coordinator: Option<Process>,
    /// The workers; none for one that was killed and not started again.
    pub workers: Vec<Option<Process>>,
    /// One for each worker.
    pub wires: Vec<Proxy>,
    port: u16,
    runtime: tokio::runtime::Runtime,
    watching: Option<Client>,
    data_dir: PathBuf,
    /// What the data directory lies on, where that is to be filled. Dropped before the place, which it lies in.
    disk: Option<SmallDisk>,
    place: TempDir,
}

impl Cluster {
    /// Starts a coordinator on a data directory of the cluster's own, and so many workers, each on a wire of its own.
    ///
    /// # Errors
    /// When a process cannot be started.
    pub fn start(workers: usize) -> Result<Self> {
        let place = tempfile::Builder::new().prefix("espalier-chaos-").tempdir()?;
        Self::start_in(place, None, workers)
    }

    /// The same, with the data directory on a disk that can be filled.
    ///
    /// # Errors
    /// As [`Cluster::start`], and when this process may not mount.
    pub fn start_on_small_disk(workers: usize) -> Result<Self> {
        let place = tempfile::Builder::new().prefix("espalier-chaos-").tempdir()?;
        let disk = SmallDisk::mount(&place.path().join("data"))?;
        Self::start_in(place, Some(disk), workers)
    }

    fn start_in(place: TempDir, disk: Option<SmallDisk>, workers: usize) -> Result<Self> {
        let port = port::reserve()?;
        let mut cluster = Self {
            coordinator: None,
            workers: Vec::new(),
            wires: Vec::new(),
            port,
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?,
            watching: None,
            data_dir: place.path().join("data"),
            disk,
            place,
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

    /// Kills the process of a worker's device; false when there is none just now.
    ///
    /// # Errors
    /// When processes cannot be listed.
    pub fn kill_child(&self, number: usize) -> Result<bool> {
        let Some(Some(worker)) = self.workers.get(number) else {
            return Ok(false);
        };
        let children = worker.children()?;
        for child in &children {
            // SAFETY: kill touches no memory. A child that has ended meanwhile is its worker's to wait for, so its
            // number is not another's yet.
            unsafe { libc::kill(*child, libc::SIGKILL) };
        }
        Ok(!children.is_empty())
    }

    /// Has the coordinator stand still for a while.
    ///
    /// # Errors
    /// When it is gone.
    pub fn stop_coordinator(&self, span: Duration) -> Result<()> {
        let coordinator = self.coordinator.as_ref().context("there is no coordinator")?;
        coordinator.signal(libc::SIGSTOP)?;
        std::thread::sleep(span);
        coordinator.signal(libc::SIGCONT)
    }

    /// Fills the coordinator's disk until it says that it is full, and frees it again. False when it has not said so
    /// within `limit`.
    ///
    /// # Errors
    /// When the data directory is not on a small disk, or cannot be filled.
    pub fn fill_disk(&mut self, limit: Duration) -> Result<bool> {
        let disk = self.disk.as_ref().context("the disk is not a small one")?;
        disk.fill()?;
        let start = Instant::now();
        let mut noticed = false;
        while !noticed && start.elapsed() < limit {
            std::thread::sleep(PAUSE);
            noticed = self
                .readiness()
                .is_ok_and(|answer| answer.contains("disk is full"));
        }
        disk.free()?;
        Ok(noticed)
    }

    /// What the coordinator says of itself to probes.
    fn readiness(&self) -> Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(CALL))?;
        stream.write_all(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
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
    /// When it answers that there is no such job.
    pub fn job(&mut self) -> Result<Option<Value>> {
        let mut client = match self.watching.take() {
            Some(client) => client,
            None => match self.runtime.block_on(Client::connect(&self.endpoint(), CALL)) {
                Ok(client) => client,
                Err(_) => return Ok(None),
            },
        };
        match self.runtime.block_on(client.get("job-1")) {
            Ok(job) => {
                self.watching = Some(client);
                Ok(Some(espalier_proto::json::job(&job, true)))
            }
            Err(error @ Error::NotFound(_)) => Err(error.into()),
            // Away, or on its way out.
            Err(_) => Ok(None),
        }
    }

    /// The job's tasks of one executor, each whole.
    ///
    /// # Errors
    /// When they cannot be asked for.
    pub fn tasks_of(&self, kind: &str) -> Result<Vec<Value>> {
        let listed = self.client(&["task", "list", "job-1", "-o", "json"])?;
        let listed: Vec<Value> = serde_json::from_slice(&listed.stdout).context("tasks cannot be listed")?;
        let mut tasks = Vec::new();
        for task in listed.iter().filter(|task| task["kind"] == kind) {
            let got = self.client(&["task", "get", &task["id"].to_string(), "-o", "json"])?;
            tasks.push(serde_json::from_slice(&got.stdout).context("a task cannot be read")?);
        }
        Ok(tasks)
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
            std::thread::sleep(LOOK);
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

/// Names of the stages that run.
pub fn running(job: &Value) -> Vec<String> {
    let stages = job["stages"].as_array().into_iter().flatten();
    let running = stages.filter(|stage| stage["state"] == "running");
    running
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
