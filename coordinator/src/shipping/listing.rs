//! What lies in the store, as listed.

use std::collections::BTreeMap;

use espalier_artifact::{ObjectArea, StoredObject};

use super::chain::{Piece, Snapshot};
use crate::Result;
use crate::term::claims::store_error;

/// Bytes at the beginning of an archive that hold the length and the checksum of the rest.
pub(super) const HEAD_BYTES: usize = 36;

/// What was shipped.
pub(super) struct Listed {
    pub pieces: Vec<Piece>,
    pub snapshots: Vec<Snapshot>,
}

pub(super) async fn list(area: &ObjectArea) -> Result<Listed> {
    // Frames first: a snapshot that stands for frames which go meanwhile is seen.
    let journal = area.list("journal").await.map_err(store_error)?;
    let snapshots = area.list("snapshots").await.map_err(store_error)?;
    Ok(Listed {
        pieces: journal
            .iter()
            .filter_map(|object| Piece::parse(&object.key))
            .collect(),
        snapshots: snapshots
            .iter()
            .filter_map(|object| Snapshot::parse(&object.key))
            .collect(),
    })
}

/// An archive of an ended job that was shipped. Its key tells one from another of the same job: a coordinator
/// that was superseded may have given the same number to another job, and ship that one's when it wakes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shipped {
    /// Where it lies.
    pub key: String,
    /// See [`mark`].
    pub mark: String,
}

/// The archives that count, by the name of the job: of one job's, that of the highest term. A later term knows
/// what an earlier one archived, unless it was void, so that it archives the same job only then.
pub(super) async fn archives(area: &ObjectArea) -> Result<BTreeMap<String, Shipped>> {
    let listed = area.list("archive").await.map_err(store_error)?;
    Ok(newest(&listed))
}

pub(super) fn newest(listed: &[StoredObject]) -> BTreeMap<String, Shipped> {
    let mut newest: BTreeMap<String, ((u64, i64), Shipped)> = BTreeMap::new();
    for object in listed {
        let Some((term, job, mark)) = parse(&object.key) else {
            continue;
        };
        // One that was written twice in a term was written better the second time.
        let rank = (term, object.modified_unix_ms);
        if newest.get(job).is_none_or(|(known, _)| *known <= rank) {
            let shipped = Shipped {
                key: object.key.clone(),
                mark: mark.to_owned(),
            };
            newest.insert(job.to_owned(), (rank, shipped));
        }
    }
    newest
        .into_iter()
        .map(|(job, (_, shipped))| (job, shipped))
        .collect()
}

/// The key of a job's archive.
pub(super) fn archive_key(term: u64, job: &str, mark: &str) -> String {
    format!("archive/{term}/{job}-{mark}")
}

/// What tells an archive from another: of its first bytes, which hold its length and its checksum.
pub(super) fn mark(archive: &[u8]) -> String {
    let head = archive.get(..HEAD_BYTES).unwrap_or(archive);
    blake3::hash(head).to_hex().chars().take(16).collect()
}

fn parse(key: &str) -> Option<(u64, &str, &str)> {
    let (term, rest) = key.strip_prefix("archive/")?.split_once('/')?;
    let (job, mark) = rest.rsplit_once('-')?;
    let number = job.strip_prefix("job-")?;
    let sound = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    sound.then_some((term.parse().ok()?, job, mark))
}
