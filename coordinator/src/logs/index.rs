//! How much all logs take together, and which go first.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::{LogId, Options};
use crate::scheduler::{AttemptId, JobId};

/// A file takes at least so much.
const BLOCK: u64 = 4096;

/// The logs that there are, by when they were last written to.
#[derive(Debug, Default)]
pub struct Index {
    logs: HashMap<LogId, Entry>,
    by_age: BTreeMap<u64, LogId>,
    newest: u64,
    bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    age: u64,
    bytes: u64,
}

impl Index {
    /// What an earlier coordinator left in a directory; other files are let lie.
    pub fn of(directory: &Path) -> Self {
        let mut found = Vec::new();
        for job in entries(directory) {
            for file in entries(&job) {
                let Some(log) = named(&job, &file) else { continue };
                let Ok(metadata) = fs::metadata(&file) else {
                    continue;
                };
                let written = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                found.push((written, log, metadata.len()));
            }
        }
        found.sort_by_key(|(written, log, _)| (*written, log.attempt));
        let mut index = Self::default();
        for (_, log, bytes) in found {
            index.written(log, bytes);
        }
        index
    }

    /// A log was written to and is so large now.
    pub fn written(&mut self, log: LogId, bytes: u64) {
        self.forget(log);
        self.newest = self.newest.saturating_add(1);
        let bytes = bytes.max(BLOCK);
        self.logs.insert(
            log,
            Entry {
                age: self.newest,
                bytes,
            },
        );
        self.by_age.insert(self.newest, log);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// The log to remove next, if there are too many or they are too large.
    pub fn surplus(&self, options: &Options) -> Option<LogId> {
        let over = self.bytes > options.total_bytes || self.logs.len() > options.attempts;
        let oldest = self.by_age.values().next().copied();
        oldest.filter(|_| over && self.logs.len() > 1)
    }

    /// A log is gone.
    pub fn forget(&mut self, log: LogId) {
        if let Some(entry) = self.logs.remove(&log) {
            self.by_age.remove(&entry.age);
            self.bytes = self.bytes.saturating_sub(entry.bytes);
        }
    }
}

/// Where a log lies.
pub fn path(directory: &Path, log: LogId) -> PathBuf {
    directory
        .join(log.job.to_string())
        .join(format!("attempt-{}.log", log.attempt))
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok().map(|entry| entry.path()))
}

fn named(job: &Path, file: &Path) -> Option<LogId> {
    let job: JobId = job.file_name()?.to_str()?.parse().ok()?;
    let name = file.file_name()?.to_str()?;
    let number = name
        .strip_prefix("attempt-")?
        .strip_suffix(".log")?
        .parse()
        .ok()?;
    let attempt = AttemptId(number);
    Some(LogId { job, attempt })
}
