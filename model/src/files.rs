//! Files that appear whole or not at all, and reading them back.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    |source| Error::Io {
        path: path.to_path_buf(),
        source,
    }
}

/// Lets `write` make a file beside `path`, makes it durable and gives it its name. On an error nothing stays.
pub(crate) fn write_atomically(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.partial", std::process::id()));
    let partial: PathBuf = path.with_file_name(name);
    let written = write(&partial).and_then(|()| {
        File::open(&partial)
            .and_then(|file| file.sync_all())
            .map_err(io(&partial))?;
        fs::rename(&partial, path).map_err(io(path))
    });
    if written.is_err() {
        // The error that matters is the one above; a leftover is the lesser harm.
        let _ = fs::remove_file(&partial);
        return written;
    }
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."));
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(io(directory))
}

/// Writes `value` as JSON; every f64 reads back to the same bits.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_vec(value).map_err(|error| Error::Damaged {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })?;
    write_atomically(path, |partial| {
        let mut file = File::create(partial).map_err(io(partial))?;
        file.write_all(&text).map_err(io(partial))
    })
}

/// Reads what [`write_json`] wrote.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read(path).map_err(io(path))?;
    serde_json::from_slice(&text).map_err(|error| Error::Damaged {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })
}
