//! Ended jobs, each whole in one sealed file: what is left to look at once its tasks have left the state.
//!
//! An archive is durable before the journal says that the job is archived, and is never written again. One
//! that is damaged is an error of whoever asks for it; nothing else depends on it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::journal::disk::Disk;
use crate::journal::{Fault, Seal};
use crate::scheduler::{JobId, State};
use crate::tables::{AttemptRow, EventRow, Place, Tables};

const SEAL: Seal = Seal {
    magic: *b"ESPARCH\0",
    version: 1,
};

/// Events that an archive holds at the most.
const EVENTS_LIMIT: usize = 1_000_000;

/// An ended job: a state that knows nothing but it, and how each of its attempts went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Archive {
    /// The job, its stages and its tasks with their payloads and outputs.
    pub state: State,
    /// As far as the tables knew them when the job was archived, by task.
    pub attempts: Vec<AttemptRow>,
    /// What else happened to it, as far as the tables knew, the oldest first: see [`Archive::story`].
    pub events: Vec<EventRow>,
}

impl Archive {
    /// A job of this state, with what the tables know of it; none when the state does not know the job.
    pub fn of(state: &State, job: JobId) -> Option<Self> {
        Some(Self {
            state: state.alone(job)?,
            attempts: Vec::new(),
            events: Vec::new(),
        })
    }

    /// Adds how its attempts went and what happened, and says so when the tables cannot tell. Reads the disk: not
    /// for the loop.
    #[must_use]
    pub fn with(mut self, tables: &Tables, job: JobId) -> Self {
        let attempts = tables.attempts_of_job(job);
        let told = attempts.and_then(|attempts| Ok((attempts, tables.events(job, EVENTS_LIMIT)?)));
        match told {
            Ok((attempts, events)) => (self.attempts, self.events) = (attempts, events),
            Err(error) => tracing::warn!(%job, %error, "its archive has neither attempts nor events"),
        }
        self
    }

    /// What happened to the job, the oldest first.
    pub fn story(&self) -> Vec<(Place, Moment<'_>)> {
        let told = self.events.iter().map(|row| {
            let (frame, index) = (row.frame, row.index);
            (Place { frame, index }, Moment::Told(row))
        });
        let mut story: Vec<(Place, Moment<'_>)> = told.collect();
        for row in &self.attempts {
            story.extend(row.started_in.map(|place| (place, Moment::Started(row))));
            story.extend(row.completed_in.map(|place| (place, Moment::Completed(row))));
        }
        story.sort_by_key(|(place, _)| *place);
        story
    }
}

/// Something that happened to a job, as its archive holds it.
#[derive(Debug, Clone, Copy)]
pub enum Moment<'a> {
    /// What has a row of its own.
    Told(&'a EventRow),
    /// An attempt started.
    Started(&'a AttemptRow),
    /// An attempt was completed.
    Completed(&'a AttemptRow),
}

/// What can go wrong with an archive.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading or writing failed.
    #[error("cannot {action} archive {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It is not there.
    #[error("there is no archive of {job}: {} is missing", path.display())]
    Missing {
        /// Whose.
        job: JobId,
        /// Where it would be.
        path: PathBuf,
    },
    /// It is not what was written.
    #[error("archive {} is damaged ({what}): restore the file from the artifact store or a backup", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Written by a newer build.
    #[error("archive {} has schema version {found}, this build knows up to {known}: start the newer build", path.display())]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest this build reads.
        known: u32,
    },
}

/// The archives of a data directory. Cheap to copy; its calls block on the disk.
#[derive(Debug, Clone)]
pub struct Archives {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
}

impl Archives {
    /// Those of this data directory.
    pub fn new(disk: Arc<dyn Disk>, data_dir: &Path) -> Self {
        Self {
            disk,
            directory: data_dir.join("archive"),
        }
    }

    /// Where the archive of a job lies.
    pub fn path(&self, job: JobId) -> PathBuf {
        self.directory.join(format!("{job}.archive"))
    }

