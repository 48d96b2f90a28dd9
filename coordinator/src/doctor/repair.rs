//! Mending: what keeps a coordinator from starting is cut or put aside, after it was copied.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::check::{is_about_store, is_directory, is_for_store};
use super::{Report, check_on};
use crate::journal;
use crate::journal::disk::{Disk, SystemDisk};
use crate::lock::DirectoryLock;
use crate::scheduler::State;
use crate::{Error, Result, remains, tables};

/// Cuts the journal at the last sound frame before the damage, puts snapshots that cannot be used out of the
/// way, and sets tables aside that cannot be opened or would be ahead; where no frame is left, everything that tells of
/// those there were. A coordinator starts afterwards, unless the artifact store is another than it was. What tells of a
/// journal that is gone from here and was shipped to a store stays: it keeps a start without that store from beginning
/// anew.
/// Copies of all of it lie in `repaired-<unix_ms>`. Does nothing when nothing is wrong.
///
/// # Errors
/// When the directory is missing, in use, cannot be read or written, or was written by a newer build.
pub fn repair(data_dir: &Path) -> Result<Report> {
    let _lock = DirectoryLock::of_existing(data_dir)?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    repair_on(
        &(Arc::new(SystemDisk) as Arc<dyn Disk>),
        data_dir,
        since.as_millis(),
    )
}

/// The same on another disk, at this time in milliseconds since 1970; whoever calls sees to it that nobody else
/// uses the directory.
///
/// # Errors
/// As [`repair`].
pub fn repair_on(disk: &Arc<dyn Disk>, data_dir: &Path, unix_ms: u128) -> Result<Report> {
    let before = check_on(disk, data_dir)?;
    let mut repair = Repair {
        disk: disk.as_ref(),
        journal: data_dir.join("journal"),
        copies: data_dir.join(format!("repaired-{unix_ms}")),
        mended: Vec::new(),
    };
    if disk.list(&repair.journal).is_ok() {
        repair.mend_journal()?;
    }
    if !before.findings.iter().any(is_for_store) {
        if !repair.mended.is_empty() || tables::probe(data_dir).is_err() {
            repair.set_tables_aside(data_dir)?;
        }
        repair.set_leftovers_aside(data_dir)?;
    }
    if matches!(
        remains::store_id(disk.as_ref(), data_dir),
        Err(Error::StoreId { .. })
    ) {
        let path = remains::store_id_path(data_dir);
        repair.put_aside(&path, "the store of the next start is taken for the right one")?;
    }
    let mut report = check_on(disk, data_dir)?;
    if !repair.mended.is_empty() {
        report.copies = Some(repair.copies);
        report.mended = repair.mended;
    }
    let advice = before.findings.iter().find(|finding| is_about_store(finding));
    report.findings.extend(advice.cloned());
    let gone = before.findings.into_iter().filter(|finding| finding.fatal);
    report.findings.splice(
        0..0,
        gone.map(|mut finding| {
            finding.fatal = false;
            finding.problem = format!("was: {}", finding.problem);
            finding
        }),
    );
    Ok(report)
}

struct Repair<'a> {
    disk: &'a dyn Disk,
    journal: PathBuf,
    copies: PathBuf,
    mended: Vec<String>,
}

