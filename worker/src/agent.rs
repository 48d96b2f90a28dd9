//! The agent: takes attempts from the coordinator, hands them to device children, and reports.
//!
//! - [`options`]: what a worker is told at start.
//! - [`link`]: one connection to the coordinator, and its heartbeats on a channel of their own.
//! - [`state`]: which attempts run and which results are not yet acknowledged; pure.
//! - [`core`]: the protocol, without I/O, clock or tasks.
//! - [`device`]: one task for each device, which owns its child process ([`process`]).
//!
//! [`run`] ties them together in one loop. No tensor code runs here: a crash, a hang or an out-of-memory
//! ends a child, never the agent.

pub mod core;
pub mod device;
pub mod link;
pub mod options;
pub mod process;
pub mod state;

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{Assign, Hello, Leaving, Superseded, WorkerMessage};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::Result;
use device::{Command, Event};
use link::{Link, LinkEvent};
pub use options::WorkerOptions;
use state::State;

/// Commands waiting for one device.
const COMMANDS: usize = 16;
/// Events of all devices waiting for the loop.
const EVENTS: usize = 1024;

type Connecting = Pin<Box<dyn Future<Output = Result<Link>> + Send>>;

/// Serves the coordinator until `shutdown` is cancelled and running attempts have ended (or the drain
/// timeout has passed), or until the coordinator says that this worker may not serve it.
///
/// # Errors
/// When the options are unusable or the coordinator refuses the worker for good.
pub async fn run(options: WorkerOptions, shutdown: CancellationToken) -> Result<()> {
    options.validate()?;
    let mut agent = Agent::start(options);
    let outcome = agent.serve(&shutdown).await;
    agent.stop().await;
    outcome
}

struct Agent {
    options: WorkerOptions,
    epoch: u64,
    state: State,
    leases: watch::Sender<Vec<espalier_proto::v1::Lease>>,
    devices: HashMap<String, (mpsc::Sender<Command>, JoinHandle<()>)>,
    events: mpsc::Receiver<Event>,
    link: Option<Link>,
    artifact_store: String,
    orphan_grace: Duration,
    draining: bool,
    alone_since: Instant,
}

/// Why the loop woke up.
enum Wake {
    Event(Option<Event>),
    Message(Option<LinkEvent>),
    Connected(Box<Result<Link>>),
    Shutdown,
    Deadline,
    Orphaned,
}

impl Agent {
    fn start(options: WorkerOptions) -> Self {
        let (event_sender, events) = mpsc::channel(EVENTS);
        let devices = options
            .devices
            .iter()
            .map(|device| {
                let (sender, commands) = mpsc::channel(COMMANDS);
                let runner = device::Runner::new(device.clone(), options.child.clone(), event_sender.clone());
                (device.id.clone(), (sender, tokio::spawn(runner.run(commands))))
            })
            .collect();
        let epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis();
        Self {
            options,
            epoch: u64::try_from(epoch).unwrap_or(u64::MAX),
            state: State::default(),
            leases: watch::channel(Vec::new()).0,
            devices,
            events,
            link: None,
            artifact_store: String::new(),
            orphan_grace: Duration::from_secs(30 * 60),
            draining: false,
            alone_since: Instant::now(),
        }
    }

