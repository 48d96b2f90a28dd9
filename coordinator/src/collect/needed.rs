//! What may not go: everything that the journal, the archives or a record names, and what is too young.
//!
//! A name is every run of 64 lower-case hexadecimal digits, wherever it stands: nothing here knows which
//! fields hold artifacts, so none can be forgotten.

use std::collections::{BTreeSet, HashSet};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use espalier_artifact::{Name, StoredArtifact};
use tokio_util::sync::CancellationToken;

use crate::archive::{self, Archives};
use crate::journal::{self, disk::SystemDisk};
use crate::scheduler::{JobId, JobPhase, State};
use crate::{Error, Result};

/// Clocks of the store and of coordinators differ by less.
const CLOCKS_DIFFER_MS: i64 = 3_600_000;
const DIGITS: usize = 64;

/// What may not go, as of one look at the disk.
#[derive(Debug, Default)]
pub struct Needed {
    names: Names,
    /// When the oldest attempt that is open began, in ms since 1970.
    oldest_attempt: Option<i64>,
    /// When the oldest job that may run or be let go on was submitted, in ms since 1970.
    oldest_job: Option<i64>,
    /// Archived jobs whose archive is damaged or missing, and when they ended, in ms since 1970.
    unreadable: Vec<(JobId, i64)>,
}

impl Needed {
    /// What the journal and the archives of this data directory name. Blocks.
    ///
    /// # Errors
    /// When the disk cannot be read, or the journal: then nobody knows what it names. [`Error::Stopping`] when
    /// told to stop.
    pub fn on_disk(data_dir: &Path, stop: &CancellationToken) -> Result<Self> {
        let mut state = State::default();
        journal::read(&SystemDisk, &data_dir.join("journal"), &mut state)?;
        let mut needed = Self::of(&state)?;
        // After the journal: a job that leaves the state meanwhile is seen there, or here, or twice.
        let archives = Archives::new(Arc::new(SystemDisk), data_dir);
        let mut jobs: BTreeSet<JobId> = archives.jobs().map_err(archive_error)?.into_iter().collect();
        // One that is missing is not as if it named nothing.
        jobs.extend(state.archived().map(|summary| summary.id));
        for job in jobs {
            if stop.is_cancelled() {
                return Err(Error::Stopping);
            }
            match archives.json(job) {
                Ok(json) => needed.names_in(&json),
                Err(error @ (archive::Error::Missing { .. } | archive::Error::Damaged { .. })) => {
                    needed.do_without(&state, job, error)?;
                }
                Err(error) => return Err(archive_error(error)),
            }
        }
        Ok(needed)
    }

    /// What an archive names is not known: nothing that was put before its job ended may go.
    fn do_without(&mut self, state: &State, job: JobId, error: archive::Error) -> Result<()> {
        if let Some(summary) = state.summary(job) {
            tracing::warn!(%error, "nothing that was put before the job ended is collected");
            self.unreadable.push((job, summary.ended_at));
            return Ok(());
        }
        // The state itself says what a job names that it knows, and no start asks for an archive of one that it does
        // not: that was of a term that is void. One that has come since has to be seen whole.
        if job <= state.last_job() {
            Ok(())
        } else {
            Err(archive_error(error))
        }
    }

    /// Archived jobs whose archive is damaged or missing.
    pub fn unreadable(&self) -> impl Iterator<Item = JobId> {
        self.unreadable.iter().map(|(job, _)| *job)
    }

    /// What a state names, archived jobs left out.
    pub fn of(state: &State) -> Result<Self> {
        let mut needed = Self::default();
        serde_json::to_writer(&mut needed.names, state)
            .map_err(|error| Error::Internal(error.to_string()))?;
        needed.oldest_attempt = state.attempts().map(|attempt| attempt.started_at).min();
        // A failed job may be let go on.
        let over =
            |phase: &JobPhase| matches!(phase, JobPhase::Succeeded { .. } | JobPhase::Cancelled { .. });
        let live = state.jobs().filter(|job| !over(&job.phase));
        needed.oldest_job = live.map(|job| job.submitted_at).min();
        Ok(needed)
    }

    /// Adds what a text names.
    pub fn names_in(&mut self, text: &[u8]) {
        self.names.cut();
        self.names.take(text);
    }

    /// Whether an artifact may go: nothing names it, and it was last put long enough ago.
    pub fn lets_go(&self, artifact: &StoredArtifact, collect_after: Duration, now: i64) -> bool {
        let put_at = artifact.modified_unix_ms;
        let young = is_within(put_at, collect_after, now) || is_since(put_at, self.oldest_attempt);
        let ended = self.unreadable.iter().map(|(_, ended_at)| *ended_at).max();
        let may_be_named = ended.is_some_and(|ended| put_at <= ended.saturating_add(CLOCKS_DIFFER_MS));
        !young && !may_be_named && !self.names.found.contains(&artifact.name)
    }

    /// Whether a record must stay: a task that waits or is held would begin from the start without it.
    pub fn keeps_record(&self, set_at: i64, collect_after: Duration, now: i64) -> bool {
        is_within(set_at, collect_after, now) || is_since(set_at, self.oldest_job)
    }
}

fn is_within(put_at: i64, collect_after: Duration, now: i64) -> bool {
    let after = i64::try_from(collect_after.as_millis()).unwrap_or(i64::MAX);
    now.saturating_sub(put_at) <= after
}

fn is_since(put_at: i64, begun: Option<i64>) -> bool {
    begun.is_some_and(|begun| put_at >= begun.saturating_sub(CLOCKS_DIFFER_MS))
}

fn archive_error(error: archive::Error) -> Error {
    Error::Invalid(format!("nobody knows what an archive names: {error}"))
}

/// Collects names from text that is written to it piece by piece.
#[derive(Debug, Default)]
struct Names {
    found: HashSet<Name>,
    /// The digits before this place, 64 at the most.
    run: String,
}

impl Names {
    /// The text ends here, and another begins.
    fn cut(&mut self) {
        self.run.clear();
    }

    fn take(&mut self, text: &[u8]) {
        for byte in text {
            if !matches!(byte, b'0'..=b'9' | b'a'..=b'f') {
                self.run.clear();
                continue;
            }
            if self.run.len() == DIGITS {
                // A longer run may hold the name anywhere.
                self.run.remove(0);
            }
            self.run.push(char::from(*byte));
            if self.run.len() == DIGITS {
                self.found.extend(self.run.parse::<Name>());
            }
        }
    }
}

impl Write for Names {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.take(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
