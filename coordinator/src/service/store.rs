//! The artifact store as a coordinator takes it: opened at the start, and known again by its id.
//!
//! A directory that is not mounted looks like an empty store, in which everything that was done is missing. So
//! the data directory remembers which store it was, and another is not taken in its place.

use std::path::{Path, PathBuf};

use espalier_artifact::ArtifactStore;

use super::CoordinatorOptions;
use crate::journal::disk::{Disk, SystemDisk};
use crate::{Error, Result, remains};

/// Opens the store as workers are told of it, so that a wrong one is found at the start.
pub(super) fn open(options: &CoordinatorOptions) -> Result<ArtifactStore> {
    if let Some(store) = &options.store {
        refuse_inside(store, &options.data_dir)?;
    }
    let inside = || {
        remains::own_store(&options.data_dir)
            .to_string_lossy()
            .into_owned()
    };
    let location = options.store.clone().unwrap_or_else(inside);
    let opened = if remains::store_id(&SystemDisk, &options.data_dir)?.is_some() {
        ArtifactStore::open_existing(&location)
    } else {
        ArtifactStore::open(&location)
    };
    opened.map_err(|error| refused(&error, &options.data_dir))
}

/// What lies there would be taken for part of the coordinator's own files, and be lost with them.
fn refuse_inside(store: &str, data_dir: &Path) -> Result<()> {
    let directory = match store.split_once("://") {
        None => store,
        Some(("file", path)) => path,
        Some(_) => return Ok(()),
    };
    let (directory, own) = (resolved(Path::new(directory)), resolved(data_dir));
    if !directory.starts_with(&own) || directory == remains::own_store(&own) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "store: {store} lies in the data directory {}: name a directory elsewhere, or leave it out, which is the same \
         as {}; a store that was used there can be moved as a whole, and is known again at its new place",
        data_dir.display(),
        remains::own_store(data_dir).display()
    )))
}

/// As far as it is there, without links.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    for there in path.ancestors() {
        if let (Ok(real), Ok(rest)) = (there.canonicalize(), path.strip_prefix(there)) {
            return real.join(rest);
        }
    }
    path
}

/// The store's id, which workers are told; the first coordinator on it makes it.
pub(super) async fn identify(options: &CoordinatorOptions, store: &ArtifactStore) -> Result<String> {
    let failed = |error| refused(&error, &options.data_dir);
    if let Some(id) = remains::store_id(&SystemDisk, &options.data_dir)? {
        store.require(&id).await.map_err(failed)?;
        return Ok(id);
    }
    let id = store.id_or_new().await.map_err(failed)?;
    let path = remains::store_id_path(&options.data_dir);
    SystemDisk
        .write_whole(&path, id.as_bytes())
        .map_err(|source| Error::File {
            action: "write",
            path,
            source,
        })?;
    Ok(id)
}

fn refused(error: &espalier_artifact::Error, data_dir: &Path) -> Error {
    let remedy = match error {
        espalier_artifact::Error::Foreign { .. } | espalier_artifact::Error::Away { .. } => format!(
            "; to take the store that is there in place of the one before, remove {}",
            remains::store_id_path(data_dir).display()
        ),
        _ => String::new(),
    };
    let told = format!("store: {error}{remedy}");
    if error.is_full() {
        Error::StoreFull(told)
    } else {
        Error::Invalid(told)
    }
}