    async fn serve(&mut self, shutdown: &CancellationToken) -> Result<()> {
        let mut connecting: Option<Connecting> = Some(self.connect());
        let mut deadline: Option<Instant> = None;
        loop {
            if self.draining && (self.state.is_idle() || (self.link.is_none() && !self.state.is_running())) {
                return Ok(());
            }
            let orphaned = self.alone_since + self.orphan_grace;
            let watch_orphans = self.link.is_none() && self.state.is_running();
            let wake = tokio::select! {
                event = self.events.recv() => Wake::Event(event),
                message = next_message(self.link.as_mut()), if self.link.is_some() => Wake::Message(message),
                connected = poll_connecting(&mut connecting), if connecting.is_some() => {
                    Wake::Connected(Box::new(connected))
                }
                () = shutdown.cancelled(), if deadline.is_none() => Wake::Shutdown,
                () = sleep_until(deadline.unwrap_or(orphaned)), if deadline.is_some() => Wake::Deadline,
                () = sleep_until(orphaned), if watch_orphans => Wake::Orphaned,
            };
            match wake {
                Wake::Event(Some(event)) => self.take_event(event).await,
                Wake::Event(None) => return Ok(()),
                Wake::Message(Some(LinkEvent::Message(message))) => self.take_message(message).await,
                Wake::Message(Some(LinkEvent::Superseded(superseded))) => {
                    self.drop_attempt(&superseded).await
                }
                Wake::Message(Some(LinkEvent::Broken(reason))) => {
                    tracing::warn!(
                        reason,
                        "the connection to the coordinator is lost; connecting again"
                    );
                    self.disconnect().await;
                    connecting = Some(self.connect());
                }
                Wake::Message(None) => {
                    self.disconnect().await;
                    connecting = Some(self.connect());
                }
                Wake::Connected(link) => {
                    connecting = None;
                    self.take_link((*link)?).await;
                }
                Wake::Shutdown => {
                    deadline = Some(Instant::now() + self.options.drain_timeout);
                    self.drain().await;
                }
                Wake::Deadline => {
                    tracing::warn!("attempts still run at the end of the drain timeout and are killed");
                    return Ok(());
                }
                Wake::Orphaned => {
                    tracing::warn!("out of touch for longer than the orphan grace: attempts are stopped");
                    self.stop_everything().await;
                }
            }
        }
    }

    fn connect(&mut self) -> Connecting {
        self.alone_since = Instant::now();
        let hello = Hello {
            protocol_version: espalier_proto::PROTOCOL_VERSION,
            worker: self.options.name.clone(),
            epoch: self.epoch,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: self.options.host.clone(),
            devices: self
                .options
                .devices
                .iter()
                .map(options::DeviceOptions::announce)
                .collect(),
            // While out of touch attempts only move from running to unacknowledged, so the list holds
            // however many tries the connection takes.
            attempts: self.state.leases(),
            oldest_protocol_version: espalier_proto::OLDEST_PROTOCOL_VERSION,
            highest_term: 0,
        };
        Box::pin(link::connect(
            self.options.coordinator.clone(),
            hello,
            self.leases.subscribe(),
        ))
    }

    async fn take_link(&mut self, link: Link) {
        tracing::info!(term = link.welcome.term, worker = %self.options.name, "connected to the coordinator");
        self.artifact_store.clone_from(&link.welcome.artifact_store);
        self.orphan_grace = Duration::from_millis(u64::from(link.welcome.orphan_grace_ms));
        let superseded = link.welcome.superseded.clone();
        self.link = Some(link);
        for stale in superseded {
            self.drop_attempt(&stale).await;
        }
        if self.draining {
            self.say_leaving();
        }
        for message in self.state.unacknowledged() {
            self.send(message);
        }
    }

    async fn disconnect(&mut self) {
        if let Some(link) = self.link.take() {
            link.close().await;
        }
    }

    /// Puts a message on the stream. When the stream is gone or full the message is not lost if it matters:
    /// whatever must arrive stays in the state and goes out again on the next stream.
    fn send(&mut self, message: FromWorker) {
        let Some(link) = &self.link else { return };
        let must_arrive = !matches!(message, FromWorker::Progress(_) | FromWorker::Log(_));
        let sent = link.outbound.try_send(WorkerMessage {
            message: Some(message),
        });
        if sent.is_err() && must_arrive {
            link.give_up("the stream takes no more messages");
        }
    }

    async fn take_event(&mut self, event: Event) {
        if let Some(message) = self.state.take_event(event) {
            self.publish_leases();
            self.send(message);
        }
    }

