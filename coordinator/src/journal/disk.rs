//! The disk as the journal, its snapshots and the archives see it.
//!
//! Every byte they read or write goes through [`Disk`]; [`SystemDisk`] is the real one. Nothing is durable
//! before it is synced: a file's bytes by [`DiskFile::sync`], its name by [`Disk::sync_directory`]. Here
//! live no file names and no formats.

use std::ffi::{CString, OsString};
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What [`Disk::write_whole`] adds to the name of a file that is not whole yet.
pub const PARTIAL: &str = ".partial";

/// Where files lie. Paths are taken as they are given.
pub trait Disk: Debug + Send + Sync {
    /// The paths of everything in a directory, in no order.
    ///
    /// # Errors
    /// When the directory is missing or cannot be read.
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>>;

    /// All of a file.
    ///
    /// # Errors
    /// When it is missing or cannot be read.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// At most `limit` bytes of a file from a place on; fewer at its end.
    ///
    /// # Errors
    /// When it is missing or cannot be read.
    fn read_from(&self, path: &Path, offset: u64, limit: usize) -> io::Result<Vec<u8>> {
        let bytes = self.read(path)?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let rest = bytes.get(offset..).unwrap_or_default();
        Ok(rest.get(..limit).unwrap_or(rest).to_vec())
    }

    /// Opens a file that is there and cuts it to `length` bytes, after which appends go.
    ///
    /// # Errors
    /// When it is missing or cannot be opened.
    fn open(&self, path: &Path, length: u64) -> io::Result<Box<dyn DiskFile>>;

    /// Makes an empty file.
    ///
    /// # Errors
    /// When the name is taken or the file cannot be made.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// Removes a file; its name is gone for good once the directory is synced.
    ///
    /// # Errors
    /// When it is missing or cannot be removed.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Gives a file or directory another name, in place of what has that name.
    ///
    /// # Errors
    /// When it is missing or cannot be renamed.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// When it is missing or the disk does not say that they are.
    fn sync_directory(&self, directory: &Path) -> io::Result<()>;

    /// Makes a directory and those above it, where they are missing.
    ///
    /// # Errors
    /// When one cannot be made.
    fn create_directory(&self, directory: &Path) -> io::Result<()>;

    /// How much can still be written below a directory, as far as the disk tells: all there is, unless it does.
    ///
    /// # Errors
    /// When it is missing or the disk does not say.
    fn free_bytes(&self, _directory: &Path) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    /// Writes a file whole or not at all, durable when this returns: what had the name stays until then.
    ///
    /// # Errors
    /// When a step fails. A partial file may be left: whoever owns the directory removes it at its start.
    fn write_whole(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let mut partial = OsString::from(path);
        partial.push(PARTIAL);
        let partial = PathBuf::from(partial);
        if let Err(error) = self.remove(&partial)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let mut file = self.create(&partial)?;
        let written = file.append(bytes).and_then(|()| file.sync());
        drop(file);
        if let Err(error) = written {
            // The room it takes may be what is missing.
            let _ = self.remove(&partial);
            return Err(error);
        }
        self.rename(&partial, path)?;
        self.sync_directory(directory)
    }
}

/// A file that is open for appending.
pub trait DiskFile: Debug + Send {
    /// Writes after what is there.
    ///
    /// # Errors
    /// When not all was written; a part may have been.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns once what was appended and cut is durable.
    ///
    /// # Errors
    /// When the disk does not say that it is: then it may never be, whatever a second call says.
    fn sync(&mut self) -> io::Result<()>;

    /// Drops what comes after `length` bytes; the next append goes there.
    ///
    /// # Errors
    /// When it cannot be dropped.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

/// The machine's own disk.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemDisk;

impl Disk for SystemDisk {
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(directory)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn read_from(&self, path: &Path, offset: u64, limit: usize) -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        file.take(u64::try_from(limit).unwrap_or(u64::MAX))
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn open(&self, path: &Path, length: u64) -> io::Result<Box<dyn DiskFile>> {
        let mut file = SystemFile(OpenOptions::new().write(true).open(path)?);
        file.cut(length)?;
        Ok(Box::new(file))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = OpenOptions::new().create_new(true).write(true).open(path)?;
        Ok(Box::new(SystemFile(file)))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        File::open(directory)?.sync_all()
    }

    fn create_directory(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)
    }

    fn free_bytes(&self, directory: &Path) -> io::Result<u64> {
        let path = CString::new(directory.as_os_str().as_bytes())?;
        let mut said = MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: `path` ends with a null byte, and `said` is written before it is read, if this gives 0.
        let said = unsafe {
            if libc::statvfs(path.as_ptr(), said.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            said.assume_init()
        };
        Ok(said.f_bavail.saturating_mul(said.f_frsize))
    }
}

#[derive(Debug)]
struct SystemFile(File);

impl DiskFile for SystemFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        // The length is among what this makes durable: a file that grew can be read back.
        self.0.sync_data()
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.0.set_len(length)?;
        self.0.seek(SeekFrom::Start(length)).map(drop)
    }
}
