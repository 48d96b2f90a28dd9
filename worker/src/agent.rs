//! The agent: takes attempts from the coordinator, hands them to device children, and reports.
//!
//! - [`options`]: what a worker is told at start.
//! - [`core`]: the protocol, without I/O, clock or tasks.
//! - [`link`]: one connection to the coordinator, and its heartbeats on a channel of their own.
//! - `devices`: one task for each [`device`], which owns its child process ([`process`]) and sees that its
//!   memory is free before it is used again ([`memory`]) and that nothing is left there of an agent before
//!   ([`leftover`]).
//!
//! [`run`] is the rim around the core: it tells what happened and does what the core asks. No tensor code
//! runs here: a crash, a hang or an out-of-memory ends a child, never the agent.

pub mod core;
pub mod device;
mod devices;
pub mod leftover;
pub mod link;
pub mod memory;
pub mod options;
pub mod process;

use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

use espalier_proto::v1::worker_message::Message as FromWorker;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use self::core::{Core, CoreOptions, Finish, Input, Output};
use crate::{Error, Result};
use device::Command;
use devices::Devices;
use link::{Connector, Link, Sent};
pub use options::WorkerOptions;

/// What comes from connections, waiting for the loop.
const INPUTS: usize = 256;

/// How a worker is asked to end.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Asks it to have its attempts checkpointed, to hand them back and to leave.
    pub leave: CancellationToken,
    /// Asks it to end at once, whatever runs.
    pub kill: CancellationToken,
}

/// Serves the coordinator until `shutdown` asks it to end and running attempts are handed back (or the drain
/// timeout has passed), until the coordinator asks it to leave, or until the coordinator says that this
/// worker may not serve it.
///
/// # Errors
/// When the options are unusable or the coordinator refuses the worker for good.
pub async fn run(options: WorkerOptions, shutdown: Shutdown) -> Result<()> {
    options.validate()?;
    let mut agent = Agent::start(&options)?;
    let finish = agent.serve(&shutdown).await;
    if finish == Finish::Left
        && let Some(link) = agent.link.take()
    {
        link.finish().await;
    }
    agent.stop().await;
    match finish {
        Finish::Left | Finish::Killed => Ok(()),
        Finish::Refused(reason) => Err(Error::Coordinator {
            address: options.coordinator,
            reason,
        }),
    }
}

struct Agent {
    core: Core,
    start: Instant,
    connector: Connector,
    link: Option<Link>,
    inputs: mpsc::Receiver<Input>,
    devices: Devices,
}

impl Agent {
    fn start(options: &WorkerOptions) -> Result<Self> {
        let epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis();
        let epoch = u64::try_from(epoch).unwrap_or(u64::MAX);
        let core = Core::new(CoreOptions {
            name: options.name.clone(),
            host: options.host.clone(),
            epoch,
            devices: options
                .devices
                .iter()
                .map(options::DeviceOptions::announce)
                .collect(),
            drain_timeout: options.drain_timeout,
            seed: epoch ^ u64::from(std::process::id()).rotate_left(32),
        });
        let (to_inputs, inputs) = mpsc::channel(INPUTS);
        let connector = Connector::new(&options.coordinator, to_inputs)?;
        Ok(Self {
            core,
            start: Instant::now(),
            connector,
            link: None,
            inputs,
            devices: Devices::start(options),
        })
    }

    async fn serve(&mut self, shutdown: &Shutdown) -> Finish {
        let mut outputs = Vec::new();
        let mut asked = false;
        let mut inputs = VecDeque::from([Input::Tick]);
        loop {
            while let Some(input) = inputs.pop_front() {
                self.core.handle(input, self.start.elapsed(), &mut outputs);
                for output in outputs.drain(..) {
                    if let Output::Finish(how) = output {
                        return how;
                    }
                    inputs.extend(self.act(output).await);
                }
            }
            let wake = self.core.wake_at().map(|at| self.start + at);
            let input = tokio::select! {
                () = shutdown.kill.cancelled() => return Finish::Killed,
                () = shutdown.leave.cancelled(), if !asked => {
                    asked = true;
                    Input::ShutdownAsked
                }
                event = self.devices.next() => Input::Device(event),
                // The connector keeps a sender: there is always somebody who may say something.
                Some(input) = self.inputs.recv() => input,
                () = sleep_until(wake.unwrap_or(self.start)), if wake.is_some() => Input::Tick,
            };
            inputs.push_back(input);
        }
    }

    /// Does what the core asks for; what came of it, when that is known at once.
    async fn act(&mut self, output: Output) -> Option<Input> {
        match output {
            Output::Connect { connection, hello } => {
                self.close().await;
                self.link = Some(self.connector.open(connection, *hello));
            }
            Output::Disconnect { .. } => self.close().await,
            Output::Send(message) => return self.send(message).await,
            Output::Heartbeat { request, .. } => {
                if let Some(link) = &self.link {
                    link.heartbeat(request);
                }
            }
            Output::Run(run) => {
                let device = run.assign.device_id.clone();
                self.devices.command(&device, Command::Run(run));
            }
            Output::Stop {
                device,
                lease,
                checkpoint,
            } => self.devices.command(&device, Command::Stop { lease, checkpoint }),
            Output::Release {
                device,
                lease,
                communicator,
                addresses,
            } => {
                let release = Command::Release {
                    lease,
                    communicator,
                    addresses,
                };
                self.devices.command(&device, release);
            }
            Output::ReplaceChild { device } => self.devices.command(&device, Command::Replace),
            Output::Finish(_) => {}
        }
        None
    }

    /// Puts a message on the stream. When there is no room the message is not lost if it matters: the
    /// connection is, and on the next one it is said again.
    async fn send(&mut self, message: FromWorker) -> Option<Input> {
        let link = self.link.as_mut()?;
        match link.send(message).await {
            Sent::Done => None,
            Sent::HeldBack { lease, first_line } => Some(Input::LogHeldBack { lease, first_line }),
            Sent::Stuck => Some(Input::ConnectionLost {
                connection: link.connection,
                reason: "the stream takes no more messages".to_owned(),
            }),
        }
    }

    async fn close(&mut self) {
        if let Some(link) = self.link.take() {
            link.close().await;
        }
    }

    /// Ends every device task, and with it every child.
    async fn stop(&mut self) {
        self.close().await;
        self.devices.stop().await;
    }
}