    async fn take_message(&mut self, message: FromCoordinator) {
        match message {
            FromCoordinator::Assign(assign) => self.assign(assign).await,
            FromCoordinator::Acknowledged(acknowledged) => {
                if let Some(lease) = acknowledged.lease {
                    self.state.acknowledge(lease.attempt);
                    self.publish_leases();
                }
            }
            FromCoordinator::Cancel(cancel) => {
                let Some(lease) = cancel.lease else { return };
                match self.state.device_of(lease.attempt) {
                    Some(device) => {
                        self.command(
                            &device,
                            Command::Stop {
                                attempt: lease.attempt,
                            },
                        )
                        .await
                    }
                    // It ended before the cancel came, and its end is on its way; or it never was here.
                    None => {
                        if let Some(message) = self.state.stopped_unless_known(lease) {
                            self.send(message);
                        }
                    }
                }
            }
            FromCoordinator::Superseded(superseded) => self.drop_attempt(&superseded).await,
            FromCoordinator::Drain(_) => self.draining = true,
            FromCoordinator::Welcome(_) | FromCoordinator::Release(_) | FromCoordinator::Restart(_) => {}
        }
    }

    async fn assign(&mut self, assign: Assign) {
        let Some(lease) = assign.lease else { return };
        if let Some(message) = self.state.result_of(lease.attempt) {
            return self.send(message);
        }
        if self.state.device_of(lease.attempt).is_some() {
            return;
        }
        self.state.begin(lease, &assign.device_id);
        self.publish_leases();
        let spec = match serde_json::from_slice(&assign.spec_json) {
            Ok(spec) => spec,
            Err(error) => {
                let reason = format!("the task cannot be decoded: {error}");
                return self.take_event(Event::invalid(lease, reason)).await;
            }
        };
        if !self.devices.contains_key(&assign.device_id) {
            let reason = format!("this worker has no device {:?}", assign.device_id);
            return self.take_event(Event::invalid(lease, reason)).await;
        }
        let artifact_store = self.artifact_store.clone();
        self.command(
            &assign.device_id,
            Command::Run {
                lease,
                spec: Box::new(spec),
                artifact_store,
            },
        )
        .await;
    }

    /// Stops an attempt that is no longer this worker's, and forgets whatever it found.
    async fn drop_attempt(&mut self, superseded: &Superseded) {
        let Some(lease) = &superseded.lease else { return };
        let device = self.state.forget(lease.attempt);
        self.publish_leases();
        if let Some(device) = device {
            tracing::info!(
                attempt = lease.attempt,
                reason = superseded.reason,
                "an attempt is no longer ours"
            );
            self.command(
                &device,
                Command::Stop {
                    attempt: lease.attempt,
                },
            )
            .await;
        }
    }

    async fn command(&mut self, device: &str, command: Command) {
        if let Some((sender, _)) = self.devices.get(device)
            && sender.send(command).await.is_err()
        {
            tracing::error!(device, "the device's task has ended");
        }
    }

    async fn drain(&mut self) {
        self.draining = true;
        self.say_leaving();
    }

    fn say_leaving(&mut self) {
        let Some(link) = &self.link else { return };
        let leaving = Leaving {
            term: link.welcome.term,
            epoch: self.epoch,
        };
        self.send(FromWorker::Leaving(leaving));
    }

    async fn stop_everything(&mut self) {
        for (attempt, device) in self.state.running() {
            self.command(&device, Command::Stop { attempt }).await;
        }
    }

    fn publish_leases(&self) {
        self.leases.send_replace(self.state.leases());
    }

    /// Ends every device task, and with it every child; waits for all of them.
    async fn stop(&mut self) {
        self.disconnect().await;
        self.events.close();
        for (_, (commands, task)) in self.devices.drain() {
            drop(commands);
            if task.await.is_err() {
                tracing::error!("a device's task ended abnormally");
            }
        }
    }
}

async fn next_message(link: Option<&mut Link>) -> Option<LinkEvent> {
    match link {
        Some(link) => link.next().await,
        None => std::future::pending().await,
    }
}

async fn poll_connecting(connecting: &mut Option<Connecting>) -> Result<Link> {
    match connecting {
        Some(connecting) => connecting.await,
        None => std::future::pending().await,
    }
}
