//! A thread that does one call after the other.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::call::Call;
use crate::collective::members::Members;
use crate::collective::{Error, Flight, InFlight};
use crate::{Result, Tensor};

/// Between two looks whether the thread has ended.
const LOOK: Duration = Duration::from_millis(2);

/// A call, and where its result goes.
struct Job {
    call: Call,
    done: SyncSender<Result<Tensor>>,
}

/// A thread that does one call after the other; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Worker {
    members: Arc<Members>,
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start(members: Arc<Members>) -> Result<Self> {
        let (jobs, queue) = channel();
        let own = members.clone();
        let spawned = std::thread::Builder::new()
            .name("collective".to_owned())
            .spawn(move || work(&own, &queue));
        let thread = spawned.map_err(|error| Error::System {
            what: "a thread of a communicator",
            reason: error.to_string(),
        })?;
        Ok(Self {
            members,
            jobs: Mutex::new(Some(jobs)),
            thread: Some(thread),
        })
    }

    pub(super) fn queue(&self, call: Call) -> Result<InFlight> {
        let (done, result) = sync_channel(1);
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        match jobs.as_ref() {
            Some(jobs) if jobs.send(Job { call, done }).is_ok() => {
                let members = self.members.clone();
                Ok(InFlight(Box::new(Awaited { result, members })))
            }
            _ => Err(ended().into()),
        }
    }
}

fn ended() -> Error {
    Error::System {
        what: "a call",
        reason: "its thread has ended".to_owned(),
    }
}

fn work(members: &Members, queue: &Receiver<Job>) {
    for Job { call, done } in queue {
        let result = call.run(members).map_err(|error| match error {
            // The others wait for what this rank did not do: all must end.
            crate::Error::Gang(error) => {
                members.mesh.give_up(error.clone());
                members.mesh.check().err().unwrap_or(error).into()
            }
            error => {
                members.mesh.give_up(Error::System {
                    what: "a call",
                    reason: error.to_string(),
                });
                error
            }
        });
        // Nobody may wait for it any more.
        let _ = done.send(result);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        let Some(thread) = self.thread.take() else {
            return;
        };
        // What is queued still goes out, unless that takes longer than a rank may be silent.
        let deadline = Instant::now() + self.members.mesh.options().silence;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        if !thread.is_finished() {
            self.members.mesh.abort();
        }
        if thread.join().is_err() {
            tracing::error!("a thread of a communicator has panicked");
        }
    }
}

/// A result that a worker will give.
#[derive(Debug)]
struct Awaited {
    result: Receiver<Result<Tensor>>,
    members: Arc<Members>,
}

impl Flight for Awaited {
    fn wait(self: Box<Self>) -> Result<Tensor> {
        let _waiting = self.members.mesh.waiting();
        // Ends: each call has a deadline, and the first that misses it ends all.
        self.result.recv().unwrap_or_else(|_| Err(ended().into()))
    }
}
