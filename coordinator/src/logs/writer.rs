//! The thread that writes and reads logs, one message after another: so who follows gets every line once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::broadcast;

use super::index::{self, Index};
use super::{Error, FOLLOWED, Followed, Kept, LogId, Message, News, Options, Shared, file, line};

/// Messages that may wait for one who follows.
const BEHIND: usize = 64;
/// How often those are let go whose attempts have ended.
const PAUSE: Duration = Duration::from_millis(100);
/// A disk that fails is complained of this often.
const COMPLAINT: Duration = Duration::from_secs(60);

/// The thread's belongings.
pub struct Writer {
    directory: PathBuf,
    options: Options,
    shared: Arc<Shared>,
    index: Index,
    taken: u64,
    complained: Option<Instant>,
}

impl Writer {
    /// Of this directory.
    pub fn new(directory: PathBuf, options: Options, shared: Arc<Shared>) -> Self {
        Self {
            directory,
            options,
            shared,
            index: Index::default(),
            taken: 0,
            complained: None,
        }
    }

    /// Takes messages until nobody can send any more.
    pub fn run(&mut self, messages: &Receiver<Message>) {
        self.index = Index::of(&self.directory);
        self.tidy();
        let mut rested = Instant::now();
        loop {
            match messages.recv_timeout(PAUSE) {
                Ok(message) => {
                    self.handle(message);
                    self.taken = self.taken.saturating_add(1);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if rested.elapsed() >= PAUSE {
                self.let_go();
                rested = Instant::now();
            }
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Lines {
                log,
                missing,
                unix_ms,
                lines,
            } => self.append(log, missing, unix_ms, &lines),
            // Who asked may have gone.
            Message::Read { log, tail, reply } => drop(reply.send(self.read(log, tail))),
            Message::Follow { log, tail, reply } => drop(reply.send(self.follow(log, tail))),
        }
    }

    fn append(&mut self, log: LogId, missing: u64, unix_ms: i64, lines: &[String]) {
        let mut text = String::new();
        let missed = self.shared.take_missed(log).saturating_add(missing);
        if missed > 0 {
            text.push_str(&file::mark(missed));
        }
        let before = text.len();
        for shown in lines {
            line::write(&mut text, unix_ms, shown);
        }
        match self.store(log, &text) {
            Ok(bytes) => {
                self.index.written(log, bytes);
                self.tidy();
            }
            Err(error) => {
                let lost = u64::try_from(lines.len())
                    .unwrap_or(u64::MAX)
                    .saturating_add(missed);
                self.shared.miss(log, lost);
                self.complain(log, &error);
            }
        }
        self.tell(log, text.get(before..).unwrap_or_default());
    }

    fn store(&self, log: LogId, text: &str) -> io::Result<u64> {
        let path = index::path(&self.directory, log);
        match file::append(&path, text, &self.options) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(path.parent().unwrap_or_else(|| Path::new(".")))?;
                file::append(&path, text, &self.options)
            }
            stored => stored,
        }
    }

    /// Removes what is too much.
    fn tidy(&mut self) {
        while let Some(log) = self.index.surplus(&self.options) {
            let path = index::path(&self.directory, log);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => self.complain(log, &error),
                _ => {}
            }
            self.index.forget(log);
            if let Some(job) = path.parent() {
                // Only an empty directory goes.
                let _ = fs::remove_dir(job);
            }
        }
    }

    fn read(&self, log: LogId, tail: usize) -> Result<Kept, Error> {
        let missed = self.shared.take_missed(log);
        if missed > 0 && self.store(log, &file::mark(missed)).is_err() {
            self.shared.miss(log, missed);
        }
        let path = index::path(&self.directory, log);
        file::read(&path, tail, &self.options).map_err(|source| Error::Io {
            action: "read",
            attempt: log.attempt,
            source,
        })
    }

    fn follow(&self, log: LogId, tail: usize) -> Result<(Kept, broadcast::Receiver<News>), Error> {
        let kept = self.read(log, tail)?;
        let mut followed = self
            .shared
            .followed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if followed.len() >= FOLLOWED && !followed.contains_key(&log.attempt) {
            return Err(Error::TooManyFollowed);
        }
        let entry = followed.entry(log.attempt).or_insert_with(|| Followed {
            news: broadcast::Sender::new(BEHIND),
            ends_after: None,
        });
        let receiver = entry.news.subscribe();
        self.shared.following.store(followed.len(), Ordering::Relaxed);
        Ok((kept, receiver))
    }

    fn tell(&self, log: LogId, text: &str) {
        if self.shared.following.load(Ordering::Relaxed) == 0 {
            return;
        }
        let followed = self
            .shared
            .followed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(followed) = followed.get(&log.attempt) {
            let lines = text.lines().map(str::to_owned).collect();
            // Nobody may be listening any more.
            let _ = followed.news.send(News(lines));
        }
    }

    /// Lets those go whose attempts have ended and whose last lines are written.
    fn let_go(&self) {
        if self.shared.following.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut followed = self
            .shared
            .followed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        followed.retain(|_, followed| {
            let is_over = followed.ends_after.is_some_and(|sent| self.taken >= sent);
            !is_over && followed.news.receiver_count() > 0
        });
        self.shared.following.store(followed.len(), Ordering::Relaxed);
    }

    fn complain(&mut self, log: LogId, error: &io::Error) {
        if self.complained.is_some_and(|last| last.elapsed() < COMPLAINT) {
            return;
        }
        self.complained = Some(Instant::now());
        tracing::warn!(job = %log.job, attempt = %log.attempt, %error, "a log cannot be kept");
    }
}
