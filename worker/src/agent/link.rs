//! One connection to the coordinator: the stream of messages, and heartbeats on a channel of their own so
//! that they never wait behind work.

use std::time::Duration;

use espalier_proto::MESSAGE_LIMIT_BYTES;
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::workers_client::WorkersClient;
use espalier_proto::v1::{
    CoordinatorMessage, HeartbeatRequest, Hello, Lease, Superseded, Welcome, WorkerMessage,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use crate::{Error, Result};

const OUTBOUND: usize = 256;
const LINK_EVENTS: usize = 64;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LAST_BACKOFF: Duration = Duration::from_secs(5);

/// What comes from a connection.
#[derive(Debug)]
pub enum LinkEvent {
    /// A message of the stream.
    Message(FromCoordinator),
    /// A heartbeat's answer says that an attempt is no longer ours.
    Superseded(Superseded),
    /// The connection is of no more use.
    Broken(String),
}

/// A connection that has been welcomed.
#[derive(Debug)]
pub struct Link {
    /// What the coordinator said first.
    pub welcome: Welcome,
    /// Messages to the coordinator.
    pub outbound: mpsc::Sender<WorkerMessage>,
    inbound: Streaming<CoordinatorMessage>,
    from_heartbeats: mpsc::Receiver<LinkEvent>,
    to_self: mpsc::Sender<LinkEvent>,
    heartbeats: JoinHandle<()>,
}

impl Link {
    /// The next event; [`LinkEvent::Broken`] when the stream has ended. Safe to drop and call again.
    pub async fn next(&mut self) -> Option<LinkEvent> {
        tokio::select! {
            event = self.from_heartbeats.recv() => event,
            message = self.inbound.message() => Some(match message {
                Ok(Some(CoordinatorMessage { message: Some(message) })) => LinkEvent::Message(message),
                Ok(Some(CoordinatorMessage { message: None })) => {
                    LinkEvent::Broken("a message of a kind that this version does not know".to_owned())
                }
                Ok(None) => LinkEvent::Broken("the coordinator closed the stream".to_owned()),
                Err(status) => LinkEvent::Broken(status.message().to_owned()),
            }),
        }
    }

    /// Declares the connection broken.
    pub fn give_up(&self, reason: &str) {
        // A full queue already holds a reason.
        let _ = self.to_self.try_send(LinkEvent::Broken(reason.to_owned()));
    }

    /// Ends the stream and its heartbeats.
    pub async fn close(self) {
        self.heartbeats.abort();
        let _ = self.heartbeats.await;
    }
}

/// Connects and introduces the worker, trying again with growing pauses while the coordinator cannot be reached.
///
/// # Errors
/// When the address is malformed or the coordinator refuses the worker for good.
pub async fn connect(address: String, hello: Hello, leases: watch::Receiver<Vec<Lease>>) -> Result<Link> {
    let endpoint = Endpoint::from_shared(address.clone())
        .map_err(|error| Error::Coordinator {
            address: address.clone(),
            reason: format!("not an address ({error}), expected a URL such as http://127.0.0.1:7420"),
        })?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true)
        .tcp_nodelay(true);
    let mut pause = FIRST_BACKOFF;
    let mut reported = false;
    loop {
        match timeout(2 * CONNECT_TIMEOUT, introduce(&endpoint, &hello, leases.clone())).await {
            Ok(Ok(link)) => return Ok(link),
            Ok(Err(status)) if is_final(status.code()) => {
                return Err(Error::Coordinator {
                    address,
                    reason: status.message().to_owned(),
                });
            }
            Ok(Err(status)) if !reported => {
                tracing::warn!(
                    address,
                    reason = status.message(),
                    "cannot reach the coordinator; trying again"
                );
            }
            Ok(Err(status)) => tracing::debug!(reason = status.message(), "cannot reach the coordinator"),
            Err(_) => tracing::warn!(address, "the coordinator does not answer; trying again"),
        }
        reported = true;
        sleep(pause).await;
        pause = (pause * 2).min(LAST_BACKOFF);
    }
}

/// Whether the same hello would be refused again.
fn is_final(code: Code) -> bool {
    matches!(
        code,
        Code::InvalidArgument | Code::FailedPrecondition | Code::Unauthenticated | Code::PermissionDenied
    )
}

async fn introduce(
    endpoint: &Endpoint,
    hello: &Hello,
    leases: watch::Receiver<Vec<Lease>>,
) -> std::result::Result<Link, Status> {
    let unreachable = |error: tonic::transport::Error| Status::unavailable(causes(&error));
    let mut client = client(endpoint.connect().await.map_err(unreachable)?);
    let (outbound, messages) = mpsc::channel(OUTBOUND);
    let first = WorkerMessage {
        message: Some(FromWorker::Hello(hello.clone())),
    };
    outbound
        .send(first)
        .await
        .map_err(|_| Status::internal("the stream ended before it began"))?;
    let mut inbound = client.connect(ReceiverStream::new(messages)).await?.into_inner();
    let Some(CoordinatorMessage {
        message: Some(FromCoordinator::Welcome(welcome)),
    }) = inbound.message().await?
    else {
        return Err(Status::unavailable(
            "the coordinator did not begin with a welcome",
        ));
    };
    let heart = self::client(endpoint.connect().await.map_err(unreachable)?);
    let (to_self, from_heartbeats) = mpsc::channel(LINK_EVENTS);
    let beat = Heart {
        client: heart,
        welcome: welcome.clone(),
        epoch: hello.epoch,
        leases,
        events: to_self.clone(),
    };
    let heartbeats = tokio::spawn(beat.run());
    Ok(Link {
        welcome,
        outbound,
        inbound,
        from_heartbeats,
        to_self,
        heartbeats,
    })
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

struct Heart {
    client: WorkersClient<Channel>,
    welcome: Welcome,
    epoch: u64,
    leases: watch::Receiver<Vec<Lease>>,
    events: mpsc::Sender<LinkEvent>,
}

impl Heart {
    async fn run(mut self) {
        let every = Duration::from_millis(u64::from(self.welcome.heartbeat_interval_ms.max(10)));
        let lost = Duration::from_millis(u64::from(self.welcome.worker_lost_ms)).max(2 * every);
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_answer = Instant::now();
        loop {
            ticks.tick().await;
            let request = HeartbeatRequest {
                term: self.welcome.term,
                worker_id: self.welcome.worker_id,
                epoch: self.epoch,
                attempts: self.leases.borrow().clone(),
            };
            let broken = match timeout(every.max(Duration::from_secs(1)), self.client.heartbeat(request))
                .await
            {
                Ok(Ok(answer)) => {
                    last_answer = Instant::now();
                    let answer = answer.into_inner();
                    for superseded in answer.superseded {
                        let _ = self.events.send(LinkEvent::Superseded(superseded)).await;
                    }
                    (answer.term != self.welcome.term).then(|| "the coordinator has started anew".to_owned())
                }
                Ok(Err(status)) if is_final(status.code()) || status.code() == Code::NotFound => {
                    Some(status.message().to_owned())
                }
                Ok(Err(_)) | Err(_) => {
                    (last_answer.elapsed() > lost).then(|| "heartbeats are not answered".to_owned())
                }
            };
            if let Some(reason) = broken {
                let _ = self.events.send(LinkEvent::Broken(reason)).await;
                return;
            }
        }
    }
}
