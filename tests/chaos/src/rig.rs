//! A cluster of errand runners in a directory of its own: one coordinator to kill and start again, workers
//! on a wire, and a client that outlives both.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use espalier_coordinator::client::Client;
use espalier_proto::v1::{Job, JobState, submit_request::Spec};
use tempfile::TempDir;

use crate::ledger::{self, Entry};
use crate::port;
use crate::process::{Process, program};
use crate::proxy::Proxy;
use crate::story::Story;

/// One call of the client.
const CALL: Duration = Duration::from_secs(10);
/// How long a coordinator may take to answer after its start.
const START: Duration = Duration::from_secs(60);

/// A cluster.
#[derive(Debug)]
pub struct Rig {
    place: TempDir,
    story: Story,
    worker_lost: Duration,
    ships: bool,
    /// How many coordinators on disks of their own there have been.
    disks: usize,
    port: u16,
    coordinator: Option<Process>,
    /// Of the coordinator that serves.
    starts: usize,
    workers: Vec<Process>,
    /// Between workers and coordinator.
    pub wire: Proxy,
}

impl Rig {
    /// A coordinator, and so many workers that reach it over one wire. With `ships` its artifact store lies outside
    /// its data directory, so that another node can take over from there.
    ///
    /// # Errors
    /// When a process cannot be started.
    pub fn start(story: Story, workers: usize, worker_lost: Duration, ships: bool) -> Result<Self> {
        let place = tempfile::Builder::new().prefix("espalier-chaos-").tempdir()?;
        fs::create_dir(place.path().join("parent"))?;
        fs::write(place.path().join("text.txt"), "some text\n")?;
        let port = port::reserve()?;
        let mut rig = Self {
            wire: Proxy::start(port)?,
            place,
            story,
            worker_lost,
            ships,
            disks: 0,
            port,
            coordinator: None,
            starts: 0,
            workers: Vec::new(),
        };
        rig.start_coordinator()?;
        for number in 0..workers {
            rig.start_worker(number)?;
        }
        Ok(rig)
    }

    /// Where the run's files lie.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// The data directory of the coordinator.
    pub fn data_dir(&self) -> PathBuf {
        self.path(&format!("data-{}", self.disks))
    }

    /// Moves to another node: an empty disk, another port, the wire pointed there. Gives the coordinator that was,
    /// if it still runs.
    ///
    /// # Errors
    /// When no port is free.
    pub fn move_on(&mut self) -> Result<Option<Process>> {
        self.disks += 1;
        self.port = port::reserve()?;
        self.wire.retarget(self.port);
        Ok(self.coordinator.take())
    }

