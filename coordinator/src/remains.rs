//! What a data directory holds beside its journal, and what that tells of the journal and of the artifact store.

use std::path::{Path, PathBuf};

use crate::journal::disk::Disk;
use crate::{Error, Result, journal, tables};

/// The id of the artifact store, in the data directory.
const STORE_ID_FILE: &str = "store-id";
/// Where artifacts lie unless a store is named.
const OWN_STORE: &str = "artifacts";
const STORE_ID_DIGITS: usize = 32;

/// What coordinators leave that once had a journal here: archives, tables and logs, where there are any.
pub fn leftovers(disk: &dyn Disk, data_dir: &Path) -> Vec<PathBuf> {
    let directories = ["archive", tables::DIRECTORY, "logs"].map(|name| data_dir.join(name));
    let holds_something = |directory: &PathBuf| disk.list(directory).is_ok_and(|paths| !paths.is_empty());
    directories.into_iter().filter(holds_something).collect()
}

/// What tells of a journal that now holds nothing; none when it holds something, or never did. Beginning anew would
/// do again what was done, and mix what both left.
///
/// # Errors
/// When the journal cannot be read.
pub fn of_lost_journal(disk: &dyn Disk, data_dir: &Path) -> Result<Option<PathBuf>> {
    if !journal::is_empty(disk, &data_dir.join("journal"))? {
        return Ok(None);
    }
    Ok(leftovers(disk, data_dir).into_iter().next())
}

/// Where the id of the store is remembered.
pub fn store_id_path(data_dir: &Path) -> PathBuf {
    data_dir.join(STORE_ID_FILE)
}

/// The directory that is the store unless one is named.
pub fn own_store(data_dir: &Path) -> PathBuf {
    data_dir.join(OWN_STORE)
}

/// The id of the store that coordinators on this directory used; none before the first.
///
/// # Errors
/// When it cannot be read, or is none.
pub fn store_id(disk: &dyn Disk, data_dir: &Path) -> Result<Option<String>> {
    let path = store_id_path(data_dir);
    let bytes = match disk.read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(Error::File {
                action: "read",
                path,
                source,
            });
        }
    };
    let text = String::from_utf8(bytes).unwrap_or_else(|_| "?".to_owned());
    let id = text.trim();
    if id.is_empty() {
        return Ok(None);
    }
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if id.len() == STORE_ID_DIGITS && id.bytes().all(digit) {
        return Ok(Some(id.to_owned()));
    }
    Err(Error::StoreId { path })
}
