//! Areas: small objects under names of the owner's choosing, each sealed with a hash of its content.

use bytes::Bytes;
use object_store::path::Path as Key;

use crate::objects::Objects;
use crate::sealed::{seal, unseal};
use crate::{Error, Result};

/// The objects below one prefix of a store, kept by one owner.
#[derive(Debug, Clone)]
pub struct ObjectArea {
    objects: Objects,
    prefix: Key,
}

/// What became of a conditional create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Created {
    /// The object is ours, whole and durable.
    Made,
    /// There was one already.
    Taken,
}

/// An object as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    /// Its key below the area's prefix.
    pub key: String,
    /// Its size with the line that guards it, in bytes.
    pub bytes: u64,
    /// When it was last set, by the store's clock, in ms since 1970.
    pub modified_unix_ms: i64,
}

impl ObjectArea {
    pub(crate) fn new(objects: Objects, prefix: &str) -> Self {
        Self {
            objects,
            prefix: Key::from(prefix),
        }
    }

    /// Where its store lies, for people.
    pub fn location(&self) -> &str {
        self.objects.location()
    }

    fn at(&self, key: &str) -> Key {
        Key::from(format!("{}/{key}", self.prefix))
    }

    /// Makes an object where none is, atomically: of any number at once exactly one succeeds. A lost answer
    /// that was repeated underneath can read as [`Created::Taken`] by oneself: put something unique in the
    /// bytes where that matters, and look.
    ///
    /// # Errors
    /// When the store cannot be reached or has no conditional create.
    pub async fn put_if_absent(&self, key: &str, bytes: &[u8]) -> Result<Created> {
        let made = self.objects.create(&self.at(key), seal(bytes)).await?;
        Ok(if made { Created::Made } else { Created::Taken })
    }

    /// Sets an object, whatever was there.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.objects.put(&self.at(key), seal(bytes)).await
    }

    /// The bytes of an object; none when there is none.
    ///
    /// # Errors
    /// When the store cannot be read, or [`Error::DamagedObject`].
    pub async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        let key = self.at(key);
        let Some(sealed) = self.objects.get(&key).await? else {
            return Ok(None);
        };
        let content = unseal(&sealed).ok_or_else(|| Error::DamagedObject {
            key: key.to_string(),
            location: self.objects.location().to_owned(),
        })?;
        Ok(Some(content))
    }

    /// What lies below a prefix (empty for all), by key.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn list(&self, under: &str) -> Result<Vec<StoredObject>> {
        let prefix = if under.is_empty() {
            self.prefix.clone()
        } else {
            self.at(under)
        };
        let mut found: Vec<StoredObject> = self
            .objects
            .list(&prefix)
            .await?
            .into_iter()
            .filter_map(|meta| {
                let key = meta.location.as_ref().strip_prefix(self.prefix.as_ref())?;
                Some(StoredObject {
                    key: key.trim_start_matches('/').to_owned(),
                    bytes: meta.size,
                    modified_unix_ms: meta.last_modified.timestamp_millis(),
                })
            })
            .collect();
        found.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(found)
    }

    /// Removes an object; no error when it is gone already.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn delete(&self, key: &str) -> Result<()> {
        self.objects.delete(&self.at(key)).await
    }
}