    /// Writes the archive of a job, durable when this returns.
    ///
    /// # Errors
    /// When it cannot be written; then the job must not be called archived.
    pub fn write(&self, job: JobId, archive: &Archive) -> Result<(), Error> {
        let path = self.path(job);
        let io_error = |action| {
            let path = path.clone();
            move |source| Error::Io { action, path, source }
        };
        let (bytes, _) = SEAL.close(job.0, archive).map_err(io_error("encode"))?;
        self.disk
            .create_directory(&self.directory)
            .map_err(io_error("make room for"))?;
        if let Some(data_dir) = self.directory.parent().filter(|above| *above != Path::new("")) {
            self.disk
                .sync_directory(data_dir)
                .map_err(io_error("make room for"))?;
        }
        self.disk.write_whole(&path, &bytes).map_err(io_error("write"))
    }

    /// Puts the bytes of a sound archive in place of one that is damaged or missing.
    ///
    /// # Errors
    /// When they are damaged themselves, or cannot be written.
    pub fn replace(&self, job: JobId, bytes: &[u8]) -> Result<(), Error> {
        let path = self.path(job);
        self.check(job, bytes)?;
        self.disk.write_whole(&path, bytes).map_err(|source| Error::Io {
            action: "replace",
            path,
            source,
        })
    }

    /// Reads the archive of a job.
    ///
    /// # Errors
    /// When it is missing, damaged or too new.
    pub fn read(&self, job: JobId) -> Result<Archive, Error> {
        serde_json::from_slice(&self.json(job)?).map_err(|error| Error::Damaged {
            path: self.path(job),
            what: format!("the job does not parse: {error}"),
        })
    }

    /// The JSON of a job's archive as it was written, for whoever looks for words in it.
    ///
    /// # Errors
    /// When it is missing, damaged or too new.
    pub fn json(&self, job: JobId) -> Result<Vec<u8>, Error> {
        let path = self.path(job);
        let bytes = match self.disk.read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::Missing { job, path });
            }
            Err(source) => {
                return Err(Error::Io {
                    action: "read",
                    path,
                    source,
                });
            }
        };
        self.open(job, &bytes)
    }

    fn open(&self, job: JobId, bytes: &[u8]) -> Result<Vec<u8>, Error> {
        SEAL.open(job.0, bytes).map_err(|fault| self.unusable(job, fault))
    }

    /// Whether these are the bytes of a sound archive of this job.
    ///
    /// # Errors
    /// When they are damaged or too new.
    pub fn check(&self, job: JobId, bytes: &[u8]) -> Result<(), Error> {
        let checked = SEAL.check(job.0, bytes);
        checked.map(drop).map_err(|fault| self.unusable(job, fault))
    }

    fn unusable(&self, job: JobId, fault: Fault) -> Error {
        let path = self.path(job);
        match fault {
            Fault::Damaged(what) => Error::Damaged {
                path,
                what: what.to_owned(),
            },
            Fault::TooNew(found) => Error::TooNew {
                path,
                found,
                known: SEAL.version,
            },
        }
    }

    /// Gives the archives of jobs after `last` other names, and says how many: a journal that knows no such jobs has lost
    /// its end, and gives their numbers to others, whose archives must not take the place of these.
    ///
    /// # Errors
    /// When one cannot be renamed.
    pub fn set_aside_after(&self, last: JobId, unix_ms: i64) -> Result<usize, Error> {
        let unknown: Vec<JobId> = self.jobs()?.into_iter().filter(|job| *job > last).collect();
        for job in &unknown {
            let path = self.path(*job);
            let aside = path.with_extension(format!("archive.unknown-{unix_ms}"));
            self.disk.rename(&path, &aside).map_err(|source| Error::Io {
                action: "rename",
                path,
                source,
            })?;
        }
        if !unknown.is_empty() {
            // Durable before another job gets such a number.
            let path = self.directory.clone();
            let synced = self.disk.sync_directory(&path);
            synced.map_err(|source| Error::Io {
                action: "rename in",
                path,
                source,
            })?;
        }
        Ok(unknown.len())
    }

    /// Jobs that have an archive, the oldest first.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn jobs(&self) -> Result<Vec<JobId>, Error> {
        let paths = match self.disk.list(&self.directory) {
            Ok(paths) => paths,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => {
                return Err(Error::Io {
                    action: "list",
                    path: self.directory.clone(),
                    source,
                });
            }
        };
        let job = |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".archive")?.parse().ok();
        let mut jobs: Vec<JobId> = paths.iter().filter_map(job).collect();
        jobs.sort();
        Ok(jobs)
    }
}
