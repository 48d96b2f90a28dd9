//! The store itself: put and get, by bytes or by file.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use bytes::Bytes;
use object_store::path::Path as Key;

use crate::cache::{Cache, Listener, io_error, is_staged, sweep, sweep_staged, unused_path};
use crate::identity::Known;
use crate::location::{Absent, Opened};
use crate::objects::{Objects, PART_BYTES};
use crate::sealed::{seal, unseal};
use crate::{Error, Name, ObjectArea, Options, Result, hash_file, location};

/// Artifacts below one root. Cheap to clone; safe to use from many processes at once.
#[derive(Debug, Clone)]
pub struct ArtifactStore {
    pub(crate) objects: Objects,
    place: Place,
}

/// Where the files are.
#[derive(Debug, Clone)]
enum Place {
    /// Below this directory.
    Here(PathBuf),
    /// Elsewhere, with copies here.
    Away(Cache),
}

/// An artifact as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredArtifact {
    /// Its name.
    pub name: Name,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was last put, by the store's clock, in ms since 1970.
    pub modified_unix_ms: i64,
}

impl ArtifactStore {
    /// Opens the store at `location`: a directory (made when absent), `file:///DIRECTORY`,
    /// `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`. Credentials and endpoints come
    /// from the environment, under the names that each provider's own tools use. Speaks to nobody yet:
    /// [`ArtifactStore::check`] does.
    ///
    /// # Errors
    /// When the directory cannot be made, the location is not understood, or a variable is missing or wrong.
    pub fn open(location: &str) -> Result<Self> {
        Self::open_with(location, &Options::from_env()?)
    }

    /// As [`ArtifactStore::open`], with other options.
    ///
    /// # Errors
    /// As [`ArtifactStore::open`].
    pub fn open_with(location: &str, options: &Options) -> Result<Self> {
        Self::place(location::open(location, Absent::Make)?, options)
    }

    /// As [`ArtifactStore::open`], of a store that somebody else has made: a directory that is absent is one that
    /// is not mounted, and is not made.
    ///
    /// # Errors
    /// As [`ArtifactStore::open`], and [`Error::Away`].
    pub fn open_existing(location: &str) -> Result<Self> {
        Self::place(location::open(location, Absent::Refuse)?, &Options::from_env()?)
    }

    fn place(opened: Opened, options: &Options) -> Result<Self> {
        let known = Known::at(opened.root.clone());
        let place = match opened.root {
            Some(root) => Place::Here(root),
            None => Place::Away(Cache::open(options)?),
        };
        Ok(Self {
            objects: Objects::new(opened.store, &opened.location, opened.remedy, known),
            place,
        })
    }

    /// The same, with `tell` called while a file is waited for that another process of this machine downloads, each time
    /// that has got on: whoever is watched can say that it lives.
    #[must_use]
    pub fn telling_of_waits(mut self, tell: impl Fn() + Send + Sync + 'static) -> Self {
        if let Place::Away(cache) = &mut self.place {
            cache.waits = Listener::new(tell);
        }
        self
    }

    /// What others pass to [`ArtifactStore::open`]: a directory of this machine, or a URL.
    pub fn location(&self) -> String {
        self.objects.location().to_owned()
    }

    /// Asks the store for something small, so that a wrong bucket, key or endpoint is said at the start.
    ///
    /// # Errors
    /// [`Error::Access`], naming what to set.
    pub async fn check(&self) -> Result<()> {
        self.objects.check().await
    }

    /// A path for a new file that [`ArtifactStore::put_file`] takes in cheaply: in a local directory, whatever
    /// the store. Nobody else uses the path; one left behind is removed after a day.
    ///
    /// # Errors
    /// When the directory cannot be made, or the store is not there.
    pub fn scratch_path(&self) -> Result<PathBuf> {
        let directory = match &self.place {
            Place::Here(root) => {
                self.objects.known().check()?;
                root.join("scratch")
            }
            Place::Away(cache) => cache.scratch(),
        };
        fs::create_dir_all(&directory).map_err(io_error(&directory))?;
        Ok(unused_path(&directory))
    }

    /// The objects below a prefix, for an owner of its own.
    pub fn area(&self, prefix: &str) -> ObjectArea {
        ObjectArea::new(self.objects.clone(), prefix)
    }

