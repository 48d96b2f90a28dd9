//! What goes into the agent's core and what comes out of it.

use std::time::Duration;

use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{Assign, Device, HeartbeatRequest, HeartbeatResponse, Hello, Lease, Welcome};

/// What a core is told at its start.
#[derive(Debug, Clone, PartialEq)]
pub struct CoreOptions {
    /// Names the worker.
    pub name: String,
    /// Names its host; empty means the worker's own name.
    pub host: String,
    /// Grows with each start of the process. Before the first welcome it may be raised above what the coordinator
    /// knows.
    pub epoch: u64,
    /// What it runs attempts on; ids are unique.
    pub devices: Vec<Device>,
    /// How long attempts may take to hand themselves back when the worker leaves; then they are killed.
    pub drain_timeout: Duration,
    /// Decides the jitter of the pauses between connections, and nothing else.
    pub seed: u64,
}

/// Something that happened. Whatever names a connection other than the newest is ignored, so that nothing
/// that was on its way when a connection ended can be taken for news of the next.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Time has passed; also the very first input, which asks for a connection.
    Tick,
    /// The coordinator's answer to the hello.
    Connected {
        /// Which connection.
        connection: u64,
        /// What it said.
        welcome: Box<Welcome>,
    },
    /// The coordinator refuses the hello, and would refuse the same again.
    Refused {
        /// Which connection.
        connection: u64,
        /// Why.
        refusal: Refusal,
        /// What it said.
        reason: String,
    },
    /// The newest connection has no room for lines of a log: they are to be said again later.
    LogHeldBack {
        /// The attempt that wrote them.
        lease: Lease,
        /// The number of the first.
        first_line: u64,
    },
    /// A message of the stream, after the welcome.
    Message {
        /// Which connection.
        connection: u64,
        /// The message.
        message: FromCoordinator,
    },
    /// A connection could not be made, or has ended.
    ConnectionLost {
        /// Which connection.
        connection: u64,
        /// For the log.
        reason: String,
    },
    /// A heartbeat was answered.
    HeartbeatAnswer {
        /// Which connection.
        connection: u64,
        /// The answer.
        answer: HeartbeatResponse,
    },
    /// A heartbeat was not, or with an error.
    HeartbeatFailed {
        /// Which connection.
        connection: u64,
        /// The coordinator lives and does not know this worker's stream: only another hello helps.
        unknown: bool,
        /// For the log.
        reason: String,
    },
    /// News of a device.
    Device(DeviceEvent),
    /// The process was asked to end. The second time it ends at once.
    ShutdownAsked,
}

/// Why a hello is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The coordinator knows the worker by a higher epoch: another process was started under its name since, or a
    /// clock was set back.
    Epoch {
        /// That epoch, when no process of it is connected.
        known: Option<u64>,
    },
    /// Anything else: a coordinator that was succeeded, or builds too far apart.
    Other,
}

/// News of a device. Each [`Output::Run`] leads to exactly one [`DeviceEvent::Ended`].
#[derive(Debug, Clone, PartialEq)]
pub enum DeviceEvent {
    /// How far an attempt has come; lossy.
    Progress {
        /// Which attempt.
        lease: Lease,
        /// JSON of a `Progress`.
        progress_json: Vec<u8>,
    },
    /// Lines of an attempt's log; lossy.
    Log {
        /// Which attempt.
        lease: Lease,
        /// The number of the first of them among all that the attempt wrote, from 1. Without lines: so many were
        /// written before, whether they came or not.
        first_line: u64,
        /// The lines.
        lines: Vec<String>,
    },
    /// A rank of a gang stands ready.
    Prepared {
        /// Which attempt.
        lease: Lease,
        /// Where the other ranks reach it: `host:port`.
        address: String,
    },
    /// An attempt ended and its device is free.
    Ended {
        /// Which attempt.
        lease: Lease,
        /// How.
        ended: Ended,
    },
    /// What looks after a device has ended and begun anew: whatever ran there is over.
    Gone {
        /// The device.
        device: String,
    },
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// JSON of a `TaskOutput`.
    Output(Vec<u8>),
    /// JSON of a `Failure`.
    Failure(Vec<u8>),
    /// It was stopped.
    Stopped,
}

/// Something to do, in the order given.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Make a connection and say hello on it; whatever comes of it is told under this number.
    Connect {
        /// Counts connections, from 1.
        connection: u64,
        /// The first message.
        hello: Box<Hello>,
    },
    /// Close a connection; nothing more is wanted of it.
    Disconnect {
        /// Which.
        connection: u64,
    },
    /// Put a message on the newest connection. Progress and logs may be dropped when there is no room; when
    /// there is none for anything else, the connection is lost and must be told so.
    Send(FromWorker),
    /// Send a heartbeat, apart from the stream.
    Heartbeat {
        /// The connection it belongs to.
        connection: u64,
        /// The heartbeat.
        request: HeartbeatRequest,
    },
    /// Run an attempt on its device, which is free.
    Run(Box<Run>),
    /// Stop an attempt that a device runs.
    Stop {
        /// The device.
        device: String,
        /// Which attempt.
        lease: Lease,
        /// Whether it should first leave what the next attempt can go on from, however long that takes.
        checkpoint: bool,
    },
    /// Every rank of an attempt's gang stands ready: begin.
    Release {
        /// The device.
        device: String,
        /// Which attempt.
        lease: Lease,
        /// Names the communicator.
        communicator: String,
        /// Addresses of all ranks, in their order.
        addresses: Vec<String>,
    },
    /// Replace the child of a device, which is free.
    ReplaceChild {
        /// The device.
        device: String,
    },
    /// End: kill what still runs, close the connection. Nothing comes after it.
    Finish(Finish),
}

/// An attempt to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The right to.
    pub lease: Lease,
    /// As the coordinator sent it, with device, task, trace and place in a gang.
    pub assign: Assign,
    /// URL of the artifact store.
    pub artifact_store: String,
    /// Its id; empty when the coordinator does not say.
    pub artifact_store_id: String,
}

/// Why a worker ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// It was asked to, and everything is handed back.
    Left,
    /// It was asked to, and attempts that still ran at the end of the drain timeout are killed, or the coordinator
    /// was out of touch for too long to take the last results.
    Killed,
    /// The coordinator refuses it for good.
    Refused(String),
}
