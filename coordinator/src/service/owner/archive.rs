//! Jobs that have left the state, or are about to: their archives are written and read beside the loop.
//!
//! A job that ended stays in the state for a while, so that it can be looked at; once there are many, or they are
//! large, the oldest goes. One that failed can be retried as long as it stays, so those are only counted, and apart.
//! An archive waits for the tables, which know how attempts went but follow at their own pace, unless ended tasks
//! crowd the state meanwhile; and it is durable before the journal says that the job is archived.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use espalier_proto::v1;
use tonic::Status;

use super::request::{Reply, TaskListing};
use super::shelf::{Seat, Shelf};
use super::{Owner, Request, query};
use crate::archive::{self, Archive, Archives, Moment};
use crate::scheduler::{Command, Job, JobId, JobPhase, TaskId};
use crate::service::surroundings::Clock;
use crate::service::{history, view};
use crate::tables::{self, AttemptRow};
use crate::{Error, Result};

/// Jobs that succeeded or were cancelled and stay in the state.
const KEPT_JOBS: usize = 16;
/// Tasks of those.
const KEPT_TASKS: usize = 10_000;
/// Tasks of those with which memory matters more than what only the tables know of attempts.
const CROWD: usize = 2 * KEPT_TASKS;
/// Failed jobs that stay in the state, however large.
const KEPT_FAILED: usize = 16;
/// How long tables that stand still are waited for.
const TABLES_PATIENCE: Duration = Duration::from_secs(10 * 60);
/// How long after an archive could not be written it is tried again.
const PAUSE: Duration = Duration::from_secs(30);
/// Events of an archived job that are shown at the most.
const EVENTS_SHOWN: usize = 1024;

/// The archive that is being written, and those that are read.
#[derive(Debug, Default)]
pub(super) struct Archiving {
    /// The job, and its results when it was taken: a retry adds one.
    job: Option<(JobId, u64)>,
    rests_until: Duration,
    /// The job that waits for the tables, its results, and the frame they have to come to.
    waits: Option<(JobId, u64, u64)>,
    /// The frame they had come to, and since when.
    reflected: (u64, Duration),
    pub(super) shelf: Arc<Shelf>,
}

impl Owner {
    /// Has the archive of the oldest ended job written, when there are too many. One at a time, and only when the
    /// state is durable.
    pub(super) fn archive(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        if let Some(old) = self.archiving.shelf.tidy(elapsed) {
            self.surroundings.beside.spawn(Box::new(move || {
                drop(old);
                Request::Answered
            }));
        }
        let rests = elapsed < self.archiving.rests_until;
        if self.archiving.job.is_some() || rests || self.full_until.is_some() {
            return;
        }
        let Some((job, results)) = self.one_too_many().map(|job| (job.id, job.results)) else {
            return;
        };
        if !self.is_crowded() && !self.waited_for_tables(job, results) {
            return;
        }
        let Some(archive) = Archive::of(&self.state, job) else {
            return;
        };
        self.archiving.job = Some((job, results));
        let (archives, tables) = (self.archives(), self.surroundings.tables.clone());
        self.surroundings.beside.spawn(Box::new(move || {
            let written = archives.write(job, &archive.with(&tables, job));
            Request::Archived {
                job,
                written: written.map_err(|error| error.to_string()),
            }
        }));
    }

    /// Whether jobs end faster than the tables follow. One that is large by itself is waited for.
    fn is_crowded(&self) -> bool {
        let (jobs, tasks) = self.ended_well();
        jobs > 1 && tasks > CROWD
    }

    /// Jobs in the state that succeeded or were cancelled, and their tasks.
    fn ended_well(&self) -> (usize, usize) {
        let (mut jobs, mut tasks) = (0_usize, 0_usize);
        for job in self.state.archivable().filter(|job| !has_failed(job)) {
            jobs = jobs.saturating_add(1);
            tasks = tasks.saturating_add(job.stages.iter().map(|stage| stage.tasks.len()).sum());
        }
        (jobs, tasks)
    }

    /// Whether the tables know the job to its end, or are not waited for any longer.
    fn waited_for_tables(&mut self, job: JobId, results: u64) -> bool {
        let elapsed = self.surroundings.clock.elapsed();
        let (reflects, last) = (self.surroundings.tables.reflects(), self.journal.last());
        let archiving = &mut self.archiving;
        if archiving.reflected.0 != reflects {
            archiving.reflected = (reflects, elapsed);
        }
        // One that was retried meanwhile has ended again, later.
        let known = archiving
            .waits
            .filter(|(waiting, at, _)| *waiting == job && *at == results);
        let (_, _, end) = *archiving.waits.insert(known.unwrap_or((job, results, last)));
        if reflects >= end {
            return true;
        }
        let stood = elapsed.saturating_sub(archiving.reflected.1);
        if stood < TABLES_PATIENCE {
            return false;
        }
        tracing::warn!(
            %job, reflects, end, stood_s = stood.as_secs(),
            "the tables do not come on: the job is archived without what only they know of its attempts"
        );
        true
    }

    pub(super) fn archived(&mut self, job: JobId, written: Result<(), String>) {
        let taken = self.archiving.job.take();
        let results = self.state.job(job).map(|job| job.results);
        let is_it = taken.is_some_and(|(taken, at)| taken == job && results == Some(at));
        match written {
            // One that was retried meanwhile is written again when it has ended again.
            Ok(()) if !is_it => {}
            Ok(()) => self.note(Command::Archived { job }),
            Err(error) => {
                tracing::warn!(%job, %error, "the job stays where it is");
                self.archiving.rests_until = self.surroundings.clock.elapsed().saturating_add(PAUSE);
            }
        }
    }

