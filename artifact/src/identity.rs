//! Which store this is: an id that its first coordinator writes once and that everybody else compares.
//!
//! A directory that is not mounted looks like an empty store, and a bucket of the same name on another server
//! like the right one. What is put there is lost to everybody else, so a store is never taken on its name alone.

use std::hash::{BuildHasher, Hasher};
use std::path::Path;

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
            return Ok(id);
        }
        // RandomState is seeded from the system: two processes never agree, nor two machines.
        let random = || std::hash::RandomState::new().build_hasher().finish();
        let id = format!("{:016x}{:016x}", random(), random());
        self.objects.create(&Key::from(KEY), seal(id.as_bytes())).await?;
        // Another may have been quicker.
        self.id().await?.ok_or_else(|| {
            foreign(
                &self.location(),
                "its STORE-ID went away as soon as it was written",
            )
        })
    }

    /// Refuses a store with another id, or with none.
    ///
    /// # Errors
    /// [`Error::Foreign`], or when the store cannot be read.
    pub async fn require(&self, id: &str) -> Result<()> {
        let reason = match self.id().await? {
            Some(found) if found == id => return Ok(()),
            Some(found) => format!("its STORE-ID is {found}, expected {id}"),
            None => format!("it has no STORE-ID, expected {id}"),
        };
        Err(foreign(&self.location(), &reason))
    }
}
