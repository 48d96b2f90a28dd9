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
        self.stands(key).await?;
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;
    use futures::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, ObjectMeta, ObjectStore, PutMultipartOptions,
        PutOptions, PutPayload, PutResult, UploadPart,
    };

    use super::*;
    use crate::identity::Known;

    /// A server that takes no part and counts the uploads that are given up.
    #[derive(Debug, Default)]
    struct Flaky {
        inner: InMemory,
        begun: AtomicU32,
        aborted: Arc<AtomicU32>,
    }

    impl std::fmt::Display for Flaky {
        fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str("flaky")
        }
    }

    #[derive(Debug)]
    struct FlakyUpload(Arc<AtomicU32>);

    #[async_trait]
    impl MultipartUpload for FlakyUpload {
        fn put_part(&mut self, _: PutPayload) -> UploadPart {
            Box::pin(async {
                Err(object_store::Error::NotImplemented {
                    operation: "a part".to_owned(),
                    implementer: "flaky".to_owned(),
                })
            })
        }

        async fn complete(&mut self) -> object_store::Result<PutResult> {
            panic!("an upload without its parts is promoted");
        }

        async fn abort(&mut self) -> object_store::Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[async_trait]
    impl ObjectStore for Flaky {
        async fn put_opts(
            &self,
            key: &Key,
            payload: PutPayload,
            options: PutOptions,
        ) -> object_store::Result<PutResult> {
            self.inner.put_opts(key, payload, options).await
        }

        async fn put_multipart_opts(
            &self,
            _: &Key,
            _: PutMultipartOptions,
        ) -> object_store::Result<Box<dyn MultipartUpload>> {
            self.begun.fetch_add(1, Ordering::Relaxed);
            Ok(Box::new(FlakyUpload(Arc::clone(&self.aborted))))
        }

        async fn get_opts(&self, key: &Key, options: GetOptions) -> object_store::Result<GetResult> {
            self.inner.get_opts(key, options).await
        }

        fn delete_stream(
            &self,
            keys: BoxStream<'static, object_store::Result<Key>>,
        ) -> BoxStream<'static, object_store::Result<Key>> {
            self.inner.delete_stream(keys)
        }

        fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
            self.inner.list(prefix)
        }

        async fn list_with_delimiter(&self, prefix: Option<&Key>) -> object_store::Result<ListResult> {
            self.inner.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Key, to: &Key, options: CopyOptions) -> object_store::Result<()> {
            self.inner.copy_opts(from, to, options).await
        }
    }

    #[tokio::test]
    async fn an_upload_whose_parts_are_refused_is_given_up_so_that_no_part_stays() {
        // Failing while it is written, and only at its end.
        for parts in [PARTS_AT_ONCE + 2, 2] {
            let server = Arc::new(Flaky::default());
            let objects = Objects::new(
                Arc::clone(&server) as Arc<dyn ObjectStore>,
                "flaky",
                "",
                Known::at(None),
            );
            let bytes = vec![0_u8; parts * usize::try_from(PART_BYTES).unwrap()];
            let refused = objects.put(&Key::from("large"), bytes.into()).await;
            assert!(matches!(refused, Err(Error::Store { .. })), "{refused:?}");
            let seen = [&server.begun, &server.aborted].map(|count| count.load(Ordering::Relaxed));
            assert_eq!(seen, [1, 1], "{parts} parts");
        }
    }
}
