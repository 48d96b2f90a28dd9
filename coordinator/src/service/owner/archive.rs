//! Jobs that have left the state, or are about to: their archives are written and read beside the loop.
//!
//! A job that ended stays in the state for a while, so that it can be looked at and retried; once there are
//! many, the oldest goes. Its archive is durable before the journal says that it is archived.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use espalier_proto::v1;
use tonic::Status;

use super::request::{Reply, TaskListing};
use super::{Owner, Request, query};
use crate::archive::{self, Archive, Archives};
use crate::scheduler::{Command, Job, JobId, TaskId};
use crate::service::view;
use crate::tables::{self, AttemptRow, EventRow};

/// Ended jobs that stay in the state.
const KEPT_JOBS: usize = 16;
/// Tasks of ended jobs that stay in the state.
const KEPT_TASKS: usize = 10_000;
/// How long after an archive could not be written it is tried again.
const PAUSE: Duration = Duration::from_secs(30);
/// Events of an archived job that are shown at the most.
const EVENTS_SHOWN: usize = 1024;
/// Attempts of an archived task that are shown at the most.
const ATTEMPTS_SHOWN: usize = 32;

/// The archive that is being written.
#[derive(Debug, Default)]
pub(super) struct Archiving {
    job: Option<JobId>,
    rests_until: Duration,
}

impl Owner {
    /// Has the archive of the oldest ended job written, when there are too many. One at a time.
    pub(super) fn archive(&mut self) {
        let rests = self.surroundings.clock.elapsed() < self.archiving.rests_until;
        if self.archiving.job.is_some() || rests || self.full_until.is_some() {
            return;
        }
        let Some(job) = self.one_too_many() else {
            return;
        };
        let Some(archive) = Archive::of(&self.state, job) else {
            return;
        };
        self.archiving.job = Some(job);
        let (archives, tables) = (self.archives(), self.surroundings.tables.clone());
        self.surroundings.beside.spawn(Box::new(move || {
            let written = archives.write(job, &archive.with(&tables, job));
            Request::Archived {
                job,
                written: written.map_err(|error| error.to_string()),
            }
        }));
    }

    pub(super) fn archived(&mut self, job: JobId, written: Result<(), String>) {
        self.archiving.job = None;
        match written {
            Ok(()) => self.note(Command::Archived { job }),
            Err(error) => {
                tracing::warn!(%job, %error, "the job stays where it is");
                self.archiving.rests_until = self.surroundings.clock.elapsed().saturating_add(PAUSE);
            }
        }
    }

    fn one_too_many(&self) -> Option<JobId> {
        let tasks = |job: &Job| job.stages.iter().map(|stage| stage.tasks.len()).sum::<usize>();
        let (mut jobs, mut all) = (0_usize, 0_usize);
        for ended in self.state.archivable() {
            jobs = jobs.saturating_add(1);
            all = all.saturating_add(tasks(ended));
        }
        let oldest = self.state.archivable().next()?;
        (jobs > KEPT_JOBS || all > KEPT_TASKS).then_some(oldest.id)
    }

    fn archives(&self) -> Archives {
        let disk = std::sync::Arc::clone(&self.surroundings.disk);
        Archives::new(disk, &self.options.data_dir)
    }

    /// Whether a job has left the state.
    pub(super) fn is_archived(&self, job: JobId) -> bool {
        self.state.job(job).is_none() && self.state.summary(job).is_some()
    }

    /// Answers a question about an archived job, beside the loop.
    pub(super) fn ask_archive<T: Send + 'static>(
        &self,
        job: JobId,
        reply: Reply<T>,
        question: impl FnOnce(&Archive) -> Result<T, Status> + Send + 'static,
    ) {
        let archives = self.archives();
        self.surroundings.beside.spawn(Box::new(move || {
            let answer = archives.read(job).map_err(|error| status(&error));
            // Whoever asked may be gone.
            let _ = reply.send(answer.and_then(|archive| question(&archive)));
            Request::Answered
        }));
    }

    /// Answers for a task that the state does not know: it may be an archived job's.
    pub(super) fn ask_archived_task(&self, task: TaskId, reply: Reply<v1::TaskDetail>) {
        let (archives, tables) = (self.archives(), self.surroundings.tables.clone());
        self.surroundings.beside.spawn(Box::new(move || {
            let _ = reply.send(find_task(&archives, &tables, task));
            Request::Answered
        }));
    }
}

