//! One task for each device: owns the device's child, runs one attempt after another on it, and replaces it
//! on error, crash, hang, stop or change of model.

use std::collections::VecDeque;

use espalier_proto::task::{Failure, FailureKind, Progress, TaskSpec};
use espalier_proto::v1::Lease;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::options::{ChildOptions, DeviceOptions};
use super::process::{FromChild, Process};
use crate::child::protocol::{Reply, Request};

/// What the agent asks of a device.
#[derive(Debug)]
pub enum Command {
    /// Run this when the attempts before it have ended.
    Run {
        /// The right to.
        lease: Lease,
        /// The task.
        spec: Box<TaskSpec>,
        /// URL of the artifact store.
        artifact_store: String,
    },
    /// Stop this attempt, whether it runs or waits.
    Stop {
        /// Which.
        attempt: u64,
    },
}

/// How an attempt ended.
#[derive(Debug)]
pub enum Ended {
    /// JSON of a `TaskOutput`.
    Output(Vec<u8>),
    /// JSON of a `Failure`.
    Failure(Vec<u8>),
    /// It was stopped and the device is free.
    Stopped,
}

/// What a device tells the agent.
#[derive(Debug)]
pub enum Event {
    /// How far an attempt has come; lossy.
    Progress {
        /// Which attempt.
        lease: Lease,
        /// JSON of a `Progress`.
        progress_json: Vec<u8>,
    },
    /// Lines of the log; lossy.
    Log {
        /// Which attempt.
        lease: Lease,
        /// The lines.
        lines: Vec<String>,
    },
    /// An attempt ended.
    Ended {
        /// Which attempt.
        lease: Lease,
        /// How.
        ended: Ended,
    },
}

impl Event {
    /// An attempt that cannot even start.
    pub fn invalid(lease: Lease, message: String) -> Self {
        Self::Ended {
            lease,
            ended: failure(FailureKind::Invalid, message),
        }
    }
}

fn failure(kind: FailureKind, message: String) -> Ended {
    failed(&Failure { kind, message })
}

fn failed(failure: &Failure) -> Ended {
    Ended::Failure(serde_json::to_vec(failure).unwrap_or_default())
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
    events: mpsc::Sender<Event>,
    process: Option<Process>,
    resident: Option<String>,
    waiting: VecDeque<(Lease, Box<TaskSpec>, String)>,
}

/// How a watch over a running attempt ended.
enum Outcome {
    Ended(Ended),
    Failed(Failure),
    Garbled(String),
    Crashed,
    Hung,
    Killed,
    AgentGone,
}

impl Runner {
    /// A device without a child yet.
    pub fn new(device: DeviceOptions, options: ChildOptions, events: mpsc::Sender<Event>) -> Self {
        Self {
            device,
            options,
            events,
            process: None,
            resident: None,
            waiting: VecDeque::new(),
        }
    }

