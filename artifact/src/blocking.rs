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
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::Interrupted {
                reason: error.to_string(),
            })?;
        Ok(Self {
            store: ArtifactStore::open(location)?,
            runtime,
        })
    }

    /// As [`ArtifactStore::location`].
    pub fn location(&self) -> String {
        self.store.location()
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
    pub fn set_record(&self, about: &Name, bytes: impl Into<Bytes>) -> Result<()> {
        self.runtime.block_on(self.store.set_record(about, bytes))
    }

    /// As [`ArtifactStore::record`].
    ///
    /// # Errors
    /// As [`ArtifactStore::record`].
    pub fn record(&self, about: &Name) -> Result<Option<Bytes>> {
        self.runtime.block_on(self.store.record(about))
    }
}
