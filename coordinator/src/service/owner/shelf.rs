//! Archives that are asked about. One is read at a time, as it may be as large as a job; the last one stays parsed
//! for a while, as those who page through it come back. Who finds too many before it is refused.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tonic::Status;

use super::archive::status;
use crate::archive::{Archive, Archives};
use crate::scheduler::JobId;
use crate::service::surroundings::Clock;

/// Questions that may wait for each other; each holds a thread.
const SEATS: usize = 16;
/// How long an archive that nobody asks about any more stays parsed.
const KEPT: Duration = Duration::from_secs(15);

/// The archive that was last asked about, and who waits for one.
#[derive(Debug, Default)]
pub struct Shelf {
    taken: AtomicUsize,
    last: Mutex<Option<Last>>,
}

#[derive(Debug)]
struct Last {
    job: JobId,
    archive: Archive,
    asked: Duration,
}

/// The right to ask one question.
#[derive(Debug)]
pub struct Seat(Arc<Shelf>);

impl Shelf {
    /// The right to ask one question.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED, when too many have it.
    pub fn seat(self: &Arc<Self>) -> Result<Seat, Status> {
        let taken = self.taken.fetch_add(1, Ordering::Relaxed);
        let seat = Seat(Arc::clone(self));
        if taken < SEATS {
            return Ok(seat);
        }
        Err(Status::resource_exhausted(format!(
            "{SEATS} questions about archived jobs are being answered already: ask again in a moment"
        )))
    }

    /// Gives the archive that nobody asks about any more: to be let go of beside the loop, as that takes a while too.
    /// Never waits for who reads one.
    pub fn tidy(&self, elapsed: Duration) -> Option<Archive> {
        let mut last = self.last.try_lock().ok()?;
        let old = last.take_if(|last| elapsed.saturating_sub(last.asked) >= KEPT)?;
        Some(old.archive)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Seat {
    /// Asks an archive; reads it first unless it is the last that was read. Not for the loop.
    ///
    /// # Errors
    /// When it cannot be read, or as the question has it.
    pub fn ask<T>(
        self,
        archives: &Archives,
        clock: &dyn Clock,
        job: JobId,
        question: impl FnOnce(&Archive) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let mut last = self.0.last.lock().unwrap_or_else(PoisonError::into_inner);
        let known = last.take().filter(|last| last.job == job);
        let archive = match known {
            Some(known) => known.archive,
            None => archives.read(job).map_err(|error| status(&error))?,
        };
        let answer = question(&archive);
        *last = Some(Last {
            job,
            archive,
            asked: clock.elapsed(),
        });
        answer
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::journal::disk::SystemDisk;
    use crate::scheduler::State;
    use crate::service::surroundings::SystemClock;

    fn archives(directory: &std::path::Path) -> Archives {
        let archives = Archives::new(Arc::new(SystemDisk), directory);
        let archive = Archive {
            state: State::default(),
            attempts: Vec::new(),
            events: Vec::new(),
        };
        archives.write(JobId(1), &archive).unwrap();
        archives
    }

    #[test]
    fn an_archive_that_is_asked_about_again_is_not_read_again_and_is_let_go_of_in_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let archives = archives(directory.path());
        let shelf = Arc::new(Shelf::default());
        let clock = SystemClock::default();
        let ask = || shelf.seat().unwrap().ask(&archives, &clock, JobId(1), |_| Ok(()));
        ask().unwrap();
        std::fs::remove_file(archives.path(JobId(1))).unwrap();
        ask().unwrap();
        assert!(shelf.tidy(clock.elapsed()).is_none());
        ask().unwrap();
        assert!(shelf.tidy(clock.elapsed() + KEPT).is_some());
        assert!(ask().is_err(), "it is still kept though nobody asked");
    }

    #[test]
    fn questions_about_archives_beyond_a_few_are_refused_until_one_is_answered() {
        let shelf = Arc::new(Shelf::default());
        let mut seats: Vec<Seat> = (0..SEATS).map(|_| shelf.seat().unwrap()).collect();
        assert_eq!(shelf.seat().unwrap_err().code(), tonic::Code::ResourceExhausted);
        seats.pop();
        seats.push(shelf.seat().unwrap());
        assert!(shelf.seat().is_err());
    }
}
