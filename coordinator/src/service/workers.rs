//! The `Workers` service: reads what workers send, distrusting all of it, and hands it to the loop.

use std::time::Duration;

use bytes::Bytes;
use espalier_proto::task::{Failure, FailureKind, Progress, TaskOutput};
use espalier_proto::v1::{self, worker_message::Message, workers_server::Workers};
use espalier_proto::{OLDEST_PROTOCOL_VERSION, PAYLOAD_LIMIT_BYTES, PROTOCOL_VERSION};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::inbox::Inbox;
use super::jobs::line;
use super::owner::{self, Greeting, Report, WorkerHandle};
use crate::scheduler::{
    AttemptId, DeviceInfo, EngineInfo, Epoch, Introduction, Lease, Payload, Term, WorkerId,
};

const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// Messages that may wait for a worker.
const OUTBOX: usize = 1024;
const NAME_CHARACTERS: usize = 64;
const DEVICES: usize = 64;
const ADDRESS_BYTES: usize = 256;
const LOG_LINES: usize = 100;
const LOG_LINE_BYTES: usize = 4 << 10;
/// What is kept of a failure's message.
const MESSAGE_BYTES: usize = 4 << 10;
/// What is kept of a note on progress.
const NOTE_BYTES: usize = 512;
const NAME_BYTES: usize = 64;
/// Engines of a device that are kept.
const ENGINES: usize = 8;
const HOST_BYTES: usize = 255;
/// Attempts that a worker may say it holds: more than it has devices, as it keeps results until they are taken.
const LEASES: usize = 4096;

/// The service.
#[derive(Debug)]
pub struct Service {
    pub(super) inbox: Inbox,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

#[tonic::async_trait]
impl Workers for Service {
    type ConnectStream = ReceiverStream<Result<v1::CoordinatorMessage, Status>>;

