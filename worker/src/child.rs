//! The device child: a process that keeps the parent resident and runs one attempt after another.
//!
//! [`run`] is its whole life. A reader thread takes requests, so that a cancel is seen while an attempt
//! runs; attempts run on the main thread. When standard input closes the agent is gone, and the child ends
//! with everything it started, whatever it computes. Leases, retries and the coordinator are the agent's
//! affair.

mod alive;
pub mod protocol;
mod rank;
mod stop;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::FromRawFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};

use espalier_artifact::BlockingStore;
use espalier_model::Device;
use espalier_proto::task::{Engine, Failure, FailureKind, Progress};

use crate::engine::vllm::VllmOptions;
use crate::executor::{Backend, Caches, Context, Pulse, Stop, execute};
use crate::trace::{Names, attempt_span};
use crate::{Error, Result};
use alive::Alive;
use protocol::{Order, Reply, Request};
use rank::Member;
use stop::Stops;

/// Tells whether a rank waits for others, which live.
type Waits = Box<dyn Fn() -> bool + Send + Sync>;

/// The device that a child was started for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assigned {
    /// Which.
    pub device: Device,
    /// Bytes of a GPU that tensors may take; none: what is free when it is opened, less a reserve.
    pub memory_limit: Option<u64>,
    /// vLLM, for tasks that measure in it.
    pub vllm: VllmOptions,
}

