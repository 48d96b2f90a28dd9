//! Every call to the object store goes through here: each has a deadline, and an error that names the object.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path as Key;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions};

use crate::identity::Known;
use crate::store::off_the_loop;
use crate::{Error, Result};

/// A call with a small body, retries included.
const SMALL_DEADLINE: Duration = Duration::from_secs(90);
/// One part of a large transfer, retries included.
pub const PART_DEADLINE: Duration = Duration::from_secs(180);
/// A first look at a store, retries included.
const FIRST_DEADLINE: Duration = Duration::from_secs(20);
/// Larger objects travel in parts of this size.
pub const PART_BYTES: u64 = 16 << 20;
/// Parts that travel at once.
pub const PARTS_AT_ONCE: usize = 4;

/// The objects below a store's root.
#[derive(Clone)]
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    location: Arc<str>,
    remedy: &'static str,
    known: Known,
}

impl fmt::Debug for Objects {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Objects").field(&self.location).finish()
    }
}

impl Objects {
    pub fn new(store: Arc<dyn ObjectStore>, location: &str, remedy: &'static str, known: Known) -> Self {
        Self {
            store,
            location: location.into(),
            remedy,
            known,
        }
    }

    pub fn location(&self) -> &str {
        &self.location
    }

    pub fn inner(&self) -> &dyn ObjectStore {
        &*self.store
    }

    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Sees that the store is still the one it was, where that is known: before anything is written, and where
    /// something is not found.
    pub async fn stands(&self, key: &Key) -> Result<()> {
        let known = self.known.clone();
        let look = off_the_loop(move || known.check());
        tokio::time::timeout(SMALL_DEADLINE, look)
            .await
            .unwrap_or_else(|_| Err(self.late(key, SMALL_DEADLINE)))
    }

    fn late(&self, key: &Key, deadline: Duration) -> Error {
        Error::Late {
            key: key.to_string(),
            location: self.location.to_string(),
            deadline,
        }
    }

    /// Waits for a call, but not for ever.
    pub async fn within<T>(
        &self,
        key: &Key,
        deadline: Duration,
        call: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        match tokio::time::timeout(deadline, call).await {
            Ok(answer) => answer.map_err(|source| self.error(key, source)),
            Err(_) => Err(self.late(key, deadline)),
        }
    }

    fn error(&self, key: &Key, source: object_store::Error) -> Error {
        let access = |reason: String, remedy: &str| Error::Access {
            location: self.location.to_string(),
            reason,
            remedy: remedy.to_owned(),
        };
        let text = source.to_string();
        // Listings give no kind of error, only the answer's text.
        let denied = matches!(
            source,
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. }
        ) || text.contains("403 Forbidden")
            || text.contains("401 Unauthorized");
        match source {
            _ if denied => {
                let code = text
                    .split_once("<Code>")
                    .and_then(|(_, rest)| rest.split_once("</Code>"))
                    .map_or(text.as_str(), |(code, _)| code);
                access(format!("access is denied ({code})"), self.remedy)
            }
            _ if text.contains("NoSuchBucket") || text.contains("ContainerNotFound") => access(
                "there is no such bucket".to_owned(),
                "create it, or name another one",
            ),
            source => Error::Store {
                key: key.to_string(),
                location: self.location.to_string(),
                source,
            },
        }
    }

    /// Whether the store answers at all: one small listing, so that a wrong bucket, key or endpoint is said at
    /// the start.
    pub async fn check(&self) -> Result<()> {
        let key = Key::from("records");
        let first = async { self.store.list(Some(&key)).next().await.transpose() };
        match self.within(&key, FIRST_DEADLINE, first).await {
            Ok(_) => Ok(()),
            Err(error @ Error::Access { .. }) => Err(error),
            Err(error) => Err(Error::Access {
                location: self.location.to_string(),
                reason: error.to_string(),
                remedy: self.remedy.to_owned(),
            }),
        }
    }

    /// The object and its age; none when there is none.
    pub async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>> {
        absent_as_none(self.within(key, SMALL_DEADLINE, self.store.head(key)).await)
    }

    /// The bytes of an object; none when there is none.
    pub async fn get(&self, key: &Key) -> Result<Option<Bytes>> {
        let whole = async {
            let found = self.store.get(key).await?;
            let size = found.meta.size;
            if size > PART_BYTES {
                return Ok(Err(size));
            }
            found.bytes().await.map(Ok)
        };
        match absent_as_none(self.within(key, SMALL_DEADLINE, whole).await)? {
            None => Ok(None),
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(size)) => {
                let mut bytes = BytesMut::new();
                let mut parts = std::pin::pin!(self.parts(key, size));
                while let Some(part) = parts.try_next().await? {
                    bytes.extend_from_slice(&part);
                }
                Ok(Some(bytes.freeze()))
            }
        }
    }

    /// The bytes of an object of known size, in parts, in order.
    pub fn parts(&self, key: &Key, size: u64) -> impl futures::Stream<Item = Result<Bytes>> {
        let starts = (0..size).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
        let part = move |start: u64| {
            let (objects, key) = (self.clone(), key.clone());
            let range = start..start.saturating_add(PART_BYTES).min(size);
            async move {
                objects
                    .within(&key, PART_DEADLINE, objects.store.get_range(&key, range))
                    .await
            }
        };
        stream::iter(starts).map(part).buffered(PARTS_AT_ONCE)
    }

    /// Sets an object, whatever was there.
    pub async fn put(&self, key: &Key, bytes: Bytes) -> Result<()> {
        if bytes.len() as u64 > PART_BYTES {
            return self.put_in_parts(key, bytes).await;
        }
        self.stands(key).await?;
        let put = self.store.put(key, bytes.into());
        self.within(key, SMALL_DEADLINE, put).await.map(drop)
    }

    async fn put_in_parts(&self, key: &Key, bytes: Bytes) -> Result<()> {
        let mut upload = self.begin_upload(key, bytes.len() as u64).await?;
        if let Err(error) = upload.write(bytes).await {
            upload.abort().await;
            return Err(error);
        }
        upload.finish().await
    }

    /// Makes an object where none is. False when there is one already.
    pub async fn create(&self, key: &Key, bytes: Bytes) -> Result<bool> {
        self.stands(key).await?;
        let options = PutOptions::from(PutMode::Create);
        let put = self.store.put_opts(key, bytes.into(), options);
        match self.within(key, SMALL_DEADLINE, put).await {
            Ok(_) => Ok(true),
            Err(Error::Store {
                source: object_store::Error::AlreadyExists { .. },
                ..
            }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes an object; no error when it is gone already.
    pub async fn delete(&self, key: &Key) -> Result<()> {
        absent_as_none(self.within(key, SMALL_DEADLINE, self.store.delete(key)).await).map(drop)
    }

    /// Every object below a prefix, in no order.
    pub async fn list(&self, prefix: &Key) -> Result<Vec<ObjectMeta>> {
        let mut found = Vec::new();
        let mut objects = self.store.list(Some(prefix));
        // The deadline is for each object, or page of them: a listing may be long.
        while let Some(meta) = self
            .within(prefix, SMALL_DEADLINE, async { objects.next().await.transpose() })
            .await?
        {
            found.push(meta);
        }
        Ok(found)
    }
}

fn absent_as_none<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(Error::Store {
            source: object_store::Error::NotFound { .. },
            ..
        }) => Ok(None),
        Err(error) => Err(error),
    }
}
