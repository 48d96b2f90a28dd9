//! One connection to the coordinator: the stream of messages, and heartbeats on a channel of their own so
//! that they never wait behind work. When to connect, what to say and what silence means is the core's affair.

use std::time::Duration;

use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::workers_client::WorkersClient;
use espalier_proto::v1::{CoordinatorMessage, HeartbeatRequest, Hello, Lease, WorkerMessage};
use espalier_proto::{KNOWN_EPOCH_METADATA, MESSAGE_LIMIT_BYTES, STALE_EPOCH_METADATA, coordinator_url};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::core::{Input, Refusal};
use crate::{Error, Result};

/// Messages waiting to go out.
const OUTBOUND: usize = 512;
/// Room that progress and logs leave to what must arrive.
const RESERVED: usize = 128;
/// How long what must arrive may wait for room.
const ROOM_PATIENCE: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A heartbeat that takes longer is lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the last messages of a worker that leaves may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// Makes connections to one coordinator.
#[derive(Debug)]
pub struct Connector {
    endpoint: Endpoint,
    inputs: mpsc::Sender<Input>,
}

/// A connection that is made, or being made.
#[derive(Debug)]
pub struct Link {
    /// Its number.
    pub connection: u64,
    outbound: mpsc::Sender<WorkerMessage>,
    heartbeats: mpsc::Sender<HeartbeatRequest>,
    /// What must arrive found no room: nothing more is put on the stream.
    stuck: bool,
    reader: JoinHandle<()>,
    heart: JoinHandle<()>,
}

impl Connector {
    /// For the coordinator at this URL; whatever comes of connections goes to `inputs`.
    ///
    /// # Errors
    /// When the address is malformed.
    pub fn new(address: &str, inputs: mpsc::Sender<Input>) -> Result<Self> {
        let endpoint = Endpoint::from_shared(coordinator_url(address))
            .map_err(|error| Error::Invalid {
                reason: format!(
                    "coordinator is {address:?}, expected an address such as http://127.0.0.1:7474 ({error})"
                ),
            })?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
            .keep_alive_while_idle(true)
            .tcp_nodelay(true);
        Ok(Self { endpoint, inputs })
    }

    /// Begins a connection.
    pub fn open(&self, connection: u64, hello: Hello) -> Link {
        let (outbound, messages) = mpsc::channel(OUTBOUND);
        let reader = Reader {
            connection,
            endpoint: self.endpoint.clone(),
            inputs: self.inputs.clone(),
        };
        let first = outbound.clone();
        let reader = tokio::spawn(async move {
            // There is room: it is the first.
            let hello = Some(FromWorker::Hello(hello));
            let _ = first.send(WorkerMessage { message: hello }).await;
            drop(first);
            reader.run(messages).await;
        });
        let (heartbeats, requests) = mpsc::channel(1);
        let heart = Heart {
            connection,
            client: client(self.endpoint.connect_lazy()),
            inputs: self.inputs.clone(),
        };
        Link {
            connection,
            outbound,
            heartbeats,
            stuck: false,
            reader,
            heart: tokio::spawn(heart.run(requests)),
        }
    }
}

/// What became of a message.
#[derive(Debug, PartialEq)]
pub enum Sent {
    /// It is on the stream, or it was progress: the next will say more.
    Done,
    /// Lines of a log found no room.
    HeldBack {
        /// The attempt that wrote them.
        lease: Lease,
        /// The number of the first.
        first_line: u64,
    },
    /// The stream takes no more of what must arrive: it is of no more use.
    Stuck,
}

impl Link {
    /// Puts a message on the stream. What must arrive waits a moment for room: a worker that was away may have much
    /// to say at once.
    pub async fn send(&mut self, message: FromWorker) -> Sent {
        let refused = match &message {
            FromWorker::Progress(_) => Sent::Done,
            FromWorker::Log(log) => Sent::HeldBack {
                lease: log.lease.unwrap_or_default(),
                first_line: log.first_line,
            },
            _ => Sent::Stuck,
        };
        let message = Some(message);
        let taken = if self.stuck {
            false
        } else if refused == Sent::Stuck {
            let sent = timeout(ROOM_PATIENCE, self.outbound.send(WorkerMessage { message })).await;
            self.stuck = !matches!(sent, Ok(Ok(())));
            !self.stuck
        } else {
            self.outbound.capacity() >= RESERVED && self.outbound.try_send(WorkerMessage { message }).is_ok()
        };
        if taken { Sent::Done } else { refused }
    }

    /// Sends a heartbeat, unless one is still on its way.
    pub fn heartbeat(&self, request: HeartbeatRequest) {
        // The core counts one that is never answered as lost.
        let _ = self.heartbeats.try_send(request);
    }