    /// Serves commands until the agent drops its sender; then the child is killed.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        loop {
            let next = match self.waiting.pop_front() {
                Some(next) => next,
                None => match commands.recv().await {
                    Some(Command::Run {
                        lease,
                        spec,
                        artifact_store,
                    }) => (lease, spec, artifact_store),
                    // It ended before the stop came; its end has been told.
                    Some(Command::Stop { .. }) => continue,
                    None => break,
                },
            };
            let (lease, spec, artifact_store) = next;
            if !self.attempt(lease, spec, artifact_store, &mut commands).await {
                break;
            }
        }
        self.kill().await;
    }

    /// Runs one attempt to its end; false when the agent is gone.
    async fn attempt(
        &mut self,
        lease: Lease,
        spec: Box<TaskSpec>,
        artifact_store: String,
        commands: &mut mpsc::Receiver<Command>,
    ) -> bool {
        let model = resident_model(&spec).map(str::to_owned);
        if model.is_some() && self.resident.is_some() && self.resident != model {
            self.kill().await;
        }
        if let Err(error) = self.begin(lease, spec, artifact_store).await {
            self.kill().await;
            self.end(lease, failure(FailureKind::Crashed, error.to_string()))
                .await;
            return true;
        }
        if model.is_some() {
            self.resident = model;
        }
        let outcome = self.watch(lease, commands).await;
        let ended = match outcome {
            Outcome::Ended(ended) => ended,
            Outcome::Failed(failure) => {
                // A task refused for what it asks says nothing against the child and the model it holds.
                if failure.kind != FailureKind::Invalid {
                    self.kill().await;
                }
                failed(&failure)
            }
            Outcome::Garbled(reason) => {
                self.kill().await;
                let message = format!("a reply of the device child is not understood: {reason}");
                failure(FailureKind::Error, message)
            }
            Outcome::Crashed => match self.process.take() {
                Some(process) => {
                    self.resident = None;
                    failed(&process.autopsy().await)
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
            Outcome::AgentGone => return false,
        };
        self.end(lease, ended).await;
        true
    }

    async fn begin(
        &mut self,
        lease: Lease,
        spec: Box<TaskSpec>,
        artifact_store: String,
    ) -> crate::Result<()> {
        if self.process.is_none() {
            self.process = Some(Process::start(&self.options, &self.device)?);
        }
        let request = Request::Run {
            attempt: lease.attempt,
            artifact_store,
            spec,
        };
        match self.process.as_mut() {
            Some(process) => process.send(&request).await,
            None => Ok(()),
        }
    }

    async fn watch(&mut self, lease: Lease, commands: &mut mpsc::Receiver<Command>) -> Outcome {
        let Some(process) = self.process.as_mut() else {
            return Outcome::Crashed;
        };
        let mut hang = Instant::now() + self.options.hang_timeout;
        let mut stop: Option<Instant> = None;
        loop {
            tokio::select! {
                said = process.next() => match said {
                    None if stop.is_some() => return Outcome::Killed,
                    None => return Outcome::Crashed,
                    Some(FromChild::Log(lines)) => {
                        // Lossy by design: a log never holds work up.
                        let _ = self.events.try_send(Event::Log { lease, lines });
                    }
                    Some(FromChild::Reply(reply)) => {
                        hang = Instant::now() + self.options.hang_timeout;
                        if let Some(outcome) = take_reply(lease, reply, &self.events) {
                            return outcome;
                        }
                    }
                    Some(FromChild::Garbled(_)) if stop.is_some() => return Outcome::Killed,
                    Some(FromChild::Garbled(reason)) => return Outcome::Garbled(reason),
                },
                command = commands.recv() => match command {
                    None => return Outcome::AgentGone,
                    Some(Command::Run { lease, spec, artifact_store }) => {
                        self.waiting.push_back((lease, spec, artifact_store));
                    }
                    Some(Command::Stop { attempt }) if attempt == lease.attempt => {
                        if process.send(&Request::Cancel { attempt }).await.is_err() {
                            return Outcome::Killed;
                        }
                        stop = Some(Instant::now() + self.options.stop_timeout);
                    }
                    Some(Command::Stop { attempt }) => {
                        let position = self.waiting.iter().position(|(lease, _, _)| lease.attempt == attempt);
                        if let Some((lease, _, _)) = position.and_then(|position| self.waiting.remove(position)) {
                            let _ = self.events.send(Event::Ended { lease, ended: Ended::Stopped }).await;
                        }
                    }
                },
                () = sleep_until(hang) => return Outcome::Hung,
                () = sleep_until(stop.unwrap_or(hang)), if stop.is_some() => return Outcome::Killed,
            }
        }
    }

    /// Tells the agent; this one waits for room, for an end must arrive.
    async fn end(&self, lease: Lease, ended: Ended) {
        let _ = self.events.send(Event::Ended { lease, ended }).await;
    }

    async fn kill(&mut self) {
        self.resident = None;
        if let Some(process) = self.process.take() {
            process.kill().await;
        }
    }
}

fn take_reply(lease: Lease, reply: Reply, events: &mpsc::Sender<Event>) -> Option<Outcome> {
    match reply {
        Reply::Progress { attempt, progress } if attempt == lease.attempt => {
            pass_progress(lease, &progress, events);
            None
        }
        Reply::Output { attempt, output } if attempt == lease.attempt => {
            Some(match serde_json::to_vec(&output) {
                Ok(json) => Outcome::Ended(Ended::Output(json)),
                Err(error) => Outcome::Failed(Failure {
                    kind: FailureKind::Error,
                    message: format!("the output cannot be written as JSON: {error}"),
                }),
            })
        }
        Reply::Failure { attempt, failure } if attempt == lease.attempt => Some(Outcome::Failed(failure)),
        Reply::Stopped { attempt } if attempt == lease.attempt => Some(Outcome::Ended(Ended::Stopped)),
        stale => {
            tracing::warn!(?stale, "a reply about another attempt is left out");
            None
        }
    }
}

fn pass_progress(lease: Lease, progress: &Progress, events: &mpsc::Sender<Event>) {
    if let Ok(progress_json) = serde_json::to_vec(progress) {
        // Lossy by design: the next one says more.
        let _ = events.try_send(Event::Progress { lease, progress_json });
    }
}
