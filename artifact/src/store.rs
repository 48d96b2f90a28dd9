//! The store itself: put and get, by bytes or by file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::{Error, Name, Result, hash_file};

/// Artifacts below one root. Cheap to clone; safe to use from many processes at once.
#[derive(Debug, Clone)]
pub struct ArtifactStore {
    store: Arc<dyn ObjectStore>,
    root: PathBuf,
}

/// Tells the temporary files of one process apart.
static TEMPORARY: AtomicU64 = AtomicU64::new(0);

impl ArtifactStore {
    /// Opens the store at `location`, a directory (made when absent) or a `file://` URL.
    ///
    /// # Errors
    /// When the directory cannot be made, or the URL has another scheme.
    pub fn open(location: &str) -> Result<Self> {
        let directory = match location.split_once("://") {
            None => location,
            Some(("file", path)) if path.starts_with('/') => path,
            Some((scheme, _)) => {
                let reason = format!("scheme {scheme:?} is not supported");
                return Err(Error::Location {
                    location: location.to_owned(),
                    reason,
                });
            }
        };
        if directory.is_empty() {
            return Err(Error::Location {
                location: location.to_owned(),
                reason: "it is empty".to_owned(),
            });
        }
        let failed = |source| Error::Io {
            path: PathBuf::from(directory),
            source,
        };
        fs::create_dir_all(directory).map_err(failed)?;
        let root = fs::canonicalize(directory).map_err(failed)?;
        let store = LocalFileSystem::new_with_prefix(&root)
            .map_err(|source| Error::Location {
                location: location.to_owned(),
                reason: source.to_string(),
            })?
            .with_fsync(true);
        Ok(Self {
            store: Arc::new(store),
            root,
        })
    }

    /// The directory that a process on this machine passes to [`ArtifactStore::open`].
    pub fn location(&self) -> String {
        self.root.display().to_string()
    }

    /// Stores `bytes` and gives their name. Safe to repeat.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn put_bytes(&self, bytes: impl Into<Bytes>) -> Result<Name> {
        let bytes = bytes.into();
        let name = Name::of(&bytes);
        let key = object_store::path::Path::from(name.key());
        self.store
            .put(&key, bytes.into())
            .await
            .map_err(|source| Error::Store {
                name: name.to_string(),
                source,
            })?;
        Ok(name)
    }

    /// Takes the file at `path` into the store and gives its name: the file is hashed in pieces, moved into
    /// place where it lies on the same file system and copied otherwise. Afterwards it is gone from `path`.
    ///
    /// # Errors
    /// When the file cannot be read or the store cannot be written; the file then stays where it was.
    pub async fn put_file(&self, path: &Path) -> Result<Name> {
        let (root, path) = (self.root.clone(), path.to_owned());
        off_the_loop(move || take_file(&root, &path)).await
    }

    /// The bytes of an artifact, checked against its name.
    ///
    /// # Errors
    /// When the name is malformed, there is no such artifact, or its bytes do not match.
    pub async fn get_bytes(&self, name: &str) -> Result<Bytes> {
        let name = Name::from_str(name)?;
        let key = object_store::path::Path::from(name.key());
        let failed = |source| match source {
            object_store::Error::NotFound { .. } => self.not_found(&name),
            source => Error::Store {
                name: name.to_string(),
                source,
            },
        };
        let bytes = self
            .store
            .get(&key)
            .await
            .map_err(failed)?
            .bytes()
            .await
            .map_err(failed)?;
        check(&name, &Name::of(&bytes))?;
        Ok(bytes)
    }

    /// A path on this machine at which the artifact can be read, checked against its name. The file belongs
    /// to the store: it must not be written.
    ///
    /// # Errors
    /// As [`ArtifactStore::get_bytes`].
    pub async fn get_file(&self, name: &str) -> Result<PathBuf> {
        let name = Name::from_str(name)?;
        let path = self.root.join(name.key());
        let not_found = self.not_found(&name);
        off_the_loop(move || {
            if !path.is_file() {
                return Err(not_found);
            }
            check(&name, &hash_file(&path)?)?;
            Ok(path)
        })
        .await
    }

    /// Whether there is an artifact of that name; its content is not read.
    ///
    /// # Errors
    /// When the name is malformed or the store cannot be asked.
    pub async fn contains(&self, name: &str) -> Result<bool> {
        let name = Name::from_str(name)?;
        match self.store.head(&object_store::path::Path::from(name.key())).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(source) => Err(Error::Store {
                name: name.to_string(),
                source,
            }),
        }
    }

    /// Removes an artifact that nothing needs any more; no error when it is gone already.
    ///
    /// # Errors
    /// When the name is malformed or the store cannot be written.
    pub async fn remove(&self, name: &str) -> Result<()> {
        let name = Name::from_str(name)?;
        match self
            .store
            .delete(&object_store::path::Path::from(name.key()))
            .await
        {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(Error::Store {
                name: name.to_string(),
                source,
            }),
        }
    }

    /// Sets a small record: the one thing here that is named by what it is about (the hash of a question)
    /// and not by its content, so that an attempt finds what the one before it left.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn set_record(&self, about: &Name, bytes: impl Into<Bytes>) -> Result<()> {
        let key = record_key(about);
        let put = self.store.put(&key, bytes.into().into()).await;
        put.map(|_| ()).map_err(|source| Error::Store {
            name: format!("record {about}"),
            source,
        })
    }

    /// A record as it was last set; none when it never was.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn record(&self, about: &Name) -> Result<Option<Bytes>> {
        let failed = |source| Error::Store {
            name: format!("record {about}"),
            source,
        };
        match self.store.get(&record_key(about)).await {
            Ok(found) => found.bytes().await.map(Some).map_err(failed),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(failed(source)),
        }
    }

    fn not_found(&self, name: &Name) -> Error {
        Error::NotFound {
            name: name.to_string(),
            location: self.location(),
        }
    }
}

fn record_key(about: &Name) -> object_store::path::Path {
    object_store::path::Path::from(format!("records/{about}"))
}

fn check(name: &Name, found: &Name) -> Result<()> {
    if name != found {
        return Err(Error::Damaged {
            name: name.to_string(),
            found: found.to_string(),
        });
    }
    Ok(())
}

async fn off_the_loop<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::Interrupted {
            reason: error.to_string(),
        })?
}

fn take_file(root: &Path, path: &Path) -> Result<Name> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    };
    let name = hash_file(path)?;
    let target = root.join(name.key());
    let directory = target.parent().unwrap_or(root);
    fs::create_dir_all(directory).map_err(failed(directory))?;
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(failed(path))?;
    if fs::rename(path, &target).is_err() {
        // Another file system: a copy beside the target, then the same atomic rename.
        let sequence = TEMPORARY.fetch_add(1, Ordering::Relaxed);
        let staged = directory.join(format!(".{}-{sequence}.staged", std::process::id()));
        let copied = fs::copy(path, &staged)
            .and_then(|_| File::open(&staged)?.sync_all())
            .and_then(|()| fs::rename(&staged, &target));
        if let Err(source) = copied {
            let _ = fs::remove_file(&staged);
            return Err(Error::Io { path: target, source });
        }
        fs::remove_file(path).map_err(failed(path))?;
    }
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(failed(directory))?;
    Ok(name)
}