    /// Stores `bytes` and gives their name. Safe to repeat.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn put_bytes(&self, bytes: impl Into<Bytes>) -> Result<Name> {
        let bytes = bytes.into();
        let name = Name::of(&bytes);
        self.objects.put(&Key::from(name.key()), bytes).await?;
        Ok(name)
    }

    /// Takes the file at `path` into the store and gives its name: the file is hashed in pieces; in a directory
    /// it is moved into place where it lies on the same file system and copied otherwise, to a bucket it is
    /// uploaded in parts. It is in the store whole or not at all. Afterwards it is gone from `path`.
    ///
    /// # Errors
    /// When the file cannot be read, changes meanwhile, or the store cannot be written; the file then stays
    /// where it was.
    pub async fn put_file(&self, path: &Path) -> Result<Name> {
        let path = path.to_owned();
        match &self.place {
            Place::Here(root) => {
                let (root, known) = (root.clone(), self.objects.known().clone());
                off_the_loop(move || {
                    known.check()?;
                    take_file(&root, &path)
                })
                .await
            }
            Place::Away(cache) => {
                let name = self.upload(&path).await?;
                let (cache, known) = (cache.clone(), name.clone());
                off_the_loop(move || {
                    // Whoever wrote it often reads it next. Across file systems it is just removed.
                    if cache.adopt(&path, &known).is_err() {
                        return fs::remove_file(&path).map_err(io_error(&path));
                    }
                    cache.make_room()
                })
                .await?;
                Ok(name)
            }
        }
    }

    async fn upload(&self, path: &Path) -> Result<Name> {
        let (name, size) = off_the_loop({
            let path = path.to_owned();
            move || {
                let name = hash_file(&path)?;
                let size = fs::metadata(&path).map_err(io_error(&path))?.len();
                Ok((name, size))
            }
        })
        .await?;
        let key = Key::from(name.key());
        let changed = || Error::Changed {
            path: path.to_owned(),
        };
        let mut file = File::open(path).map_err(io_error(path))?;
        if size <= PART_BYTES {
            let (_, bytes) = next_part(file, path).await?;
            if Name::of(&bytes) != name {
                return Err(changed());
            }
            self.objects.put(&key, bytes).await?;
            return Ok(name);
        }
        let mut hasher = blake3::Hasher::new();
        let mut upload = self.objects.begin_upload(&key, size).await?;
        let sent = async {
            loop {
                let part;
                (file, part) = next_part(file, path).await?;
                if part.is_empty() {
                    break;
                }
                hasher.update(&part);
                upload.write(part).await?;
            }
            if Name::from_hash(hasher.finalize()) == name {
                Ok(())
            } else {
                Err(changed())
            }
        };
        if let Err(error) = sent.await {
            upload.abort().await;
            return Err(error);
        }
        upload.finish().await?;
        Ok(name)
    }

    /// The bytes of an artifact, checked against its name.
    ///
    /// # Errors
    /// When the name is malformed, there is no such artifact, or its bytes do not match.
    pub async fn get_bytes(&self, name: &str) -> Result<Bytes> {
        let name = Name::from_str(name)?;
        let key = Key::from(name.key());
        let Some(bytes) = self.objects.get(&key).await? else {
            self.objects.stands(&key).await?;
            return Err(self.not_found(&name));
        };
        check(&name, &Name::of(&bytes))?;
        Ok(bytes)
    }

    /// A path on this machine at which the artifact can be read, checked against its name. The file belongs
    /// to the store: it must not be written, and is opened within minutes or asked for again.
    ///
    /// # Errors
    /// As [`ArtifactStore::get_bytes`].
    pub async fn get_file(&self, name: &str) -> Result<PathBuf> {
        let name = Name::from_str(name)?;
        let path = match &self.place {
            Place::Away(cache) => return cache.file(&self.objects, &name).await,
            Place::Here(root) => root.join(name.key()),
        };
        let (not_found, known) = (self.not_found(&name), self.objects.known().clone());
        off_the_loop(move || {
            match fs::metadata(&path) {
                Ok(found) if found.is_file() => {}
                // Whether it is there is not known.
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(io_error(&path)(error)),
                Ok(_) | Err(_) => {
                    known.check()?;
                    return Err(not_found);
                }
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
        Ok(self.stat(name).await?.is_some())
    }

    /// An artifact's size and age; none when there is none. Its content is not read.
    ///
    /// # Errors
    /// When the name is malformed or the store cannot be asked.
    pub async fn stat(&self, name: &str) -> Result<Option<StoredArtifact>> {
        let name = Name::from_str(name)?;
        let found = self.objects.head(&Key::from(name.key())).await?;
        Ok(found.map(|meta| StoredArtifact {
            name,
            bytes: meta.size,
            modified_unix_ms: meta.last_modified.timestamp_millis(),
        }))
    }

    /// The artifacts whose names begin with this byte, in order. All 256 together are the store.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn artifacts(&self, first: u8) -> Result<Vec<StoredArtifact>> {
        let objects = self.objects.list(&Key::from(format!("{first:02x}"))).await?;
        let mut found: Vec<StoredArtifact> = objects
            .into_iter()
            .filter_map(|meta| {
                let name = Name::from_str(meta.location.filename()?).ok()?;
                (meta.location == Key::from(name.key())).then(|| StoredArtifact {
                    name,
                    bytes: meta.size,
                    modified_unix_ms: meta.last_modified.timestamp_millis(),
                })
            })
            .collect();
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Removes an artifact that nothing needs any more; no error when it is gone already.
    ///
    /// # Errors
    /// When the name is malformed or the store cannot be written.
    pub async fn remove(&self, name: &str) -> Result<()> {
        let name = Name::from_str(name)?;
        self.objects.delete(&Key::from(name.key())).await
    }

    /// Removes files that somebody began to write over a day ago and never finished; gives their number. The
    /// parts of an upload that a bucket has never promoted are its own lifecycle rules' to remove.
    ///
    /// # Errors
    /// When a directory cannot be read.
    pub async fn remove_leftovers(&self) -> Result<u64> {
        let place = self.place.clone();
        off_the_loop(move || match place {
            Place::Away(cache) => sweep(&cache.scratch(), |_| true),
            Place::Here(root) => {
                let mut removed = sweep(&root.join("scratch"), |_| true)?;
                for first in 0..=u8::MAX {
                    let fan = root.join(format!("{first:02x}"));
                    let unfinished = |name: &str| Name::from_str(name).is_err();
                    removed = removed.saturating_add(sweep(&fan, unfinished)?);
                }
                for room in ["records", "coordinator"] {
                    removed = removed.saturating_add(sweep_staged(&root.join(room))?);
                }
                removed = removed.saturating_add(sweep(&root, is_staged)?);
                Ok(removed)
            }
        })
        .await
    }

    /// Sets what `attempt` leaves for the attempts after it: named by what it is about (the hash of a question)
    /// and not by its content. An attempt writes only its own record, so one that was given up cannot undo
    /// what its successor wrote.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn set_record(&self, about: &Name, attempt: u64, bytes: &[u8]) -> Result<()> {
        self.objects.put(&record_key(about, attempt), seal(bytes)).await
    }

    /// The records about something with their attempts, the latest attempt last. A damaged one is left out and
    /// said in the log: it is a shortcut that was lost, not a result.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn records(&self, about: &Name) -> Result<Vec<(u64, Bytes)>> {
        let room = Key::from(format!("records/{about}"));
        let listed = self.objects.list(&room).await?;
        if listed.is_empty() {
            self.objects.stands(&room).await?;
        }
        let mut found = Vec::with_capacity(listed.len());
        for meta in listed {
            let Some(attempt) = meta.location.filename().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // Gone meanwhile is the same as never there.
            let Some(sealed) = self.objects.get(&meta.location).await? else {
                continue;
            };
            match unseal(&sealed) {
                Some(content) => found.push((attempt, content)),
                None => tracing::warn!(%about, attempt, "a damaged record is left out"),
            }
        }
        found.sort_by_key(|(attempt, _)| *attempt);
        Ok(found)
    }

    /// Everything that has a record, with its attempts and when each was last set (ms since 1970, by the
    /// store's clock).
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn all_records(&self) -> Result<Vec<(Name, u64, i64)>> {
        let listed = self.objects.list(&Key::from("records")).await?;
        let mut found: Vec<(Name, u64, i64)> = listed
            .into_iter()
            .filter_map(|meta| {
                let mut parts = meta.location.as_ref().rsplit('/');
                let attempt = parts.next()?.parse().ok()?;
                let about = Name::from_str(parts.next()?).ok()?;
                Some((about, attempt, meta.last_modified.timestamp_millis()))
            })
            .collect();
        found.sort();
        Ok(found)
    }

    /// Removes a record; no error when it is gone already.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn remove_record(&self, about: &Name, attempt: u64) -> Result<()> {
        self.objects.delete(&record_key(about, attempt)).await
    }

    fn not_found(&self, name: &Name) -> Error {
        Error::NotFound {
            name: name.to_string(),
            location: self.location(),
        }
    }
}

