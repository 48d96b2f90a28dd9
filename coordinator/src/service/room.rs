//! A start that finds no room, on the journal's disk or in the artifact store: no term can be begun there, so it waits
//! for room, and says so to whoever asks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::serve::Shown;
use crate::journal::{self, disk::Disk};
use crate::{Error, Result};

/// How often a full disk is tried.
const BETWEEN_TRIES: Duration = Duration::from_secs(2);
/// The same where a try is a whole start, which reads a journal or fetches one from the store.
const BETWEEN_STARTS: Duration = Duration::from_secs(60);

/// What a start waits for.
#[derive(Debug)]
pub struct Room {
    disk: Arc<dyn Disk>,
    journal: PathBuf,
    pause: Duration,
    /// What was missing, when it was said last.
    told: Option<String>,
}

impl Room {
    /// For the journal in this directory.
    pub fn new(disk: Arc<dyn Disk>, journal: PathBuf) -> Self {
        Self {
            disk,
            journal,
            pause: BETWEEN_TRIES,
            told: None,
        }
    }

    /// Tries the disk, before a journal is replayed for nothing. One that is not there yet has nothing to be tried in.
    ///
    /// # Errors
    /// When there is no room. What else is wrong the start says better.
    pub async fn check(&self) -> Result<()> {
        let (disk, journal) = (Arc::clone(&self.disk), self.journal.clone());
        let tried = move || match journal.is_dir() {
            true => journal::check_room(disk.as_ref(), &journal),
            false => Ok(()),
        };
        let tried = tokio::task::spawn_blocking(tried).await;
        match tried.map_err(|error| Error::Internal(error.to_string()))? {
            Err(full @ journal::Error::Full { .. }) => Err(full.into()),
            _ => Ok(()),
        }
    }

    /// Notes that a start took more room than was tried: the next costs as much, so it comes later than this one did.
    pub fn start_failed(&mut self) {
        self.pause = (self.pause * 2).min(BETWEEN_STARTS);
    }

    /// Says that there was none, and lets a while pass.
    pub async fn wait(&mut self, shown: &Shown, full: &Error) {
        let reason = format!("the coordinator begins when there is room: {full}");
        if self.told.as_ref() != Some(&reason) {
            tracing::error!("{reason}");
            self.told = Some(reason.clone());
        }
        let is_disk = !matches!(full, Error::StoreFull(_));
        shown.vitals.set_disk_full(is_disk);
        shown.metrics.set_disk_full(is_disk);
        shown.vitals.waits_for_room(Some(reason));
        tokio::time::sleep(self.pause).await;
    }

    /// There is room to begin with: nobody is told otherwise while the journal is read.
    pub fn found(shown: &Shown) {
        shown.vitals.set_disk_full(false);
        shown.metrics.set_disk_full(false);
        shown.vitals.waits_for_room(None);
    }

    /// Says that there was enough, where it was said that there was not.
    pub fn was_enough(&self) {
        if self.told.is_some() {
            tracing::info!("there is room: the coordinator begins");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::journal::disk::SystemDisk;

    #[test]
    fn starts_that_find_too_little_room_come_less_and_less_often() {
        let mut room = Room::new(Arc::new(SystemDisk), PathBuf::new());
        let mut pauses = vec![room.pause];
        for _ in 0..6 {
            room.start_failed();
            pauses.push(room.pause);
        }
        let seconds: Vec<u64> = pauses.iter().map(Duration::as_secs).collect();
        assert_eq!(seconds, [2, 4, 8, 16, 32, 60, 60]);
    }
}