    fn one_too_many(&self) -> Option<&Job> {
        let (jobs, tasks) = self.ended_well();
        if jobs > KEPT_JOBS || tasks > KEPT_TASKS {
            return self.state.archivable().find(|job| !has_failed(job));
        }
        let mut failed = self.state.archivable().filter(|job| has_failed(job));
        let oldest = failed.next()?;
        (failed.count() >= KEPT_FAILED).then_some(oldest)
    }

    /// Keeps archives of jobs that the journal does not know from those that get their numbers.
    pub(super) fn keep_unknown_archives(&self) -> Result<()> {
        let (last, now) = (self.state.last_job(), self.now().unix_ms);
        let kept = self.archives().set_aside_after(last, now);
        let kept = kept.map_err(|error| Error::Internal(error.to_string()))?;
        if kept > 0 {
            let archives = self.options.data_dir.join("archive");
            tracing::error!(
                kept, last_job = %last, archives = %archives.display(),
                "the journal has lost its end: there are archives of jobs that it does not know. They are kept \
                 as *.unknown-{now}; what else was told after {last} is gone"
            );
        }
        Ok(())
    }

    fn archives(&self) -> Archives {
        let disk = Arc::clone(&self.surroundings.disk);
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
        let seat = match self.archiving.shelf.seat() {
            Ok(seat) => seat,
            Err(status) => {
                // Whoever asked may be gone.
                let _ = reply.send(Err(status));
                return;
            }
        };
        let (archives, clock) = (self.archives(), Arc::clone(&self.surroundings.clock));
        self.surroundings.beside.spawn(Box::new(move || {
            if !reply.is_closed() {
                let _ = reply.send(seat.ask(&archives, clock.as_ref(), job, question));
            }
            Request::Answered
        }));
    }

    /// Answers for a task that the state does not know: it may be an archived job's.
    pub(super) fn ask_archived_task(&self, task: TaskId, reply: Reply<v1::TaskDetail>) {
        let seat = match self.archiving.shelf.seat() {
            Ok(seat) => seat,
            Err(status) => {
                let _ = reply.send(Err(status));
                return;
            }
        };
        let (archives, tables) = (self.archives(), self.surroundings.tables.clone());
        let clock = Arc::clone(&self.surroundings.clock);
        self.surroundings.beside.spawn(Box::new(move || {
            if !reply.is_closed() {
                let _ = reply.send(find_task(seat, &archives, &tables, clock.as_ref(), task));
            }
            Request::Answered
        }));
    }
}

fn find_task(
    seat: Seat,
    archives: &Archives,
    tables: &tables::Tables,
    clock: &dyn Clock,
    task: TaskId,
) -> Result<v1::TaskDetail, Status> {
    let missing = || Status::not_found(format!("there is no task {task}"));
    let job = tables
        .archived_job_of(task)
        .map_err(|error| Status::unavailable(format!("task {task} is not of a live job, and {error}")))?
        .ok_or_else(missing)?;
    seat.ask(archives, clock, job, |archive| {
        let known = archive.state.task(task).ok_or_else(missing)?;
        let mut detail = view::detail(&archive.state, known, false);
        known.payload.as_str().clone_into(&mut detail.spec_json);
        view::output(known)
            .unwrap_or_default()
            .clone_into(&mut detail.output_json);
        let done = view::done(known);
        let rows: Vec<&AttemptRow> = archive.attempts.iter().filter(|row| row.task == task).collect();
        detail.attempts = view::merged(done, &rows);
        Ok(detail)
    })
}

fn has_failed(job: &Job) -> bool {
    matches!(job.phase, JobPhase::Failed { .. })
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
    let story = archive.story();
    let older = story.len().saturating_sub(EVENTS_SHOWN);
    let numbered = story.iter().scan(0, |last, (place, moment)| {
        *last = history::number(place.frame, *last);
        Some((*last, *moment))
    });
    let numbered: Vec<(u64, Moment<'_>)> = numbered.collect();
    let (left_out, newest) = numbered.split_at(older);
    let mut lagged = left_out.last().is_some_and(|(number, _)| *number > after);
    newest
        .iter()
        .filter(|(number, _)| *number > after)
        .map(|(number, moment)| (*number, event(*moment, std::mem::take(&mut lagged))))
        .collect()
}

fn event(moment: Moment<'_>, lagged: bool) -> v1::JobEvent {
    let of_attempt = |row: &AttemptRow, kind: &str, unix_ms| v1::JobEvent {
        unix_ms,
        kind: kind.to_owned(),
        task: row.task.0,
        attempt: row.attempt.0,
        worker: row.worker.clone(),
        lagged,
        ..v1::JobEvent::default()
    };
    match moment {
        Moment::Started(row) => of_attempt(row, "attempt_started", row.started_unix_ms),
        Moment::Completed(row) => {
            let ended = row.ended_unix_ms.unwrap_or(0);
            of_attempt(row, "attempt_completed", ended)
        }
        Moment::Told(row) => v1::JobEvent {
            unix_ms: row.unix_ms,
            kind: row.kind.clone(),
            task: row.task,
            attempt: row.attempt,
            worker: row.worker.clone(),
            message: row.message.clone(),
            lagged,
            ..v1::JobEvent::default()
        },
    }
}

fn missing(job: JobId) -> Status {
    Status::not_found(format!("there is no {job}"))
}

/// An archive's error as whoever asked sees it.
pub(super) fn status(error: &archive::Error) -> Status {
    let text = error.to_string();
    match error {
        archive::Error::Missing { .. } => Status::not_found(text),
        archive::Error::Damaged { .. } => Status::data_loss(text),
        archive::Error::Io { .. } | archive::Error::TooNew { .. } => Status::internal(text),
    }
}