    async fn connect(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let mut messages = request.into_inner();
        let first = timeout(HELLO_DEADLINE, messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no hello came"))??;
        let Some(v1::WorkerMessage {
            message: Some(Message::Hello(hello)),
        }) = first
        else {
            return Err(Status::invalid_argument("the first message must be a hello"));
        };
        let (outbox, stream) = mpsc::channel(OUTBOX);
        let stop = self.stop.child_token();
        let greeting = greeting(hello, outbox, stop.clone())?;
        let from = self
            .inbox
            .ask(|reply| owner::Request::Greet {
                greeting: Box::new(greeting),
                reply,
            })
            .await?;
        self.tasks.spawn(read(messages, from, self.inbox.clone(), stop));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn heartbeat(
        &self,
        request: Request<v1::HeartbeatRequest>,
    ) -> Result<Response<v1::HeartbeatResponse>, Status> {
        let v1::HeartbeatRequest {
            term,
            worker_id,
            epoch,
            attempts,
        } = request.into_inner();
        let response = self
            .inbox
            .ask(|reply| owner::Request::Heartbeat {
                term: Term(term),
                worker: WorkerId(worker_id),
                epoch: Epoch(epoch),
                attempts: attempts.iter().take(LEASES).map(lease).collect(),
                reply,
            })
            .await?;
        Ok(Response::new(response))
    }
}

/// Reads a worker's stream to its end.
async fn read(
    mut messages: Streaming<v1::WorkerMessage>,
    from: WorkerHandle,
    inbox: Inbox,
    stop: CancellationToken,
) {
    loop {
        let message = tokio::select! {
            () = stop.cancelled() => break,
            message = messages.message() => message,
        };
        let message = match message {
            Ok(Some(v1::WorkerMessage {
                message: Some(message),
            })) => message,
            // A kind of message that a newer worker knows.
            Ok(Some(v1::WorkerMessage { message: None })) => continue,
            Ok(None) => break,
            Err(status) => {
                tracing::info!(worker = %from.worker, reason = status.message(), "a worker's stream broke");
                break;
            }
        };
        let Some(request) = translate(from, message) else {
            tracing::warn!(worker = %from.worker, "a malformed message was dropped");
            continue;
        };
        if !inbox.tell(request).await {
            return;
        }
    }
    inbox.tell(owner::Request::Closed { from }).await;
}

/// A hello as the loop takes it.
///
/// # Errors
/// INVALID_ARGUMENT or FAILED_PRECONDITION: the same hello would be refused again.
pub fn greeting(
    hello: v1::Hello,
    outbox: owner::Outbox,
    stop: CancellationToken,
) -> Result<Greeting, Status> {
    let version = spoken(&hello)?;
    let attempts = hello.attempts.iter().take(LEASES).map(lease).collect();
    let (build, highest_term) = (line(hello.version.clone(), ""), Term(hello.highest_term));
    Ok(Greeting {
        introduction: introduction(hello)?,
        build,
        version,
        highest_term,
        attempts,
        outbox,
        stop,
    })
}

/// A message of a worker as the loop takes it; none for what it has no use for.
pub fn translate(from: WorkerHandle, message: Message) -> Option<owner::Request> {
    let (lease, report) = match message {
        Message::Hello(_) => return None,
        Message::Leaving(_) => return Some(owner::Request::Leave { from }),
        Message::Progress(v1::Progress { lease, progress_json }) => {
            let mut progress = serde_json::from_slice::<Progress>(&progress_json).ok()?;
            cut(&mut progress.unit, NAME_BYTES);
            cut(&mut progress.note, NOTE_BYTES);
            (lease, Report::Progress(progress))
        }
        Message::Log(v1::Log {
            lease,
            lines,
            first_line,
        }) => {
            let lines = bounded(lines);
            (lease, Report::Log { first_line, lines })
        }
        Message::Completed(v1::Completed { lease, output_json }) => (lease, completed(&output_json)),
        Message::Failed(v1::Failed { lease, failure_json }) => (lease, failed(&failure_json)),
        Message::Stopped(v1::Stopped { lease }) => (lease, Report::Stopped),
        Message::Prepared(v1::Prepared { lease, address }) => {
            let fits = !address.is_empty() && address.len() <= ADDRESS_BYTES;
            (lease, Report::Prepared(fits.then_some(address)?))
        }
    };
    Some(owner::Request::Report {
        from,
        lease: self::lease(&lease?),
        report,
    })
}

/// An output that cannot be read counts as a failure: dropping it would hang the task.
fn completed(output: &Bytes) -> Report {
    if output.len() > PAYLOAD_LIMIT_BYTES {
        return Report::Failed(Failure {
            kind: FailureKind::Invalid,
            message: format!(
                "the task's output takes {} bytes: {PAYLOAD_LIMIT_BYTES} are taken at the most",
                output.len()
            ),
        });
    }
    let parsed = serde_json::from_slice::<TaskOutput>(output);
    match (parsed, std::str::from_utf8(output)) {
        (Ok(_), Ok(text)) => Report::Completed(Payload::from(text)),
        (Err(error), _) => Report::Failed(unreadable(&error.to_string())),
        (_, Err(error)) => Report::Failed(unreadable(&error.to_string())),
    }
}

fn failed(failure: &Bytes) -> Report {
    let parsed = serde_json::from_slice::<Failure>(failure);
    let mut failure = parsed.unwrap_or_else(|error| unreadable(&error.to_string()));
    cut(&mut failure.message, MESSAGE_BYTES);
    Report::Failed(failure)
}

fn unreadable(why: &str) -> Failure {
    let message = format!("the worker's answer cannot be read: {why}");
    Failure {
        kind: FailureKind::Error,
        message,
    }
}

fn bounded(lines: Vec<String>) -> Vec<String> {
    let mut lines: Vec<String> = lines.into_iter().take(LOG_LINES).collect();
    lines.iter_mut().for_each(|line| cut(line, LOG_LINE_BYTES));
    lines
}

/// Cuts a text to so many bytes, at a character's end.
fn cut(text: &mut String, bytes: usize) {
    let mut ends = (0..=bytes.min(text.len())).rev();
    let end = ends.find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
}

fn lease(lease: &v1::Lease) -> Lease {
    Lease {
        term: Term(lease.term),
        epoch: Epoch(lease.epoch),
        attempt: AttemptId(lease.attempt),
    }
}

/// The newest protocol version that both sides speak.
fn spoken(hello: &v1::Hello) -> Result<u32, Status> {
    let theirs = hello.protocol_version;
    let oldest = match hello.oldest_protocol_version {
        0 => theirs,
        oldest => oldest,
    };
    let version = theirs.min(PROTOCOL_VERSION);
    if version < oldest.max(OLDEST_PROTOCOL_VERSION) {
        return Err(Status::failed_precondition(format!(
            "protocol versions {oldest} to {theirs} are not spoken here, only {OLDEST_PROTOCOL_VERSION} to \
             {PROTOCOL_VERSION}: use builds at most one version apart"
        )));
    }
    Ok(version)
}

fn introduction(hello: v1::Hello) -> Result<Introduction, Status> {
    let allowed = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    let name = hello.worker;
    let is_place = matches!(name.as_str(), "." | "..");
    if name.is_empty() || name.len() > NAME_CHARACTERS || !name.chars().all(allowed) || is_place {
        return Err(Status::invalid_argument(format!(
            "worker: `{}` must be 1 to {NAME_CHARACTERS} letters, digits, `-`, `_` or `.`, and not `.` or `..`",
            name.escape_debug().take(2 * NAME_CHARACTERS).collect::<String>()
        )));
    }
    if hello.devices.len() > DEVICES {
        return Err(Status::invalid_argument(format!("devices: more than {DEVICES}")));
    }
    for device in &hello.devices {
        if device.id.len() > NAME_BYTES || device.kind.len() > NAME_BYTES {
            return Err(Status::invalid_argument(format!(
                "devices: ids and kinds have at most {NAME_BYTES} bytes"
            )));
        }
    }
    if hello.host.len() > HOST_BYTES {
        return Err(Status::invalid_argument(format!(
            "host: has more than {HOST_BYTES} bytes"
        )));
    }
    let host = if hello.host.is_empty() {
        name.clone()
    } else {
        hello.host
    };
    let devices = hello.devices.into_iter().map(|device| DeviceInfo {
        id: device.id.into(),
        kind: device.kind.into(),
        name: line(device.name, "").into(),
        memory_bytes: device.memory_bytes,
        threads: device.threads,
        engines: device.engines.into_iter().take(ENGINES).map(engine).collect(),
    });
    Ok(Introduction {
        name,
        epoch: Epoch(hello.epoch),
        host,
        devices: devices.collect(),
    })
}

fn engine(announced: v1::Engine) -> EngineInfo {
    EngineInfo {
        name: line(announced.name, "").into(),
        version: line(announced.version, "").into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn reported(message: Message) -> Report {
        let from = WorkerHandle {
            worker: WorkerId(1),
            epoch: Epoch(1),
            link: 1,
        };
        match translate(from, message) {
            Some(owner::Request::Report { report, .. }) => report,
            other => panic!("{other:?} is no report"),
        }
    }

    #[test]
    fn an_output_that_is_too_large_fails_its_task_and_says_how_large_it_may_be() {
        let output_json = vec![b' '; PAYLOAD_LIMIT_BYTES + 1].into();
        let lease = Some(v1::Lease::default());
        match reported(Message::Completed(v1::Completed { lease, output_json })) {
            Report::Failed(failure) => {
                assert_eq!(failure.kind, FailureKind::Invalid, "it would be as large again");
                assert!(
                    failure.message.contains("6291457 bytes: 6291456"),
                    "{}",
                    failure.message
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_name_that_would_be_a_place_in_a_path_is_refused() {
        for (name, sound) in [
            ("a", true),
            ("...", true),
            (".", false),
            ("..", false),
            ("a/b", false),
        ] {
            let hello = v1::Hello {
                worker: name.to_owned(),
                ..v1::Hello::default()
            };
            assert_eq!(introduction(hello).is_ok(), sound, "{name}");
        }
    }

    #[test]
    fn what_a_worker_says_is_kept_at_a_bounded_length() {
        let lease = Some(v1::Lease::default());
        let failure = Failure {
            kind: FailureKind::Error,
            message: "é".repeat(1 << 20),
        };
        let failure_json = serde_json::to_vec(&failure).unwrap().into();
        match reported(Message::Failed(v1::Failed { lease, failure_json })) {
            Report::Failed(kept) => assert_eq!(kept.message, "é".repeat(MESSAGE_BYTES / 2)),
            other => panic!("{other:?}"),
        }
        let progress = Progress {
            done: 1,
            total: 2,
            unit: "x".repeat(1 << 20),
            note: "y".repeat(1 << 20),
            went_on_from: 0,
        };
        let progress_json = serde_json::to_vec(&progress).unwrap().into();
        match reported(Message::Progress(v1::Progress { lease, progress_json })) {
            Report::Progress(kept) => {
                assert_eq!((kept.unit.len(), kept.note.len()), (NAME_BYTES, NOTE_BYTES));
            }
            other => panic!("{other:?}"),
        }
        let device = v1::Device {
            id: "x".repeat(1 << 20),
            ..v1::Device::default()
        };
        let hello = v1::Hello {
            worker: "a".to_owned(),
            devices: vec![device],
            ..v1::Hello::default()
        };
        assert!(introduction(hello).is_err_and(|refused| refused.message().contains("at most 64 bytes")));
    }
}
