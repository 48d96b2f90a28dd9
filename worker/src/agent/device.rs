//! One task for each device: owns the device's child, runs one attempt after another on it, and replaces it
//! on error, crash, hang, stop, change of model, or when asked to. Before a child is replaced, the device
//! must be free again.

mod watch;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use espalier_proto::task::{Failure, FailureKind, TaskSpec};
use espalier_proto::v1::Lease;
use tokio::sync::mpsc;
use tracing::Instrument;

use super::core::{DeviceEvent, Ended, Run};
use super::leftover::Mark;
use super::memory::{DeviceMemory, HostMemory, RECLAIM_TIMEOUT, Room, wait_until_free};
use super::options::{ChildOptions, DeviceOptions};
use super::process::Process;
use crate::child::protocol::{Order, Place, Request};
use crate::trace::{Names, attempt_span, traceparent_below};
use watch::{Outcome, Watch};

/// What the agent asks of a device.
#[derive(Debug)]
pub enum Command {
    /// Run this; only sent when the attempt before has ended.
    Run(Box<Run>),
    /// Stop this attempt, if it still runs.
    Stop {
        /// Which.
        lease: Lease,
        /// Whether it should first leave what the next attempt can go on from, however long that takes.
        checkpoint: bool,
    },
    /// Every rank of this attempt's gang stands ready.
    Release {
        /// Which.
        lease: Lease,
        /// Names the communicator.
        communicator: String,
        /// Addresses of all ranks, in their order.
        addresses: Vec<String>,
    },
    /// Replace the child; only sent when no attempt runs.
    Replace,
}

/// How long it may take to remove what killed children had begun to write; the file system may be away.
const SWEEP_PATIENCE: Duration = Duration::from_secs(5);
/// Of a failure's message: more would not fit the coordinator's messages, and tells nobody more.
const MESSAGE_BYTES: usize = 4096;

fn failed(mut failure: Failure) -> Ended {
    let longest = MESSAGE_BYTES.min(failure.message.len());
    let whole = (0..=longest)
        .rev()
        .find(|end| failure.message.is_char_boundary(*end));
    failure.message.truncate(whole.unwrap_or(0));
    Ended::Failure(serde_json::to_vec(&failure).unwrap_or_default())
}

fn failure(kind: FailureKind, message: String) -> Ended {
    failed(Failure { kind, message })
}

/// The model a task keeps resident; none when any child will do.
fn resident_model(spec: &TaskSpec) -> Option<&str> {
    let parent = match spec {
        TaskSpec::Ingest(_) | TaskSpec::Profile(_) | TaskSpec::Check(_) => return None,
        TaskSpec::Calibrate(task) => &task.parent,
        TaskSpec::Sort(task) => &task.parent,
        TaskSpec::Score(task) => &task.parent,
        TaskSpec::DepthOrder(task) => &task.parent,
        TaskSpec::Rank(task) => &task.parent,
        TaskSpec::Recover(task) => &task.parent,
        TaskSpec::Evaluate(task) => &task.parent,
        TaskSpec::Export(task) => &task.parent,
        TaskSpec::Verify(task) => &task.parent,
    };
    Some(&parent.fingerprint)
}

/// The task of one device.
#[derive(Debug)]
pub struct Runner {
    device: DeviceOptions,
    options: ChildOptions,
    coordinator: String,
    memory: Arc<dyn DeviceMemory>,
    reclaim_timeout: Duration,
    events: mpsc::Sender<DeviceEvent>,
    process: Option<Process>,
    resident: Option<String>,
    /// What this device's children are known by.
    mark: Mark,
    /// Process groups of children before, whose memory may not be back yet.
    leaving: Vec<i32>,
    /// Lines of the child's log that belong to attempts before the one that runs.
    lines_before: u64,
    /// Where the last attempt's artifacts lie.
    store: String,
}

/// How the run of one attempt leaves the runner.
enum After {
    GoOn,
    AgentGone,
}

impl Runner {
    /// A device without a child yet, whose children will be known by `mark`. `coordinator` is where this host is reached
    /// from: a rank of a gang gives the address of that side.
    pub fn new(
        device: DeviceOptions,
        options: ChildOptions,
        coordinator: &str,
        mark: Mark,
        events: mpsc::Sender<DeviceEvent>,
    ) -> Self {
        Self {
            device,
            options,
            coordinator: coordinator.to_owned(),
            memory: Arc::new(HostMemory),
            reclaim_timeout: RECLAIM_TIMEOUT,
            events,
            process: None,
            resident: None,
            mark,
            leaving: Vec::new(),
            lines_before: 0,
            store: String::new(),
        }
    }

    /// The same, with memory that somebody else tells of.
    #[must_use]
    pub fn with_memory(self, memory: Arc<dyn DeviceMemory>, reclaim_timeout: Duration) -> Self {
        Self {
            memory,
            reclaim_timeout,
            ..self
        }
    }