    /// Lets what waits go out, ends the stream in good order, and waits a moment for the coordinator to do so too.
    pub async fn finish(self) {
        self.heart.abort();
        drop(self.outbound);
        let mut reader = self.reader;
        if timeout(FAREWELL, &mut reader).await.is_err() {
            reader.abort();
            let _ = reader.await;
        }
        let _ = self.heart.await;
    }

    /// Ends the stream and its heartbeats.
    pub async fn close(self) {
        self.reader.abort();
        self.heart.abort();
        let _ = self.reader.await;
        let _ = self.heart.await;
    }
}

/// Whether the same hello would be refused again.
fn is_final(code: Code) -> bool {
    matches!(
        code,
        Code::InvalidArgument | Code::FailedPrecondition | Code::Unauthenticated | Code::PermissionDenied
    )
}

/// Why the coordinator refuses a hello for good.
pub fn refusal(status: &Status) -> Refusal {
    let of = |name: &str| -> Option<u64> { status.metadata().get(name)?.to_str().ok()?.parse().ok() };
    match of(STALE_EPOCH_METADATA) {
        Some(_) => Refusal::Epoch {
            known: of(KNOWN_EPOCH_METADATA),
        },
        None => Refusal::Other,
    }
}

fn client(channel: Channel) -> WorkersClient<Channel> {
    WorkersClient::new(channel)
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES)
}

/// An error and its causes in one line.
fn causes(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line.push_str(": ");
        line.push_str(&cause.to_string());
        source = cause.source();
    }
    line
}

struct Reader {
    connection: u64,
    endpoint: Endpoint,
    inputs: mpsc::Sender<Input>,
}

impl Reader {
    async fn run(self, messages: mpsc::Receiver<WorkerMessage>) {
        let connection = self.connection;
        let last = match timeout(2 * CONNECT_TIMEOUT, self.introduce(messages)).await {
            Ok(Ok(inbound)) => self.read(inbound).await,
            Ok(Err(status)) if is_final(status.code()) => Input::Refused {
                connection,
                refusal: refusal(&status),
                reason: status.message().to_owned(),
            },
            Ok(Err(status)) => self.lost(status.message()),
            Err(_) => self.lost("the coordinator does not answer"),
        };
        // Who listened may have gone.
        let _ = self.inputs.send(last).await;
    }

    fn lost(&self, reason: &str) -> Input {
        Input::ConnectionLost {
            connection: self.connection,
            reason: reason.to_owned(),
        }
    }

    async fn introduce(
        &self,
        messages: mpsc::Receiver<WorkerMessage>,
    ) -> std::result::Result<Streaming<CoordinatorMessage>, Status> {
        let channel = self.endpoint.connect().await;
        let channel = channel.map_err(|error| Status::unavailable(causes(&error)))?;
        let response = client(channel).connect(ReceiverStream::new(messages)).await?;
        let mut inbound = response.into_inner();
        let Some(CoordinatorMessage {
            message: Some(FromCoordinator::Welcome(welcome)),
        }) = inbound.message().await?
        else {
            return Err(Status::unavailable(
                "the coordinator did not begin with a welcome",
            ));
        };
        let connected = Input::Connected {
            connection: self.connection,
            welcome: Box::new(welcome),
        };
        let _ = self.inputs.send(connected).await;
        Ok(inbound)
    }

    /// Reads the stream to its end.
    async fn read(&self, mut inbound: Streaming<CoordinatorMessage>) -> Input {
        loop {
            let message = match inbound.message().await {
                Ok(Some(CoordinatorMessage {
                    message: Some(message),
                })) => message,
                // A kind of message that a newer coordinator knows.
                Ok(Some(CoordinatorMessage { message: None })) => continue,
                Ok(None) => return self.lost("the coordinator closed the stream"),
                Err(status) => return self.lost(status.message()),
            };
            let message = Input::Message {
                connection: self.connection,
                message,
            };
            if self.inputs.send(message).await.is_err() {
                return self.lost("nobody listens");
            }
        }
    }
}

struct Heart {
    connection: u64,
    client: WorkersClient<Channel>,
    inputs: mpsc::Sender<Input>,
}

impl Heart {
    async fn run(mut self, mut requests: mpsc::Receiver<HeartbeatRequest>) {
        let connection = self.connection;
        let failed = |unknown: bool, reason: &str| Input::HeartbeatFailed {
            connection,
            unknown,
            reason: reason.to_owned(),
        };
        while let Some(request) = requests.recv().await {
            let input = match timeout(HEARTBEAT_TIMEOUT, self.client.heartbeat(request)).await {
                Ok(Ok(answer)) => Input::HeartbeatAnswer {
                    connection,
                    answer: answer.into_inner(),
                },
                Ok(Err(status)) => {
                    let unknown = is_final(status.code()) || status.code() == Code::NotFound;
                    failed(unknown, status.message())
                }
                Err(_) => failed(false, "no answer"),
            };
            if self.inputs.send(input).await.is_err() {
                return;
            }
        }
    }
}