impl Repair<'_> {
    fn mend_journal(&mut self) -> Result<()> {
        // Each round gives something up for good, so there are no more rounds than files.
        let rounds = self.list()?.len().saturating_add(2);
        for _ in 0..rounds {
            match journal::read(self.disk, &self.journal, &mut State::default()) {
                Ok(found) => {
                    for path in found.damaged.iter().chain(&self.damaged_before()?) {
                        self.put_aside(path, "a snapshot that cannot be used")?;
                    }
                    return Ok(());
                }
                Err(journal::Error::Damaged { path, offset, .. }) => self.cut(&path, offset)?,
                Err(journal::Error::Io { path, source, .. }) if is_directory(&source) => {
                    self.cut(&path, 0)?
                }
                Err(journal::Error::NoBase { .. }) => {
                    for path in self.list()? {
                        self.put_aside(&path, "which no snapshot leads to")?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Internal(format!(
            "the journal in {} cannot be mended: restore it from a backup",
            self.journal.display()
        )))
    }

    fn list(&self) -> Result<Vec<PathBuf>> {
        let mut paths = self
            .disk
            .list(&self.journal)
            .map_err(file_error("list", &self.journal))?;
        paths.sort();
        Ok(paths)
    }

    /// Snapshots that a start has put out of the way already.
    fn damaged_before(&self) -> Result<Vec<PathBuf>> {
        let mut paths = self.list()?;
        let damaged = |path: &PathBuf| {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            name.starts_with(journal::DAMAGED)
        };
        paths.retain(damaged);
        Ok(paths)
    }

    /// Cuts a segment, and puts those after it aside: their frames follow on what is gone.
    fn cut(&mut self, path: &Path, offset: u64) -> Result<()> {
        let segments = journal::segments(self.disk, &self.journal)?;
        let after = segments
            .iter()
            .map(|(_, segment)| segment)
            .filter(|segment| segment.as_path() > path);
        for segment in after {
            self.put_aside(segment, "which follows on what was cut")?;
        }
        if offset == 0 {
            return self.put_aside(path, "of which nothing can be read");
        }
        let copy = self.copy_of(path)?;
        let bytes = self.disk.read(path).map_err(file_error("read", path))?;
        self.disk
            .write_whole(&copy, &bytes)
            .map_err(file_error("write", &copy))?;
        let mut file = self.disk.open(path, offset).map_err(file_error("cut", path))?;
        file.sync().map_err(file_error("sync", path))?;
        self.mended
            .push(format!("cut {} at byte {offset}", path.display()));
        Ok(())
    }

    fn put_aside(&mut self, path: &Path, why: &str) -> Result<()> {
        let copy = self.copy_of(path)?;
        self.disk.rename(path, &copy).map_err(file_error("move", path))?;
        for directory in [Some(self.copies.as_path()), path.parent()].into_iter().flatten() {
            self.disk
                .sync_directory(directory)
                .map_err(file_error("sync", directory))?;
        }
        self.mended.push(format!("moved {} away, {why}", path.display()));
        Ok(())
    }

    fn set_tables_aside(&mut self, data_dir: &Path) -> Result<()> {
        let tables = data_dir.join(tables::DIRECTORY);
        if self.disk.list(&tables).is_err() {
            return Ok(());
        }
        self.put_aside(&tables, "they are built anew at the next start")
    }

    /// A start refuses to begin anew beside what an older journal left.
    fn set_leftovers_aside(&mut self, data_dir: &Path) -> Result<()> {
        if remains::of_lost_journal(self.disk, data_dir)?.is_none() {
            return Ok(());
        }
        for path in remains::leftovers(self.disk, data_dir) {
            self.put_aside(&path, "left by a journal of which nothing is left")?;
        }
        Ok(())
    }

    /// Where the copy of a file goes; makes room for it.
    fn copy_of(&self, path: &Path) -> Result<PathBuf> {
        self.disk
            .create_directory(&self.copies)
            .map_err(file_error("create", &self.copies))?;
        if let Some(data_dir) = self.copies.parent() {
            self.disk
                .sync_directory(data_dir)
                .map_err(file_error("sync", data_dir))?;
        }
        let taken = self
            .disk
            .list(&self.copies)
            .map_err(file_error("list", &self.copies))?;
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let copy = self.copies.join(&name);
        if taken.contains(&copy) {
            // A segment that is cut twice: what the second cut takes is in the first copy.
            return Ok(self.copies.join(format!("{name}.{}", taken.len())));
        }
        Ok(copy)
    }
}

fn file_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}
