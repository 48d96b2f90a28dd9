//! One process at a time for a data directory. A coordinator without others' leave is fenced by this.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::{Error, Result};

const NAME: &str = "lock";

/// Held as long as the directory is used; the system lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct DirectoryLock {
    _file: File,
}

impl DirectoryLock {
    /// Takes a directory, making it when it is missing.
    ///
    /// # Errors
    /// When another process has it, or it cannot be made.
    pub fn of(directory: &Path) -> Result<Self> {
        std::fs::create_dir_all(directory).map_err(|source| Error::File {
            action: "create",
            path: directory.to_owned(),
            source,
        })?;
        Self::of_existing(directory)
    }

    /// Keeps coordinators out of a directory that is only looked at, where that can be done without writing: it may
    /// lie on a disk that nobody writes to any more.
    ///
    /// # Errors
    /// When another process has it, or it is missing ([`Error::NotFound`]).
    pub fn to_look_at(directory: &Path) -> Result<Option<Self>> {
        is_there(directory)?;
        let Ok(file) = File::open(directory.join(NAME)) else {
            return Ok(None);
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(TryLockError::WouldBlock) => Err(Error::InUse {
                path: directory.to_owned(),
            }),
            Err(TryLockError::Error(_)) => Ok(None),
        }
    }

    /// Takes a directory that is there.
    ///
    /// # Errors
    /// When another process has it, or it is missing ([`Error::NotFound`]).
    pub fn of_existing(directory: &Path) -> Result<Self> {
        is_there(directory)?;
        let path = directory.join(NAME);
        let file_error = |action| {
            let path = path.clone();
            move |source| Error::File { action, path, source }
        };
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(file_error("open"))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(Error::InUse {
                path: directory.to_owned(),
            }),
            Err(TryLockError::Error(source)) => Err(file_error("lock")(source)),
        }
    }
}

fn is_there(directory: &Path) -> Result<()> {
    if matches!(directory.try_exists(), Ok(false)) {
        let path = directory.display();
        return Err(Error::NotFound(format!(
            "there is no data directory {path}: name the one of a coordinator"
        )));
    }
    Ok(())
}