fn record_key(about: &Name, attempt: u64) -> Key {
    Key::from(format!("records/{about}/{attempt}"))
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

/// Does what blocks on a thread for it.
pub(crate) async fn off_the_loop<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::Interrupted {
            reason: error.to_string(),
        })?
}

/// Reads the next part of a file; an empty one at its end.
async fn next_part(file: File, path: &Path) -> Result<(File, Bytes)> {
    let failed = io_error(path);
    off_the_loop(move || {
        let mut part = Vec::new();
        let mut limited = file.take(PART_BYTES);
        limited.read_to_end(&mut part).map_err(failed)?;
        Ok((limited.into_inner(), part.into()))
    })
    .await
}

fn take_file(root: &Path, path: &Path) -> Result<Name> {
    let name = hash_file(path)?;
    let target = root.join(name.key());
    let directory = target.parent().unwrap_or(root);
    fs::create_dir_all(directory).map_err(io_error(directory))?;
    let file = File::options().append(true).open(path).map_err(io_error(path))?;
    // Collecting garbage goes by the age of the putting, not of the writing.
    file.set_modified(SystemTime::now())
        .and_then(|()| file.sync_all())
        .map_err(io_error(path))?;
    if fs::rename(path, &target).is_err() {
        // Another file system: a copy beside the target, then the same atomic rename.
        let staged = unused_path(directory);
        let copied = fs::copy(path, &staged)
            .and_then(|_| File::open(&staged)?.sync_all())
            .and_then(|()| fs::rename(&staged, &target));
        if let Err(source) = copied {
            let _ = fs::remove_file(&staged);
            return Err(Error::Io { path: target, source });
        }
        fs::remove_file(path).map_err(io_error(path))?;
    }
    // The root too: the fan may be new, made by us or by somebody who has not come to this yet.
    for changed in [directory, root] {
        File::open(changed)
            .and_then(|changed| changed.sync_all())
            .map_err(io_error(changed))?;
    }
    Ok(name)
}