/// Serves requests on standard input until it closes or says shutdown. Then `before_end` runs, which has to be
/// over soon, whatever it waits for, and the process ends: this returns only errors.
///
/// # Errors
/// When standard output cannot be taken over or a thread cannot be started.
pub fn run(assigned: Assigned, before_end: impl FnOnce() + Send + 'static) -> Result<()> {
    let output = Arc::new(Mutex::new(claim_stdout()?));
    let stops = Arc::new(Stops::default());
    let (sender, requests) = sync_channel(4);
    let reader_stops = Arc::clone(&stops);
    std::thread::Builder::new()
        .name("requests".to_owned())
        .spawn(move || {
            read_requests(&sender, &reader_stops);
            before_end();
            // The agent is gone or wants no more: an attempt still running would work for nobody.
            end_with_everything_started()
        })
        .map_err(|error| Error::Child {
            reason: format!("cannot start its reader: {error}"),
        })?;
    let mut child = Child {
        requests,
        output,
        stops,
        assigned,
        backend: None,
        caches: Caches::default(),
        store: None,
    };
    child.serve();
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

fn read_requests(sender: &SyncSender<Request>, stops: &Stops) {
    for line in BufReader::new(std::io::stdin()).lines() {
        let Ok(line) = line else { break };
        match serde_json::from_str::<Request>(&line) {
            Ok(Request::Cancel { attempt, checkpoint }) => stops.ask(attempt, checkpoint),
            Ok(Request::Shutdown) => break,
            Ok(request) => {
                if let Request::Run(order) = &request {
                    // A number may come again under another term; a stop of the one before means nothing to it.
                    stops.forget(order.attempt);
                }
                if sender.send(request).is_err() {
                    break;
                }
            }
            Err(error) => tracing::error!(%error, "a request that is not understood is left out"),
        }
    }
}

/// Ends this process, and what it started with it: all of them are in the process group the agent made.
fn end_with_everything_started() -> ! {
    // SAFETY: plain system calls. Only the group that this process leads is killed, never that of a shell
    // that somebody started it from.
    unsafe {
        if libc::getpgrp() == libc::getpid() {
            libc::kill(0, libc::SIGKILL);
        }
    }
    std::process::exit(0)
}

struct Child {
    requests: Receiver<Request>,
    output: Arc<Mutex<File>>,
    stops: Arc<Stops>,
    assigned: Assigned,
    /// Opened by the first attempt, which is told when it cannot be.
    backend: Option<Backend>,
    caches: Caches,
    /// Under the URL it was asked for.
    store: Option<(String, BlockingStore)>,
}

impl Child {
    fn serve(&mut self) {
        while let Ok(request) = self.requests.recv() {
            // A release of a rank that has stopped meanwhile releases nothing.
            let Request::Run(order) = request else { continue };
            let attempt = order.attempt;
            let names = Names {
                job: &order.job,
                task: order.task,
                attempt,
                kind: order.spec.kind(),
            };
            let span = attempt_span(names, &order.traceparent);
            let answer = span.in_scope(|| match self.attempt(&order) {
                Ok(answer) => answer,
                Err(Error::Cancelled) => Reply::Stopped { attempt },
                Err(error) if error.is_of_another_rank() && rank::await_the_cause(attempt, &self.stops) => {
                    tracing::info!(%error, "the gang has ended");
                    Reply::Stopped { attempt }
                }
                Err(error) => {
                    tracing::warn!(%error, "the attempt failed");
                    Reply::Failure {
                        attempt,
                        failure: error.failure(),
                    }
                }
            });
            // It ends before the answer: a child is often ended on its answer.
            drop(span);
            reply(&self.output, &answer);
        }
    }

    fn attempt(&mut self, order: &Order) -> Result<Reply> {
        let attempt = order.attempt;
        if let Some(place) = &order.gang {
            rank::require_alone(place, &order.spec)?;
        }
        // Before a rank says that it is ready, as they may be slow or fail: once all are released they wait for it.
        let backend = match order.spec.engine() {
            // What vLLM's process has of the device is free before the device is opened: it is then seen how much is free.
            Engine::Builtin => {
                self.caches.end_vllm();
                self.backend()?
            }
            Engine::Vllm { .. } => self.backend_beside_vllm()?,
        };
        self.open(&order.artifact_store, &order.artifact_store_id, backend.pulse())?;
        let released = match &order.gang {
            None => None,
            Some(place) => {
                let released = rank::stand_ready(place, attempt, &self.requests, &self.stops, |address| {
                    reply(&self.output, &Reply::Prepared { attempt, address });
                })?;
                Some((place, released))
            }
        };
        let Some((_, store)) = &self.store else {
            let failure = Failure {
                kind: FailureKind::Error,
                message: "there is no artifact store".to_owned(),
            };
            return Ok(Reply::Failure { attempt, failure });
        };
        // Ranks that look for each other are no sign of life, and none that hangs: that has a deadline of its own.
        let waits: Arc<OnceLock<Waits>> = Arc::default();
        let (joined, is_rank) = (Arc::clone(&waits), released.is_some());
        let sink = Arc::clone(&self.output);
        let _alive = Alive::watch(
            backend.pulse(),
            move || joined.get().map_or(is_rank, |waits| waits()),
            alive::INTERVAL,
            move || reply(&sink, &Reply::Alive { attempt }),
        )?;
        let member = released.map(|(place, released)| Member::join(place, released, backend.operations()));
        let member = member.transpose()?;
        if let Some(member) = &member {
            let _ = waits.set(Box::new(member.waits()));
        }
        let sink = Arc::clone(&self.output);
        let stops = Arc::clone(&self.stops);
        let context = Context::new(
            &backend,
            store,
            Box::new(move |progress: Progress| reply(&sink, &Reply::Progress { attempt, progress })),
            Box::new(move || stops.asked(attempt)),
        )
        .with_attempt(attempt)
        .with_gang(member.as_ref().map(|member| Arc::clone(&member.gang)));
        let output = match execute(&context, &mut self.caches, &order.spec) {
            // Ranks that have left a checkpoint together part in peace: the last of them must not find the gang broken.
            Err(Error::Cancelled) if self.stops.asked(attempt) != Some(Stop::Now) => {
                if let Some(member) = member {
                    member.leave();
                }
                return Err(Error::Cancelled);
            }
            output => Box::new(output?),
        };
        // Unmounted meanwhile: what it put down is seen by nobody else, so it is not done.
        require(store, &order.artifact_store_id)?;
        if let Some(member) = member {
            member.leave();
        }
        Ok(Reply::Output { attempt, output })
    }

    fn backend(&mut self) -> Result<Backend> {
        if let Some(backend) = &self.backend {
            return Ok(backend.clone());
        }
        let Assigned {
            device, memory_limit, ..
        } = self.assigned;
        let backend = Backend::open(device, memory_limit)?;
        self.backend = Some(backend.clone());
        Ok(backend)
    }

    /// What is left to a task that measures in vLLM, which has the device: a GPU is given up for it.
    fn backend_beside_vllm(&mut self) -> Result<Backend> {
        let device = self.assigned.device;
        let backend = if device == Device::Cpu {
            self.backend()?
        } else {
            self.caches.clear();
            self.backend = None;
            Backend::open(Device::Cpu, None)?
        };
        Ok(backend.with_vllm(self.assigned.vllm.clone().on(device)))
    }

    /// Opens the store, unless it is open already. It was made by the coordinator: one that is not there, or is
    /// another by now, is refused and not made. An attempt that waits for it has this pulse.
    fn open(&mut self, location: &str, id: &str, pulse: Pulse) -> Result<()> {
        let store = match self.store.take() {
            Some((opened, store)) if opened == location => store,
            _ => BlockingStore::open_existing(location)?,
        };
        let store = store.telling_of_waits(move || pulse.beat());
        let (_, store) = self.store.insert((location.to_owned(), store));
        require(store, id)
    }
}

/// Sees that the store is the coordinator's, where that says which it is.
fn require(store: &BlockingStore, id: &str) -> Result<()> {
    if id.is_empty() {
        return Ok(());
    }
    Ok(store.require(id)?)
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
        end_with_everything_started();
    }
}
