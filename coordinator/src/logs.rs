//! Logs of attempts, kept on the coordinator's disk so that they outlive the worker.
//!
//! [`Logs`] is what the loop and the services hold: lines go into a bounded queue and are dropped, and
//! counted, when it is full; nobody waits for this disk. One thread ([`writer`]) does all the writing and
//! reading. [`file`](self::file) is the form of a log: its beginning and its end are kept. [`index`] bounds all of them
//! together; the logs written to longest ago go first.

mod file;
mod index;
mod line;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::{broadcast, oneshot};

use crate::scheduler::{AttemptId, JobId};
pub use file::Kept;
use writer::Writer;

/// Batches of lines that may wait for the disk.
const QUEUE: usize = 1024;
/// Attempts that are followed at a time.
const FOLLOWED: usize = 1024;

/// How much is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// Of an attempt's beginning. Default: 64 KiB.
    pub head_bytes: u64,
    /// Of an attempt's end. Default: 192 KiB.
    pub tail_bytes: u64,
    /// Of all attempts together. Default: 1 GiB.
    pub total_bytes: u64,
    /// Attempts that have a log. Default: 65,536.
    pub attempts: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            head_bytes: 64 << 10,
            tail_bytes: 192 << 10,
            total_bytes: 1 << 30,
            attempts: 65_536,
        }
    }
}

/// Names a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogId {
    /// The attempt's job.
    pub job: JobId,
    /// The attempt.
    pub attempt: AttemptId,
}

/// Lines that follow those that were kept.
#[derive(Debug, Clone)]
pub struct News(pub Arc<[String]>);

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The disk did not do what it was told.
    #[error("cannot {action} the log of attempt {attempt}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Of which attempt.
        attempt: AttemptId,
        /// Why not.
        source: io::Error,
    },
    /// The thread that keeps them has too much to do or has ended.
    #[error("the coordinator is too busy to read logs: ask again")]
    Busy,
    /// Too many attempts are followed.
    #[error("{FOLLOWED} attempts are followed already: end one of those, or ask without following")]
    TooManyFollowed,
}

/// A log that is followed.
#[derive(Debug)]
struct Followed {
    news: broadcast::Sender<News>,
    /// The attempt has ended, when so many messages had been queued.
    ends_after: Option<u64>,
}

/// The logs. Clones are the same.
#[derive(Debug, Clone)]
pub struct Logs {
    queue: Option<SyncSender<Message>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Messages queued so far.
    sent: AtomicU64,
    /// Lines that found no room in the queue, by attempt; their number is written when there is room again.
    missed: Mutex<HashMap<LogId, u64>>,
    missing: AtomicUsize,
    followed: Mutex<HashMap<AttemptId, Followed>>,
    following: AtomicUsize,
}

#[derive(Debug)]
enum Message {
    Lines {
        log: LogId,
        /// Lines before these that have not come.
        missing: u64,
        unix_ms: i64,
        lines: Vec<String>,
    },
    Read {
        log: LogId,
        tail: usize,
        reply: oneshot::Sender<Result<Kept, Error>>,
    },
    Follow {
        log: LogId,
        tail: usize,
        reply: oneshot::Sender<Result<(Kept, broadcast::Receiver<News>), Error>>,
    },
}

impl Logs {
    /// Keeps logs in a directory, made when it is missing. Ends, after what is queued, when the last clone of
    /// [`Logs`] goes: join the thread then.
    ///
    /// # Errors
    /// When the directory cannot be made or the thread cannot be started.
    pub fn open(directory: &Path, options: Options) -> io::Result<(Self, JoinHandle<()>)> {
        std::fs::create_dir_all(directory)?;
        let (queue, messages) = sync_channel(QUEUE);
        let shared = Arc::new(Shared::default());
        let mut writer = Writer::new(directory.to_owned(), options, Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("espalier-logs".to_owned())
            .spawn(move || writer.run(&messages))?;
        let queue = Some(queue);
        Ok((Self { queue, shared }, thread))
    }

    /// Keeps nothing: for where there is no disk to keep it on.
    pub fn nowhere() -> Self {
        Self {
            queue: None,
            shared: Arc::default(),
        }
    }

    /// Takes lines of an attempt. Never waits: when the disk does not keep up they are dropped, and the log
    /// says how many were.
    pub fn append(&self, job: JobId, attempt: AttemptId, unix_ms: i64, lines: Vec<String>) {
        self.append_after(0, job, attempt, unix_ms, lines);
    }

    /// The same after so many lines that have not come: the log says so in their place.
    pub fn append_after(
        &self,
        missing: u64,
        job: JobId,
        attempt: AttemptId,
        unix_ms: i64,
        lines: Vec<String>,
    ) {
        let log = LogId { job, attempt };
        let number = u64::try_from(lines.len()).unwrap_or(u64::MAX);
        let message = Message::Lines {
            log,
            missing,
            unix_ms,
            lines,
        };
        if self.send(message).is_err() {
            self.shared.miss(log, number.saturating_add(missing));
        }
    }

    /// The attempt has ended: who follows it is let go after its last lines.
    pub fn ended(&self, attempt: AttemptId) {
        if self.shared.following.load(Ordering::Relaxed) == 0 {
            return;
        }
        let sent = self.shared.sent.load(Ordering::Relaxed);
        let mut followed = self
            .shared
            .followed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(followed) = followed.get_mut(&attempt) {
            followed.ends_after = Some(sent);
        }
    }

    /// What is kept of a log: the last `tail` lines, or all with 0. Nothing when the attempt has none.
    ///
    /// # Errors
    /// When the log cannot be read, or the thread that keeps it is too busy.
    pub async fn read(&self, job: JobId, attempt: AttemptId, tail: usize) -> Result<Kept, Error> {
        let log = LogId { job, attempt };
        let (reply, answer) = oneshot::channel();
        self.send(Message::Read { log, tail, reply })?;
        answer.await.map_err(|_| Error::Busy)?
    }

    /// The same, and every line after those. The receiver closes when [`Logs::ended`] was said of the attempt;
    /// one that is too slow is told how many messages it missed.
    ///
    /// # Errors
    /// As [`Logs::read`], or when too many attempts are followed.
    pub async fn follow(
        &self,
        job: JobId,
        attempt: AttemptId,
        tail: usize,
    ) -> Result<(Kept, broadcast::Receiver<News>), Error> {
        let log = LogId { job, attempt };
        let (reply, answer) = oneshot::channel();
        self.send(Message::Follow { log, tail, reply })?;
        answer.await.map_err(|_| Error::Busy)?
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        let queue = self.queue.as_ref().ok_or(Error::Busy)?;
        match queue.try_send(message) {
            Ok(()) => {
                self.shared.sent.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Err(Error::Busy),
        }
    }
}

impl Shared {
    /// Lines were dropped. Of more attempts than are remembered, nothing is.
    fn miss(&self, log: LogId, lines: u64) {
        let mut missed = self.missed.lock().unwrap_or_else(PoisonError::into_inner);
        if missed.len() >= QUEUE && !missed.contains_key(&log) {
            return;
        }
        let number = missed.entry(log).or_default();
        *number = number.saturating_add(lines);
        self.missing.store(missed.len(), Ordering::Relaxed);
    }

    /// How many lines of an attempt were dropped since this was last asked.
    fn take_missed(&self, log: LogId) -> u64 {
        if self.missing.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let mut missed = self.missed.lock().unwrap_or_else(PoisonError::into_inner);
        let number = missed.remove(&log).unwrap_or(0);
        self.missing.store(missed.len(), Ordering::Relaxed);
        number
    }
}