fn find_task(archives: &Archives, tables: &tables::Tables, task: TaskId) -> Result<v1::TaskDetail, Status> {
    let missing = || Status::not_found(format!("there is no task {task}"));
    let job = tables
        .archived_job_of(task)
        .map_err(|error| Status::unavailable(format!("task {task} is not of a live job, and {error}")))?
        .ok_or_else(missing)?;
    let archive = archives.read(job).map_err(|error| status(&error))?;
    let known = archive.state.task(task).ok_or_else(missing)?;
    let mut detail = view::detail(&archive.state, known, false);
    known.payload.as_str().clone_into(&mut detail.spec_json);
    view::output(known)
        .unwrap_or_default()
        .clone_into(&mut detail.output_json);
    let of_task: Vec<&AttemptRow> = archive.attempts.iter().filter(|row| row.task == task).collect();
    let older = of_task.len().saturating_sub(ATTEMPTS_SHOWN);
    detail.attempts = of_task.into_iter().skip(older).map(attempt).collect();
    Ok(detail)
}

/// An archived job whole.
pub(super) fn job(archive: &Archive, job: JobId, revision: u64) -> Result<v1::Job, Status> {
    let (progress, troubled) = (BTreeMap::new(), BTreeSet::new());
    let (absent, resting) = (BTreeSet::new(), BTreeSet::new());
    let beside = view::Beside {
        progress: &progress,
        troubled: &troubled,
        absent: &absent,
        resting: &resting,
        now: 0,
    };
    let known = archive.state.job(job).ok_or_else(|| missing(job))?;
    Ok(view::job(&archive.state, known, revision, beside))
}

/// Tasks of an archived job.
pub(super) fn tasks(
    archive: &Archive,
    listing: &TaskListing,
) -> Result<(Vec<v1::TaskDetail>, Option<TaskId>), Status> {
    query::page(&archive.state, &|_| false, listing)
}

/// What happened to an archived job, with its numbers.
pub(super) fn events(archive: &Archive, after: u64) -> Vec<(u64, v1::JobEvent)> {
    let older = archive.events.len().saturating_sub(EVENTS_SHOWN);
    let mut lagged = older > 0;
    let newest = (1_u64..).zip(&archive.events).skip(older);
    newest
        .filter(|(number, _)| *number > after)
        .map(|(number, row)| (number, event(row, std::mem::take(&mut lagged))))
        .collect()
}

fn event(row: &EventRow, lagged: bool) -> v1::JobEvent {
    v1::JobEvent {
        unix_ms: row.unix_ms,
        kind: row.kind.clone(),
        task: row.task,
        attempt: row.attempt,
        worker: row.worker.clone(),
        message: row.message.clone(),
        lagged,
    }
}

fn attempt(row: &AttemptRow) -> v1::AttemptDetail {
    v1::AttemptDetail {
        id: row.attempt.0,
        worker: row.worker.clone(),
        device: row.device.clone(),
        started_unix_ms: row.started_unix_ms,
        ended_unix_ms: row.ended_unix_ms.unwrap_or(0),
        outcome: row.outcome.name().to_owned(),
        message: row.message.clone(),
        progress: String::new(),
    }
}

fn missing(job: JobId) -> Status {
    Status::not_found(format!("there is no {job}"))
}

fn status(error: &archive::Error) -> Status {
    let text = error.to_string();
    match error {
        archive::Error::Missing { .. } => Status::not_found(text),
        archive::Error::Damaged { .. } => Status::data_loss(text),
        archive::Error::Io { .. } | archive::Error::TooNew { .. } => Status::internal(text),
    }
}
