//! What the loop has of the world: its time, and a place for slow work. The simulation brings its own.
//!
//! The loop asks no other clock, starts no thread and no task, so that the same code runs under a virtual
//! clock.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Draws what nobody can guess; in the simulation, what follows from its seed.
pub trait Secrets: Send + Sync + 'static {
    /// 128 bits, others each time.
    fn draw(&self) -> u128;
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
    /// Where its secrets come from.
    pub secrets: Arc<dyn Secrets>,
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

/// Secrets of the system's: a hash of a count, under a key that the system drew.
pub struct SystemSecrets {
    key: [u8; 32],
    count: AtomicU64,
}

impl SystemSecrets {
    /// Has the system draw the key.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn new() -> std::io::Result<Self> {
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        Ok(Self {
            key,
            count: AtomicU64::new(0),
        })
    }
}

impl std::fmt::Debug for SystemSecrets {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("SystemSecrets")
    }
}

impl Secrets for SystemSecrets {
    fn draw(&self) -> u128 {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.key, &count.to_le_bytes());
        let bits = hash.as_bytes().first_chunk::<16>().copied();
        u128::from_le_bytes(bits.unwrap_or_default())
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::{Secrets, SystemSecrets};

    #[test]
    fn secrets_are_others_each_time_and_in_each_process() {
        let (one, other) = (SystemSecrets::new().unwrap(), SystemSecrets::new().unwrap());
        let drawn: BTreeSet<u128> = (0..100).flat_map(|_| [one.draw(), other.draw()]).collect();
        assert_eq!(drawn.len(), 200);
        // Each bit is drawn: that one is the same in all of them has a chance of 2^-192.
        assert_eq!(drawn.iter().fold(0, |all, one| all | one), u128::MAX);
        assert_eq!(drawn.iter().fold(u128::MAX, |all, one| all & one), 0);
    }
}
