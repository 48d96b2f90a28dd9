//! The device child: a process that keeps the parent resident and runs one attempt after another.
//!
//! [`run`] is its whole life. A reader thread takes requests, so that a cancel is seen while an attempt
//! runs; attempts run on the main thread. When standard input closes the agent is gone, and the child ends
//! at once. Leases, retries and the coordinator are the agent's affair.

pub mod protocol;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::FromRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use espalier_artifact::BlockingStore;
use espalier_proto::task::{Failure, FailureKind, Progress, TaskSpec};

use crate::executor::{Caches, Context, execute};
use crate::{Error, Result};
use protocol::{Reply, Request};

/// No attempt: what the cancelled attempt's number is before any was cancelled.
const NONE: u64 = u64::MAX;

/// Serves requests on standard input until it closes or says shutdown.
///
/// # Errors
/// When standard output cannot be taken over or a thread cannot be started.
pub fn run() -> Result<()> {
    let output = Arc::new(Mutex::new(claim_stdout()?));
    let cancelled = Arc::new(AtomicU64::new(NONE));
    let (sender, requests) = sync_channel(4);
    let reader_cancelled = Arc::clone(&cancelled);
    std::thread::Builder::new()
        .name("requests".to_owned())
        .spawn(move || read_requests(&sender, &reader_cancelled))
        .map_err(|error| Error::Child {
            reason: format!("cannot start its reader: {error}"),
        })?;
    serve(&requests, &output, &cancelled);
    Ok(())
}

/// Takes standard output for replies alone and points descriptor 1 at standard error, so that whatever a
/// library prints there cannot damage the protocol.
fn claim_stdout() -> Result<File> {
    let failed = || Error::Child {
        reason: format!("cannot take standard output: {}", std::io::Error::last_os_error()),
    };
    // SAFETY: descriptors 1 and 2 are this process's own; dup gives a new one that nobody else owns.
    unsafe {
        let own = libc::dup(1);
        if own < 0 || libc::dup2(2, 1) < 0 {
            return Err(failed());
        }
        libc::fcntl(own, libc::F_SETFD, libc::FD_CLOEXEC);
        Ok(File::from_raw_fd(own))
    }
}

fn read_requests(sender: &SyncSender<Request>, cancelled: &AtomicU64) {
    for line in BufReader::new(std::io::stdin()).lines() {
        let Ok(line) = line else { break };
        match serde_json::from_str::<Request>(&line) {
            Ok(Request::Cancel { attempt }) => cancelled.store(attempt, Ordering::SeqCst),
            Ok(Request::Shutdown) => break,
            Ok(request) => {
                if sender.send(request).is_err() {
                    break;
                }
            }
            Err(error) => tracing::error!(%error, "a request that is not understood is left out"),
        }
    }
    // The agent is gone or wants no more: an attempt still running would work for nobody.
    std::process::exit(0);
}

fn serve(requests: &Receiver<Request>, output: &Arc<Mutex<File>>, cancelled: &Arc<AtomicU64>) {
    let mut caches = Caches::default();
    let mut store: Option<BlockingStore> = None;
    while let Ok(request) = requests.recv() {
        let Request::Run {
            attempt,
            artifact_store,
            spec,
        } = request
        else {
            continue;
        };
        if store
            .as_ref()
            .is_none_or(|store| store.location() != artifact_store)
        {
            store = match BlockingStore::open(&artifact_store) {
                Ok(store) => Some(store),
                Err(error) => {
                    let failure = Failure {
                        kind: FailureKind::Error,
                        message: error.to_string(),
                    };
                    reply(output, &Reply::Failure { attempt, failure });
                    continue;
                }
            };
        }
        let Some(open) = &store else { continue };
        let answer = attempt_once(attempt, &spec, open, &mut caches, output, cancelled);
        reply(output, &answer);
    }
}

fn attempt_once(
    attempt: u64,
    spec: &TaskSpec,
    store: &BlockingStore,
    caches: &mut Caches,
    output: &Arc<Mutex<File>>,
    cancelled: &Arc<AtomicU64>,
) -> Reply {
    let sink = Arc::clone(output);
    let flag = Arc::clone(cancelled);
    let context = Context::new(
        store,
        Box::new(move |progress: Progress| reply(&sink, &Reply::Progress { attempt, progress })),
        Box::new(move || flag.load(Ordering::SeqCst) == attempt),
    )
    .with_attempt(attempt);
    match execute(&context, caches, spec) {
        Ok(result) => Reply::Output {
            attempt,
            output: Box::new(result),
        },
        Err(Error::Cancelled) => Reply::Stopped { attempt },
        Err(error) => {
            tracing::warn!(attempt, kind = spec.kind(), %error, "attempt failed");
            Reply::Failure {
                attempt,
                failure: error.failure(),
            }
        }
    }
}

fn reply(output: &Mutex<File>, reply: &Reply) {
    let Ok(mut line) = serde_json::to_vec(reply) else {
        tracing::error!("a reply cannot be written as JSON");
        return;
    };
    line.push(b'\n');
    let Ok(mut output) = output.lock() else { return };
    if output.write_all(&line).and_then(|()| output.flush()).is_err() {
        // Nobody reads: the agent is gone.
        std::process::exit(0);
    }
}
