//! Which store this is: an id that its first coordinator writes once and that everybody else compares.
//!
//! A directory that is not mounted looks like an empty store, and a bucket of the same name on another server
//! like the right one. What is put there is lost to everybody else, so a store is never taken on its name alone.

use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use object_store::path::Path as Key;

use crate::sealed::{seal, unseal};
use crate::{ArtifactStore, Error, Result};

/// Where the id lies below the root.
const KEY: &str = "STORE-ID";

pub(crate) fn foreign(location: &str, reason: &str) -> Error {
    Error::Foreign {
        location: location.to_owned(),
        reason: reason.to_owned(),
    }
}

pub(crate) fn away(location: &str, reason: &str) -> Error {
    Error::Away {
        location: location.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Which store a directory was when somebody last looked. Clones are the same.
///
/// A directory that is no longer mounted, or was moved away, would be made anew by the first write to it, and what it
/// does not hold be taken for something that never was.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    /// None of a bucket, which does not go away unnoticed.
    root: Option<PathBuf>,
    id: Arc<Mutex<Option<String>>>,
}

impl Known {
    pub fn at(root: Option<PathBuf>) -> Self {
        Self {
            root,
            id: Arc::default(),
        }
    }

    fn remember(&self, id: &str) {
        let mut known = self.id.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some(id.to_owned());
    }

    /// Sees that the directory is still that store; no error where nobody has looked yet.
    ///
    /// # Errors
    /// [`Error::Away`], [`Error::Foreign`], or when its id cannot be read.
    pub fn check(&self) -> Result<()> {
        let known = self.id.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (Some(root), Some(id)) = (&self.root, known) else {
            return Ok(());
        };
        compare(id_of_directory(root)?, &id, &root.to_string_lossy())
    }
}

fn compare(found: Option<String>, expected: &str, location: &str) -> Result<()> {
    match found {
        Some(found) if found == expected => Ok(()),
        Some(found) => Err(foreign(
            location,
            &format!("its STORE-ID is {found}, expected {expected}"),
        )),
        None => Err(away(
            location,
            &format!("it has no STORE-ID, expected {expected}"),
        )),
    }
}

/// The id of the store that a directory is; none where no coordinator has used it, or there is none.
///
/// # Errors
/// When it cannot be read, or [`Error::DamagedObject`].
pub fn id_of_directory(directory: &Path) -> Result<Option<String>> {
    let path = directory.join(KEY);
    match std::fs::read(&path) {
        Ok(sealed) => id_in(sealed.into(), &directory.to_string_lossy()).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path, source }),
    }
}

fn id_in(sealed: Bytes, location: &str) -> Result<String> {
    let id = unseal(&sealed).and_then(|content| String::from_utf8(content.to_vec()).ok());
    id.ok_or_else(|| Error::DamagedObject {
        key: KEY.to_owned(),
        location: location.to_owned(),
    })
}

impl ArtifactStore {
    /// The store's id; none where no coordinator has used it yet.
    ///
    /// # Errors
    /// When the store cannot be read, or [`Error::DamagedObject`].
    pub async fn id(&self) -> Result<Option<String>> {
        let Some(sealed) = self.objects.get(&Key::from(KEY)).await? else {
            return Ok(None);
        };
        id_in(sealed, &self.location()).map(Some)
    }

    /// The store's id, which is made where there is none. Of any number that make it at once all get the same.
    ///
    /// # Errors
    /// As [`ArtifactStore::id`], and when the store cannot be written.
    pub async fn id_or_new(&self) -> Result<String> {
        if let Some(id) = self.id().await? {
            self.objects.known().remember(&id);
            return Ok(id);
        }
        // RandomState is seeded from the system: two processes never agree, nor two machines.
        let random = || std::hash::RandomState::new().build_hasher().finish();
        let id = format!("{:016x}{:016x}", random(), random());
        self.objects.create(&Key::from(KEY), seal(id.as_bytes())).await?;
        // Another may have been quicker.
        let id = self.id().await?.ok_or_else(|| {
            away(
                &self.location(),
                "its STORE-ID went away as soon as it was written",
            )
        })?;
        self.objects.known().remember(&id);
        Ok(id)
    }

    /// Refuses a store with another id, or with none. From here on every write, and whatever is not found, sees first
    /// that it is still that one.
    ///
    /// # Errors
    /// [`Error::Foreign`] of another store, [`Error::Away`] of none, or when the store cannot be read.
    pub async fn require(&self, id: &str) -> Result<()> {
        compare(self.id().await?, id, &self.location())?;
        self.objects.known().remember(id);
        Ok(())
    }
}