    /// Starts a coordinator on the data directory of an earlier node, beside the one that serves.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_old_coordinator(&self, disk: usize) -> Result<Process> {
        let data_dir = self.path(&format!("data-{disk}"));
        let mut command = self.coordinator_command(&data_dir, port::reserve()?)?;
        Process::start(&mut command, &self.path("old-coordinator.log"))
    }

    /// Starts the coordinator on its port and its data directory. Does not wait for it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_coordinator(&mut self) -> Result<()> {
        let mut command = self.coordinator_command(&self.data_dir(), self.port)?;
        self.coordinator = Some(Process::start(&mut command, &self.path("coordinator.log"))?);
        self.starts += 1;
        Ok(())
    }

    fn coordinator_command(&self, data_dir: &Path, port: u16) -> Result<Command> {
        let mut command = Command::new(program("chaos-coordinator")?);
        command
            .args(["--listen", &format!("127.0.0.1:{port}"), "--data-dir"])
            .arg(data_dir)
            .args(["--story", &serde_json::to_string(&self.story)?])
            .args(["--worker-lost-ms", &self.worker_lost.as_millis().to_string()]);
        if self.ships {
            command.arg("--store").arg(self.path("store"));
        }
        Ok(command)
    }

    /// Kills the coordinator without a warning.
    ///
    /// # Errors
    /// When it had ended by itself: with its last words.
    pub fn kill_coordinator(&mut self) -> Result<()> {
        let Some(mut coordinator) = self.coordinator.take() else {
            return Ok(());
        };
        if let Some(status) = coordinator.ended()? {
            let log = fs::read_to_string(self.path("coordinator.log")).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(5).collect();
            bail!("the coordinator ended by itself ({status}): {tail:?}");
        }
        coordinator.kill()
    }

    /// How often a coordinator was started and killed before it served. Every one of them appends to one log.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn unfinished_starts(&self) -> Result<usize> {
        let log = fs::read_to_string(self.path("coordinator.log"))?;
        let served = log.matches("the coordinator listens").count();
        Ok(self.starts.saturating_sub(served))
    }

    fn start_worker(&mut self, number: usize) -> Result<()> {
        let worker = self.start_rival(number)?;
        self.workers.push(worker);
        Ok(())
    }

    /// Starts another process under a worker's name, beside the one that is there.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_rival(&self, number: usize) -> Result<Process> {
        let mut command = Command::new(program("chaos-worker")?);
        command
            .args([
                "--coordinator",
                &self.wire.endpoint(),
                "--name",
                &format!("worker-{number}"),
            ])
            .env(ledger::VARIABLE, self.path("ledger.jsonl"));
        Process::start(&mut command, &self.path(&format!("worker-{number}.log")))
    }

    /// A worker's process.
    pub fn worker(&mut self, number: usize) -> Option<&mut Process> {
        self.workers.get_mut(number)
    }

    /// What has happened so far.
    ///
    /// # Errors
    /// When the ledger is damaged.
    pub fn ledger(&self) -> Result<Vec<Entry>> {
        ledger::read(&self.path("ledger.jsonl"))
    }

    /// Where the coordinator answers, past the wire.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// A client, once the coordinator answers.
    ///
    /// # Errors
    /// When it does not within a minute.
    pub async fn client(&self) -> Result<Client> {
        let endpoint = self.endpoint();
        let start = Instant::now();
        loop {
            let tried = match Client::connect(&endpoint, CALL).await {
                Ok(mut client) => client.list(1, "", &[]).await.map(|_| client),
                Err(error) => Err(error),
            };
            match tried {
                Ok(client) => return Ok(client),
                Err(error) if start.elapsed() > START => {
                    return Err(error).context("the coordinator does not answer");
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// Submits a job of this name under a request id of its own, as often as it takes.
    ///
    /// # Errors
    /// When the job is refused.
    pub async fn submit(&self, name: &str) -> Result<String> {
        let spec = self.spec(name);
        let start = Instant::now();
        loop {
            let mut client = self.client().await?;
            match client.submit(Spec::Yaml(spec.clone()), name).await {
                Ok((job, _)) => return Ok(job.id),
                Err(error) if is_passing(&error) && start.elapsed() < START => {}
                Err(error) => return Err(error).context("the job was refused"),
            }
        }
    }

    fn spec(&self, name: &str) -> String {
        let at = self.place.path().display();
        format!(
            "parent: {at}/parent\ndata: {{train: [{at}/text.txt]}}\ntarget:\n  workload: {{prompt_tokens: 8, \
             output_tokens: 8, concurrency: 1}}\n  limits: {{latency: 75%}}\noutput: {at}/{name}\n"
        )
    }

    /// A job as it is now.
    ///
    /// # Errors
    /// When the coordinator does not answer for a minute.
    pub async fn job(&self, id: &str) -> Result<Job> {
        let start = Instant::now();
        loop {
            let mut client = self.client().await?;
            match client.get(id).await {
                Ok(job) => return Ok(job),
                Err(error) if is_passing(&error) && start.elapsed() < START => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for the end of a job.
    ///
    /// # Errors
    /// When it has not ended after `limit`.
    pub async fn end_of(&self, id: &str, limit: Duration) -> Result<Job> {
        let start = Instant::now();
        loop {
            let job = self.job(id).await?;
            if matches!(
                job.state(),
                JobState::Succeeded | JobState::Failed | JobState::Cancelled
            ) {
                return Ok(job);
            }
            if start.elapsed() > limit {
                bail!("{id} has not ended after {limit:?}: {job:?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Keeps the run's files, for a look at what went wrong.
    pub fn keep(&mut self) -> &Path {
        self.place.disable_cleanup(true);
        self.place.path()
    }
}

/// Whether the coordinator may have gone in the middle of the call.
fn is_passing(error: &espalier_coordinator::Error) -> bool {
    use espalier_coordinator::Error;
    matches!(
        error,
        Error::Unreachable { .. } | Error::Timeout { .. } | Error::Stopping | Error::Internal(_)
    )
}
