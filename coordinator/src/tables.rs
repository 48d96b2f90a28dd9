//! The search state as tables: keyed, range-scanned, written behind the journal by a thread of their own.
//!
//! They hold what the state machine does not keep (how attempts went, what happened to a job, cost rows,
//! scores, importance, decisions) and where archived tasks went. They are never the only copy: the thread
//! reads the journal as it grows, at its own pace, and stores the frame it has come to with what that frame
//! says, so it can stop anywhere and never holds the loop up. Tables that cannot be opened, were written by
//! another build, are not what was written or are ahead of the journal are set aside and built anew from
//! archives, the newest snapshot and the journal. Small values only; tensors and logs have other homes.
//!
//! Rows of an ended job leave once it is archived: the archive has them whole. Cost rows, scores, importance
//! and decisions stay for every later question.

mod follow;
mod keys;
mod open;
mod project;
mod rows;
mod store;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use serde::de::DeserializeOwned;

pub use rows::{
    AttemptOutcome, AttemptRow, CostEntry, DecisionRow, EventRow, ImportanceRow, Place, ScoreEntry,
};

use crate::journal::disk::Disk;
use crate::scheduler::{JobId, TaskId};
pub use store::RawRow;
use store::Store;

/// Their directory in a data directory.
pub const DIRECTORY: &str = "tables";

/// Rows that one question may bring.
const ROWS_LIMIT: usize = 100_000;

/// Why a question cannot be answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// They are not there yet.
    #[error("the tables are being built: ask again in a moment")]
    Building,
    /// They cannot be used; they will be built anew at the next start.
    #[error("the tables cannot be read ({0}): they are built anew when the coordinator restarts")]
    Broken(String),
}

/// What the thread and those who ask share.
#[derive(Debug, Default)]
struct Shared {
    database: Mutex<Option<sled::Db>>,
    /// The last frame the tables reflect.
    reflects: AtomicU64,
    stop: AtomicBool,
}

impl Shared {
    fn database(&self) -> MutexGuard<'_, Option<sled::Db>> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the tables; cheap to copy. Its calls read the disk: not for the loop.
#[derive(Debug, Clone, Default)]
pub struct Tables {
    shared: Arc<Shared>,
}

/// The thread that writes the tables. Dropping it leaves the thread running; [`Writer::stop`] ends it.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl Writer {
    /// Ends the thread once what it is at is stored.
    pub fn stop(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            tracing::warn!("the tables' thread ended badly: they are looked at again at the next start");
        }
    }
}

impl Tables {
    /// Starts the thread. `durable` is the last frame of the journal that is durable, as
    /// [`crate::journal::Journal::position`] gives it. Returns at once: the tables are opened, and built where
    /// they have to be, by the thread. Until then every question is answered by [`Error::Building`].
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        &self,
        disk: Arc<dyn Disk>,
        data_dir: &Path,
        durable: Arc<AtomicU64>,
    ) -> std::io::Result<Writer> {
        let thread = thread::Builder::new().name("espalier-tables".to_owned()).spawn({
            let mut follower = follow::Follower::new(disk, data_dir, durable, Arc::clone(&self.shared));
            move || follower.run()
        })?;
        Ok(Writer {
            shared: Arc::clone(&self.shared),
            thread,
        })
    }

    /// The last frame of the journal that the answers reflect; 0 before the tables are open.
    pub fn reflects(&self) -> u64 {
        self.shared.reflects.load(Ordering::Acquire)
    }

    /// The archived job that a task belonged to.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn archived_job_of(&self, task: TaskId) -> Result<Option<JobId>, Error> {
        self.ask(|database| store::archived_job_of(database, task))
    }

    /// How the attempts at a task went, the oldest first.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn attempts(&self, task: TaskId) -> Result<Vec<AttemptRow>, Error> {
        self.scan(&keys::attempts_of(task), ROWS_LIMIT)
    }

    /// How the attempts at all tasks of a job that is not archived went, by task.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn attempts_of_job(&self, job: JobId) -> Result<Vec<AttemptRow>, Error> {
        self.ask(|database| {
            let mut rows = Vec::new();
            for (first, range) in store::ranges_of(database, job)? {
                let up_to = keys::attempts_of(range.last.next());
                rows.extend(store::scan_between(database, &keys::attempts_of(first), &up_to)?);
            }
            Ok(rows)
        })
    }

    /// What happened to a job that is not archived, the oldest first, at most so many: without the starts and
    /// completions of attempts, whose rows say them ([`AttemptRow::started_in`]).
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn events(&self, job: JobId, limit: usize) -> Result<Vec<EventRow>, Error> {
        self.scan(&keys::events_of(job), limit)
    }

    /// The cost rows that a job measured.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn cost_rows(&self, job: JobId) -> Result<Vec<CostEntry>, Error> {
        self.scan(&keys::costs_of(job), ROWS_LIMIT)
    }

    /// The scores that a job found, by block.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn scores(&self, job: JobId) -> Result<Vec<ScoreEntry>, Error> {
        self.scan(&keys::scores_of(job), ROWS_LIMIT)
    }

    /// Where a job's importance sums lie.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn importance(&self, job: JobId) -> Result<Vec<ImportanceRow>, Error> {
        self.scan(&keys::importance_of(job), ROWS_LIMIT)
    }

    /// What was decided before the stages of a job: candidates among it.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn decisions(&self, job: JobId) -> Result<Vec<DecisionRow>, Error> {
        self.scan(&keys::decisions_of(job), ROWS_LIMIT)
    }

    /// Everything but the position, for comparing tables with tables.
    ///
    /// # Errors
    /// When the tables cannot be asked.
    pub fn dump(&self) -> Result<Vec<RawRow>, Error> {
        self.ask(store::dump)
    }

    fn scan<T: DeserializeOwned>(&self, prefix: &[u8], limit: usize) -> Result<Vec<T>, Error> {
        self.ask(|database| store::scan(database, prefix, limit))
    }

    /// sled may panic on files that are not what it wrote.
    fn ask<T>(&self, question: impl FnOnce(&sled::Db) -> Result<T, String>) -> Result<T, Error> {
        let database = self.shared.database().clone().ok_or(Error::Building)?;
        match catch_unwind(AssertUnwindSafe(|| question(&database))) {
            Ok(answer) => answer.map_err(Error::Broken),
            Err(_) => Err(Error::Broken("reading them failed".to_owned())),
        }
    }
}

/// Whether the tables in a data directory can be opened and are what was written; those that are not there can.
///
/// # Errors
/// Why not.
pub fn probe(data_dir: &Path) -> Result<(), String> {
    let directory = data_dir.join(DIRECTORY);
    if !directory.exists() {
        return Ok(());
    }
    open::open(&directory).map(|store: Store| store.close())
}