    /// Serves commands until the agent drops its sender; then the child is ended, or killed if it works.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.leaving = self.mark.clear().await;
        while let Some(command) = commands.recv().await {
            match command {
                Command::Run(run) => {
                    if let After::AgentGone = self.attempt(*run, &mut commands).await {
                        return self.kill().await;
                    }
                }
                Command::Replace => self.end_child().await,
                // It ended before this came; its end has been told.
                Command::Stop { .. } | Command::Release { .. } => {}
            }
        }
        self.end_child().await;
    }

    /// Runs one attempt to its end, and tells it.
    async fn attempt(&mut self, run: Run, commands: &mut mpsc::Receiver<Command>) -> After {
        let lease = run.lease;
        let spec: TaskSpec = match serde_json::from_slice(&run.assign.spec_json) {
            Ok(spec) => spec,
            Err(error) => {
                let message = format!("the task cannot be decoded: {error}");
                self.tell_end(lease, failure(FailureKind::Invalid, message)).await;
                return After::GoOn;
            }
        };
        let names = Names {
            job: &run.assign.job_id,
            task: run.assign.task_id,
            attempt: lease.attempt,
            kind: spec.kind(),
        };
        let span = attempt_span(names, &run.assign.traceparent);
        let traceparent = traceparent_below(&span, &run.assign.traceparent);
        async {
            let ended = self.run_to_its_end(run, spec, traceparent, commands).await;
            match ended {
                Some(ended) => {
                    log_end(&ended);
                    self.tell_end(lease, ended).await;
                    After::GoOn
                }
                None => After::AgentGone,
            }
        }
        .instrument(span)
        .await
    }

    /// None when the agent is gone.
    async fn run_to_its_end(
        &mut self,
        run: Run,
        spec: TaskSpec,
        traceparent: String,
        commands: &mut mpsc::Receiver<Command>,
    ) -> Option<Ended> {
        let lease = run.lease;
        self.store.clone_from(&run.artifact_store);
        let model = resident_model(&spec).map(str::to_owned);
        if model.is_some() && self.resident.is_some() && self.resident != model {
            self.end_child().await;
        }
        let room = Room {
            need_bytes: run.assign.memory_bytes,
            ample_bytes: run.assign.ample_bytes,
        };
        if self.process.is_none()
            && let Some(ended) = self.start(lease, room, commands).await?
        {
            return Some(ended);
        }
        let gang = match run.assign.gang {
            Some(gang) => Some(Place {
                generation: gang.generation,
                rank: gang.rank,
                ranks: gang.ranks,
                host: reachable_host(&self.coordinator).await,
            }),
            None => None,
        };
        let is_rank = gang.is_some();
        let order = Order {
            attempt: lease.attempt,
            job: run.assign.job_id,
            task: run.assign.task_id,
            traceparent,
            artifact_store: run.artifact_store,
            artifact_store_id: run.artifact_store_id,
            spec,
            gang,
        };
        let request = Request::Run(Box::new(order));
        if let Some(process) = self.process.as_mut() {
            self.lines_before = process.lines_passed();
            if let Err(error) = process.send(&request) {
                self.kill().await;
                return Some(failure(FailureKind::Crashed, error.to_string()));
            }
        }
        if model.is_some() {
            self.resident = model;
        }
        let outcome = match self.process.as_mut() {
            Some(process) => {
                let watch = Watch::new(lease, is_rank, self.lines_before, &self.options, &self.events);
                watch.until_it_ends(process, commands).await
            }
            None => Outcome::Crashed,
        };
        self.conclude(lease, outcome).await
    }

    /// Waits until the device is free and starts a child on it. The inner value is the attempt's end when it
    /// cannot be; the outer is none when the agent is gone.
    async fn start(
        &mut self,
        lease: Lease,
        room: Room,
        commands: &mut mpsc::Receiver<Command>,
    ) -> Option<Option<Ended>> {
        let (memory, leaving) = (Arc::clone(&self.memory), self.leaving.clone());
        let free = wait_until_free(&memory, &leaving, room, self.reclaim_timeout);
        tokio::pin!(free);
        let free = loop {
            tokio::select! {
                free = &mut free => break free,
                command = commands.recv() => match command? {
                    Command::Stop { lease: of, .. } if of == lease => return Some(Some(Ended::Stopped)),
                    _ => {}
                },
            }
        };
        if let Err(evidence) = free {
            tracing::error!(
                device = self.device.id,
                evidence,
                "the device is not used again yet"
            );
            return Some(Some(failure(FailureKind::OutOfMemory, evidence)));
        }
        self.leaving.clear();
        self.sweep().await;
        match Process::start(&self.options, &self.device, &self.mark) {
            Ok(process) => {
                self.process = Some(process);
                Some(None)
            }
            Err(error) => Some(Some(failure(FailureKind::Crashed, error.to_string()))),
        }
    }

    /// Makes an end of an outcome, and gives the device up where that is called for.
    async fn conclude(&mut self, lease: Lease, outcome: Outcome) -> Option<Ended> {
        Some(match outcome {
            // Whatever it had started for the attempt would go on holding the device.
            Outcome::Ended(Ended::Stopped) => {
                self.end_child().await;
                Ended::Stopped
            }
            Outcome::Ended(ended) => ended,
            Outcome::Failed(failure) => {
                // A task refused for what it asks says nothing against the child and the model it holds.
                if failure.kind != FailureKind::Invalid {
                    self.end_child().await;
                }
                failed(failure)
            }
            Outcome::Garbled(reason) => {
                self.kill().await;
                let message = format!("a reply of the device child is not understood: {reason}");
                failure(FailureKind::Error, message)
            }
            Outcome::Crashed => match self.process.take() {
                Some(process) => {
                    self.resident = None;
                    self.leaving.extend(process.group());
                    let (failure, lines) = process.autopsy().await;
                    self.sweep().await;
                    watch::pass_log(lease, self.lines_before, lines, &self.events);
                    failed(failure)
                }
                None => failure(FailureKind::Crashed, "the device child is gone".to_owned()),
            },
            Outcome::Hung => {
                self.kill().await;
                let seconds = self.options.hang_timeout.as_secs();
                failure(
                    FailureKind::Hung,
                    format!("no progress for {seconds} s; the device child was killed"),
                )
            }
            Outcome::Killed => {
                self.kill().await;
                Ended::Stopped
            }
            Outcome::AgentGone => return None,
        })
    }

    /// Tells the agent; this one waits for room, for an end must arrive.
    async fn tell_end(&self, lease: Lease, ended: Ended) {
        let _ = self.events.send(DeviceEvent::Ended { lease, ended }).await;
    }

    /// Gives up a child that does nothing.
    async fn end_child(&mut self) {
        self.resident = None;
        if let Some(process) = self.process.take() {
            self.leaving.extend(process.group());
            process.end().await;
        }
    }

    /// Gives up a child, whatever it does.
    async fn kill(&mut self) {
        self.resident = None;
        if let Some(process) = self.process.take() {
            self.leaving.extend(process.group());
            process.kill().await;
            self.sweep().await;
        }
    }

    /// Removes what children that are gone had begun to write.
    async fn sweep(&self) {
        if self.store.is_empty() {
            return;
        }
        let store = self.store.clone();
        let sweep = tokio::task::spawn_blocking(move || espalier_artifact::sweep_scratch(&store));
        match tokio::time::timeout(SWEEP_PATIENCE, sweep).await {
            Ok(Ok(Ok(0))) => {}
            Ok(Ok(Ok(files))) => tracing::info!(files, "what killed children had begun to write is removed"),
            Ok(Ok(Err(error))) => tracing::warn!(%error, "what killed children had begun to write stays"),
            Ok(Err(_)) | Err(_) => {
                tracing::warn!("what killed children had begun to write is not removed yet")
            }
        }
    }
}

