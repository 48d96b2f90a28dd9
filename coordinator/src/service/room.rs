//! A start on a full disk: no term can be begun there, so it waits for room, and says so to whoever asks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::serve::Shown;
use crate::journal::{self, disk::Disk};
use crate::{Error, Result};

/// How often a full disk is tried.
const BETWEEN_TRIES: Duration = Duration::from_secs(2);

/// What a start waits for.
#[derive(Debug)]
pub struct Room {
    disk: Arc<dyn Disk>,
    journal: PathBuf,
    told: bool,
}

impl Room {
    /// For the journal in this directory.
    pub fn new(disk: Arc<dyn Disk>, journal: PathBuf) -> Self {
        let told = false;
        Self { disk, journal, told }
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

    /// Says that there was none, and lets a while pass.
    pub async fn wait(&mut self, shown: &Shown, full: &Error) {
        if !self.told {
            tracing::error!(error = %full, "the coordinator begins when there is room");
            self.told = true;
        }
        let reason = format!("the coordinator begins when there is room: {full}");
        shown.vitals.waits_for_room(Some(reason));
        shown.metrics.set_disk_full(true);
        tokio::time::sleep(BETWEEN_TRIES).await;
    }

    /// Says that there was enough.
    pub fn found(&self, shown: &Shown) {
        shown.vitals.waits_for_room(None);
        shown.metrics.set_disk_full(false);
        if self.told {
            tracing::info!("there is room: the coordinator begins");
        }
    }
}
