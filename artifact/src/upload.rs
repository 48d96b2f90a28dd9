//! Uploads in parts: nothing is visible before the last part is in and the whole is promoted at once.

use bytes::{Bytes, BytesMut};
use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStoreExt};
use tokio::task::JoinSet;

use crate::objects::{Objects, PART_BYTES, PART_DEADLINE, PARTS_AT_ONCE};
use crate::{Error, Result};

/// Stores take at most 10,000 parts.
const PARTS_LIMIT: u64 = 9_000;

/// An upload under way. One that is dropped leaves nothing visible.
pub struct Upload<'a> {
    objects: &'a Objects,
    key: Key,
    upload: Box<dyn MultipartUpload>,
    part_bytes: usize,
    buffer: BytesMut,
    parts: JoinSet<Result<()>>,
}

impl Objects {
    /// Begins to upload an object of about this size.
    pub async fn begin_upload(&self, key: &Key, bytes: u64) -> Result<Upload<'_>> {
        let upload = self
            .within(key, PART_DEADLINE, self.inner().put_multipart(key))
            .await?;
        let part_bytes = PART_BYTES.max(bytes.div_ceil(PARTS_LIMIT));
        Ok(Upload {
            objects: self,
            key: key.clone(),
            upload,
            part_bytes: usize::try_from(part_bytes).unwrap_or(usize::MAX),
            buffer: BytesMut::new(),
            parts: JoinSet::new(),
        })
    }
}

impl Upload<'_> {
    /// Adds bytes; waits while too much is under way.
    pub async fn write(&mut self, mut bytes: Bytes) -> Result<()> {
        while !bytes.is_empty() {
            let room = self.part_bytes.saturating_sub(self.buffer.len());
            let taken = bytes.split_to(room.min(bytes.len()));
            self.buffer.extend_from_slice(&taken);
            if self.buffer.len() >= self.part_bytes {
                self.send().await?;
            }
        }
        Ok(())
    }

    async fn send(&mut self) -> Result<()> {
        while self.parts.len() >= PARTS_AT_ONCE {
            self.joined().await?;
        }
        let part = self.upload.put_part(self.buffer.split().freeze().into());
        let (objects, key) = (self.objects.clone(), self.key.clone());
        self.parts
            .spawn(async move { objects.within(&key, PART_DEADLINE, part).await });
        Ok(())
    }

    async fn joined(&mut self) -> Result<()> {
        match self.parts.join_next().await {
            None => Ok(()),
            Some(Ok(sent)) => sent,
            Some(Err(error)) => Err(Error::Interrupted {
                reason: error.to_string(),
            }),
        }
    }

    /// Promotes the whole.
    pub async fn finish(mut self) -> Result<()> {
        let completed = self.complete().await;
        if completed.is_err() {
            self.abort().await;
        }
        completed
    }

    async fn complete(&mut self) -> Result<()> {
        if !self.buffer.is_empty() {
            self.send().await?;
        }
        while !self.parts.is_empty() {
            self.joined().await?;
        }
        let complete = self.upload.complete();
        self.objects
            .within(&self.key, PART_DEADLINE, complete)
            .await
            .map(drop)
    }

    /// Gives up: the parts sent so far are removed as far as the store can be reached.
    pub async fn abort(&mut self) {
        self.parts.shutdown().await;
        let abort = self.upload.abort();
        if let Err(error) = self.objects.within(&self.key, PART_DEADLINE, abort).await {
            tracing::debug!(%error, "parts of an upload that was given up may stay, invisible");
        }
    }
}