fn log_end(ended: &Ended) {
    match ended {
        Ended::Output(_) => tracing::debug!("the attempt is done"),
        Ended::Failure(json) => {
            tracing::warn!(failure = %String::from_utf8_lossy(json), "the attempt failed");
        }
        Ended::Stopped => tracing::info!("the attempt has stopped"),
    }
}

/// The address of the side of this host that looks towards the coordinator; loopback when that cannot be told, which
/// no other host reaches.
async fn reachable_host(coordinator: &str) -> String {
    let found = tokio::time::timeout(Duration::from_secs(2), own_address_towards(coordinator)).await;
    if let Ok(Some(address)) = found {
        return address.to_string();
    }
    tracing::warn!(
        coordinator,
        "no way to the coordinator is known: ranks on other hosts will not reach this one"
    );
    Ipv4Addr::LOCALHOST.to_string()
}

async fn own_address_towards(coordinator: &str) -> Option<IpAddr> {
    let uri: tonic::codegen::http::Uri = coordinator.parse().ok()?;
    let host = uri.host()?.trim_matches(['[', ']']);
    for target in tokio::net::lookup_host((host, uri.port_u16().unwrap_or(80)))
        .await
        .ok()?
    {
        let any: IpAddr = match target {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let Ok(socket) = tokio::net::UdpSocket::bind((any, 0)).await else {
            continue;
        };
        // Chooses a route and sends nothing.
        if socket.connect(target).await.is_ok() {
            return Some(socket.local_addr().ok()?.ip());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_rank_announces_the_address_by_which_it_reaches_the_coordinator() {
        assert_eq!(reachable_host("http://127.0.0.1:7474").await, "127.0.0.1");
        if std::net::TcpListener::bind("[::1]:0").is_ok() {
            assert_eq!(reachable_host("http://[::1]:7474").await, "::1");
        }
        assert_eq!(reachable_host("nothing of the kind").await, "127.0.0.1");
    }
}
