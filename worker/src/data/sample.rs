//! A seeded sample of documents, bounded in memory, whose order depends on the seed and the documents alone.
//!
//! Each document gets the key BLAKE3(seed, text). The sample is the documents with the smallest keys, in
//! the order of their keys: a uniform draw without replacement in one pass, whatever the order of the files.
//! Documents that are equal have equal keys and count once.

use std::collections::BTreeMap;

/// The key of a document.
pub type Key = [u8; 32];

/// Documents with the smallest keys, up to a number of bytes.
#[derive(Debug)]
pub struct Sample {
    seed: u64,
    limit_bytes: usize,
    bytes: usize,
    documents: BTreeMap<Key, String>,
}

impl Sample {
    /// An empty sample that keeps at most `limit_bytes` of text (and always one document).
    pub fn new(seed: u64, limit_bytes: usize) -> Self {
        Self {
            seed,
            limit_bytes,
            bytes: 0,
            documents: BTreeMap::new(),
        }
    }

    /// The key that this sample gives a document.
    pub fn key(&self, text: &str) -> Key {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes());
        hasher.update(text.as_bytes());
        *hasher.finalize().as_bytes()
    }

    /// Offers a document.
    pub fn offer(&mut self, text: String) {
        let key = self.key(&text);
        if self.bytes >= self.limit_bytes
            && self
                .documents
                .last_key_value()
                .is_some_and(|(last, _)| key > *last)
        {
            return;
        }
        let bytes = text.len();
        if self.documents.insert(key, text).is_none() {
            self.bytes += bytes;
        }
        while self.bytes > self.limit_bytes && self.documents.len() > 1 {
            if let Some((_, dropped)) = self.documents.pop_last() {
                self.bytes -= dropped.len();
            }
        }
    }

    /// Takes a document out again.
    pub fn remove(&mut self, key: &Key) {
        if let Some(removed) = self.documents.remove(key) {
            self.bytes -= removed.len();
        }
    }

    /// The documents in the order of their keys.
    pub fn into_documents(self) -> Vec<String> {
        self.documents.into_values().collect()
    }
}
