//! What every executor has at hand: the backend, the artifact store, a way to tell how far it is, and
//! whether it should stop.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use espalier_artifact::BlockingStore;
use espalier_model::collective::Gang;
use espalier_model::ops::Operations;
use espalier_proto::task::{ArtifactId, Progress};

use super::backend::Backend;
use super::plan::Plan;
use super::pulse::Pulse;
use crate::engine::vllm::{Vllm, VllmOptions};
use crate::{Error, Result};

/// Progress is passed on at most this often; the last of a stage always is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Takes progress on its way to the agent.
pub type ProgressSink = Box<dyn Fn(Progress)>;
/// Says whether the attempt should stop.
pub type StopFlag = Box<dyn Fn() -> Option<Stop>>;

/// How an attempt should stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// At its next chance; whatever it has is dropped.
    Now,
    /// As soon as it has left what the next attempt can go on from; at its next chance when it leaves nothing.
    AfterCheckpoint,
}

/// One attempt's surroundings.
pub struct Context<'a> {
    /// The backend of this child's device.
    pub operations: Arc<dyn Operations>,
    /// Where shards, weights and sums lie.
    pub store: &'a BlockingStore,
    /// The attempt's number: what it leaves for a later one is recorded under it.
    pub attempt: u64,
    /// The other ranks of this attempt; none for a task of one rank.
    pub gang: Option<Arc<dyn Gang>>,
    progress: ProgressSink,
    stop: StopFlag,
    leaves_checkpoints: Cell<bool>,
    went_on_from: Cell<u64>,
    last_progress: Cell<Option<Instant>>,
    /// As it was last told: done, in all, and of what.
    course: RefCell<(u64, u64, String)>,
    pulse: Pulse,
    host_limit: Option<u64>,
    vllm: VllmOptions,
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Context")
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

impl<'a> Context<'a> {
    /// An attempt on this device.
    pub fn new(backend: &Backend, store: &'a BlockingStore, progress: ProgressSink, stop: StopFlag) -> Self {
        let Backend {
            operations,
            pulse,
            host_limit,
            vllm,
        } = backend.clone();
        Self {
            operations,
            store,
            attempt: 0,
            gang: None,
            progress,
            stop,
            leaves_checkpoints: Cell::new(false),
            went_on_from: Cell::new(0),
            last_progress: Cell::new(None),
            course: RefCell::default(),
            pulse,
            host_limit,
            vllm,
        }
    }

    /// vLLM as this child was told of it, not started.
    pub(super) fn vllm(&self) -> Vllm {
        Vllm::new(self.vllm.clone())
    }

    /// How much is done at a time on the device, and kept there, as it is now.
    pub(super) fn plan(&self) -> Plan {
        Plan::of(self.operations.accelerator().as_ref()).with_host_limit(self.host_limit)
    }

    /// The same for the attempt of this number.
    #[must_use]
    pub fn with_attempt(self, attempt: u64) -> Self {
        Self { attempt, ..self }
    }

    /// The same as a rank of `gang`.
    #[must_use]
    pub fn with_gang(self, gang: Option<Arc<dyn Gang>>) -> Self {
        Self { gang, ..self }
    }

    /// Says how far the attempt has come, and gives it the chance to stop.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the attempt should stop.
    pub fn progress(
        &self,
        done: usize,
        total: usize,
        unit: &str,
        note: impl FnOnce() -> String,
    ) -> Result<()> {
        self.check_cancelled()?;
        let now = Instant::now();
        let due = self
            .last_progress
            .get()
            .is_none_or(|last| now.duration_since(last) >= PROGRESS_INTERVAL);
        self.course.replace((done as u64, total as u64, unit.to_owned()));
        if due || done >= total {
            self.last_progress.set(Some(now));
            self.tell(note());
        }
        Ok(())
    }

    /// Says why the attempt waits, as far as it has come, and gives it the chance to stop.
    ///
    /// # Errors
    /// As [`Context::progress`].
    pub fn waits(&self, why: impl FnOnce() -> String) -> Result<()> {
        self.check_cancelled()?;
        self.tell(why());
        Ok(())
    }

    fn tell(&self, note: String) {
        let (done, total, unit) = self.course.borrow().clone();
        (self.progress)(Progress {
            done,
            total,
            unit,
            note,
            went_on_from: self.went_on_from.get(),
        });
    }

    /// Says that the attempt goes on from so much that earlier ones have done, in units of its progress.
    pub fn goes_on_from(&self, done: usize) {
        self.went_on_from.set(done as u64);
    }

    /// Gives the attempt the chance to stop.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when it should.
    pub fn check_cancelled(&self) -> Result<()> {
        self.beat();
        self.look_for_stop()
    }

    /// Something was done.
    pub(super) fn beat(&self) {
        self.pulse.beat();
    }

    /// The same chance to stop for what only waits, which is no sign of life.
    pub(super) fn look_for_stop(&self) -> Result<()> {
        match (self.stop)() {
            Some(Stop::AfterCheckpoint) if self.leaves_checkpoints.get() => Ok(()),
            Some(Stop::Now | Stop::AfterCheckpoint) => Err(Error::Cancelled),
            None => Ok(()),
        }
    }

    /// From here on the attempt looks by itself whether a checkpoint is asked of it, leaves one and stops; until
    /// then only a stop at once interrupts it.
    pub fn leave_checkpoints(&self) {
        self.leaves_checkpoints.set(true);
    }

    /// Whether the attempt should leave a checkpoint and stop.
    pub fn is_checkpoint_asked(&self) -> bool {
        (self.stop)() == Some(Stop::AfterCheckpoint)
    }

    /// Lets `write` make a file beside the store, and takes it in as an artifact. On an error nothing stays.
    ///
    /// # Errors
    /// Those of `write` and of the store.
    pub fn put_written(&self, write: impl FnOnce(&Path) -> espalier_model::Result<()>) -> Result<ArtifactId> {
        let path = self.store.scratch_path()?;
        let stored = write(&path)
            .map_err(Error::from)
            .and_then(|()| Ok(self.store.put_file(&path)?));
        if stored.is_err() {
            // The error that matters is the one above.
            let _ = std::fs::remove_file(&path);
        }
        Ok(ArtifactId(stored?.to_string()))
    }
}
