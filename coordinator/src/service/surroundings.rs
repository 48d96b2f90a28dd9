//! What the loop has of the world: its time, and a place for slow work. The simulation brings its own.
//!
//! The loop asks no other clock, starts no thread and no task, so that the same code runs under a virtual
//! clock.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::runtime;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::owner::Request;
use crate::journal::disk::Disk;
use crate::scheduler::{Event, State};
use crate::tables::Tables;

/// Tells the time.
pub trait Clock: Send + Sync + 'static {
    /// Since some moment before the loop began. Never goes back; silence and pauses are measured by it.
    fn elapsed(&self) -> Duration;
    /// Wall clock, milliseconds since 1970. For display only: it may jump.
    fn unix_ms(&self) -> i64;
}

/// Slow work, and what it answers.
pub type Work = Box<dyn FnOnce() -> Request + Send>;

/// Runs slow work beside the loop.
pub trait Beside: Send + Sync + 'static {
    /// Runs it; its answer comes to the loop as a request, unless the loop has stopped by then.
    fn spawn(&self, work: Work);
}

/// Sees every event as it is applied, before it is durable. The simulation checks invariants with it.
pub trait Witness: Send + Sync + 'static {
    /// The state right after an event, and the journal's frame that will hold it.
    fn applied(&self, state: &State, event: &Event, frame: u64);
}

/// What a loop is given.
#[derive(Clone)]
pub struct Surroundings {
    /// Its time.
    pub clock: Arc<dyn Clock>,
    /// Its place for slow work.
    pub beside: Arc<dyn Beside>,
    /// Where its journal lies.
    pub disk: Arc<dyn Disk>,
    /// What is known beside the state; asked beside the loop only.
    pub tables: Tables,
    /// URL of the artifact store, as workers are told.
    pub store: String,
    /// Its id, as it lies in the store; empty where nobody is to check it.
    pub store_id: String,
    /// Who watches it; nobody in production.
    pub witness: Option<Arc<dyn Witness>>,
}

impl std::fmt::Debug for Surroundings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Surroundings")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self {
            start: Instant::now(),
        }
    }
}

impl Clock for SystemClock {
    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    fn unix_ms(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    }
}

/// Blocking threads of a runtime, whose answers go into the loop's inbox.
#[derive(Debug)]
pub struct BlockingThreads {
    /// Whose threads.
    pub runtime: runtime::Handle,
    /// Counts what still runs.
    pub tasks: TaskTracker,
    /// The loop's inbox. Weak: work that hangs must not keep a loop alive that nobody else talks to.
    pub requests: mpsc::WeakSender<Request>,
}

impl Beside for BlockingThreads {
    fn spawn(&self, work: Work) {
        let requests = self.requests.clone();
        self.tasks.spawn_blocking_on(
            move || {
                let answer = work();
                // A loop that has stopped will ask again after its restart.
                if let Some(requests) = requests.upgrade() {
                    let _ = requests.blocking_send(answer);
                }
            },
            &self.runtime,
        );
    }
}
