//! The store for threads that run no event loop: device children and their executors.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use tokio::runtime::{Builder, Runtime};

use crate::{ArtifactStore, Error, Name, Result};

/// An [`ArtifactStore`] whose calls block. Must not be used from within an event loop.
#[derive(Debug)]
pub struct BlockingStore {
    store: ArtifactStore,
    runtime: Runtime,
}

impl BlockingStore {
    /// As [`ArtifactStore::open`].
    ///
    /// # Errors
    /// As [`ArtifactStore::open`], or when no runtime can be made.
    pub fn open(location: &str) -> Result<Self> {
        Self::over(ArtifactStore::open(location)?)
    }

    /// As [`ArtifactStore::open_existing`].
    ///
    /// # Errors
    /// As [`ArtifactStore::open_existing`], or when no runtime can be made.
    pub fn open_existing(location: &str) -> Result<Self> {
        Self::over(ArtifactStore::open_existing(location)?)
    }

    /// As [`ArtifactStore::require`].
    ///
    /// # Errors
    /// As [`ArtifactStore::require`].
    pub fn require(&self, id: &str) -> Result<()> {
        self.runtime.block_on(self.store.require(id))
    }

    /// The same over a store that is open already.
    ///
    /// # Errors
    /// When no runtime can be made.
    pub fn over(store: ArtifactStore) -> Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::Interrupted {
                reason: error.to_string(),
            })?;
        Ok(Self { store, runtime })
    }

    /// As [`ArtifactStore::telling_of_waits`].
    #[must_use]
    pub fn telling_of_waits(self, tell: impl Fn() + Send + Sync + 'static) -> Self {
        let store = self.store.telling_of_waits(tell);
        Self { store, ..self }
    }

    /// The same store, for another thread.
    ///
    /// # Errors
    /// When no runtime can be made.
    pub fn again(&self) -> Result<Self> {
        Self::over(self.store.clone())
    }

    /// As [`ArtifactStore::location`].
    pub fn location(&self) -> String {
        self.store.location()
    }

    /// As [`ArtifactStore::check`].
    ///
    /// # Errors
    /// As [`ArtifactStore::check`].
    pub fn check(&self) -> Result<()> {
        self.runtime.block_on(self.store.check())
    }

    /// As [`ArtifactStore::scratch_path`].
    ///
    /// # Errors
    /// As [`ArtifactStore::scratch_path`].
    pub fn scratch_path(&self) -> Result<PathBuf> {
        self.store.scratch_path()
    }

    /// As [`ArtifactStore::put_bytes`].
    ///
    /// # Errors
    /// As [`ArtifactStore::put_bytes`].
    pub fn put_bytes(&self, bytes: impl Into<Bytes>) -> Result<Name> {
        self.runtime.block_on(self.store.put_bytes(bytes))
    }

    /// As [`ArtifactStore::put_file`].
    ///
    /// # Errors
    /// As [`ArtifactStore::put_file`].
    pub fn put_file(&self, path: &Path) -> Result<Name> {
        self.runtime.block_on(self.store.put_file(path))
    }

    /// As [`ArtifactStore::get_bytes`].
    ///
    /// # Errors
    /// As [`ArtifactStore::get_bytes`].
    pub fn get_bytes(&self, name: &str) -> Result<Bytes> {
        self.runtime.block_on(self.store.get_bytes(name))
    }

    /// As [`ArtifactStore::get_file`].
    ///
    /// # Errors
    /// As [`ArtifactStore::get_file`].
    pub fn get_file(&self, name: &str) -> Result<PathBuf> {
        self.runtime.block_on(self.store.get_file(name))
    }

    /// As [`ArtifactStore::remove`].
    ///
    /// # Errors
    /// As [`ArtifactStore::remove`].
    pub fn remove(&self, name: &str) -> Result<()> {
        self.runtime.block_on(self.store.remove(name))
    }

    /// As [`ArtifactStore::set_record`].
    ///
    /// # Errors
    /// As [`ArtifactStore::set_record`].
    pub fn set_record(&self, about: &Name, attempt: u64, bytes: &[u8]) -> Result<()> {
        self.runtime
            .block_on(self.store.set_record(about, attempt, bytes))
    }

    /// As [`ArtifactStore::records`].
    ///
    /// # Errors
    /// As [`ArtifactStore::records`].
    pub fn records(&self, about: &Name) -> Result<Vec<(u64, Bytes)>> {
        self.runtime.block_on(self.store.records(about))
    }

    /// As [`ArtifactStore::remove_record`].
    ///
    /// # Errors
    /// As [`ArtifactStore::remove_record`].
    pub fn remove_record(&self, about: &Name, attempt: u64) -> Result<()> {
        self.runtime.block_on(self.store.remove_record(about, attempt))
    }
}
