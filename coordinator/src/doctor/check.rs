//! Finding out what is wrong, changing nothing.

use std::ffi::CString;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::{Finding, Report};
use crate::archive::Archives;
use crate::journal::disk::{Disk, SystemDisk};
use crate::journal::{self, Fold};
use crate::lock::DirectoryLock;
use crate::scheduler::State;
use crate::shipping::CLAIMANT_FILE;
use crate::{Error, Result, remains, tables};

const STORE_BUILDS_IT: &str = ": a start with the --store it was shipped to builds it anew";
const STORE_HAS_IT: &str = "the journal was shipped to the store that the coordinator ran with (--store): start it \
     with an empty data directory and the same --store and --cluster, and it goes on from there. A repaired one is \
     refused where the store has more";

/// Looks at everything in a data directory that no coordinator runs on. Changes nothing.
///
/// # Errors
/// When the directory is missing, in use, or cannot be read. What is damaged is a finding, not an error.
pub fn check(data_dir: &Path) -> Result<Report> {
    let _lock = DirectoryLock::to_look_at(data_dir)?;
    check_on(&(Arc::new(SystemDisk) as Arc<dyn Disk>), data_dir)
}

/// The same on another disk; whoever calls sees to it that nobody else uses the directory.
///
/// # Errors
/// As [`check`].
pub fn check_on(disk: &Arc<dyn Disk>, data_dir: &Path) -> Result<Report> {
    let mut report = Report::of(data_dir);
    let mut state = State::default();
    let directory = data_dir.join("journal");
    if disk.list(&directory).is_err() {
        // A coordinator begins one.
        report.starts = true;
    } else {
        check_start(disk.as_ref(), &directory, &mut state, &mut report)?;
        check_snapshots(disk.as_ref(), &directory, &mut report)?;
        check_frames(disk.as_ref(), &directory, &mut report)?;
    }
    check_archives(disk, data_dir, &state, &mut report)?;
    check_remains(disk.as_ref(), data_dir, &mut report)?;
    tell_of_store(disk.as_ref(), data_dir, &mut report);
    check_store_id(disk.as_ref(), data_dir, &mut report);
    check_tables(data_dir, &mut report);
    report.findings.sort_by_key(|finding| !finding.fatal);
    Ok(report)
}

/// Looking at tables may write to them, and takes them for oneself.
fn check_tables(data_dir: &Path, report: &mut Report) {
    let directory = data_dir.join(tables::DIRECTORY);
    let file = File::open(&directory);
    let taken = file.as_ref().map(File::try_lock);
    let problem = if !can_be_written(data_dir) {
        "the tables were not looked at: nothing can be written here".to_owned()
    } else if matches!(taken, Ok(Err(TryLockError::WouldBlock))) {
        "the tables were not looked at: another check looks at them".to_owned()
    } else if let Err(problem) = tables::probe(data_dir) {
        format!("{problem}: they are set aside and built anew at the next start")
    } else {
        return;
    };
    report.find(&directory, problem, false);
}

fn check_start(disk: &dyn Disk, directory: &Path, state: &mut State, report: &mut Report) -> Result<()> {
    match journal::read(disk, directory, state) {
        Ok(found) => {
            report.starts = true;
            report.last_frame = found.end.next.saturating_sub(1);
            if found.end.torn > 0 {
                let path = found.end.last.as_deref().unwrap_or(directory);
                let problem = format!(
                    "ends with {} bytes of a commit that never ended: they are cut at the next start",
                    found.end.torn
                );
                report.find(path, problem, false);
            }
            Ok(())
        }
        Err(journal::Error::Io { path, source, .. }) if is_directory(&source) => {
            let problem =
                "a directory lies where a file of the journal should: nothing can be read from there on";
            report.find(&path, problem, true);
            Ok(())
        }
        Err(error @ journal::Error::Io { .. }) => Err(error.into()),
        Err(error) => {
            let path = match &error {
                journal::Error::Damaged { path, .. } | journal::Error::TooNew { path, .. } => path,
                _ => directory,
            };
            report.find(path, error.to_string(), true);
            Ok(())
        }
    }
}

pub(super) fn is_directory(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::IsADirectory
}

/// A journal that holds nothing where others left something is refused, unless it was shipped to a store.
fn check_remains(disk: &dyn Disk, data_dir: &Path, report: &mut Report) -> Result<()> {
    if report.last_frame > 0 || report.findings.iter().any(|finding| finding.fatal) {
        return Ok(());
    }
    let Some(other) = remains::of_lost_journal(disk, data_dir)? else {
        return Ok(());
    };
    let was_shipped = disk.read(&data_dir.join(CLAIMANT_FILE)).is_ok();
    let problem = format!(
        "holds nothing, but {} was left by one that did{}",
        other.display(),
        if was_shipped { STORE_BUILDS_IT } else { "" }
    );
    report.find(&data_dir.join("journal"), problem, !was_shipped);
    report.starts = was_shipped;
    Ok(())
}

/// Which store it was is known here; which one the next start names is known only where there never was a --store.
fn check_store_id(disk: &dyn Disk, data_dir: &Path, report: &mut Report) {
    let path = remains::store_id_path(data_dir);
    let problem = match remains::store_id(disk, data_dir) {
        Err(error) => error.to_string(),
        Ok(Some(id)) if disk.read(&data_dir.join(CLAIMANT_FILE)).is_err() => {
            let own = remains::own_store(data_dir);
            let found = match espalier_artifact::id_of_directory(&own) {
                Ok(Some(found)) if found == id => return,
                Ok(Some(found)) => format!("is store {found}"),
                Ok(None) => "is no store".to_owned(),
                Err(error) => format!("cannot be told: {error}"),
            };
            format!(
                "names store {id}, but {} {found}: mount the right one there, or remove this file to take what is \
                 there in its place",
                own.display()
            )
        }
        Ok(_) => return,
    };
    report.find(&path, problem, true);
    report.starts = false;
}

/// Damage is no reason to go on with less where an intact copy was shipped.
fn tell_of_store(disk: &dyn Disk, data_dir: &Path, report: &mut Report) {
    let claimant = data_dir.join(CLAIMANT_FILE);
    let has_lost = report.findings.iter().any(|finding| finding.fatal);
    if has_lost && disk.read(&claimant).is_ok() {
        report.find(&claimant, STORE_HAS_IT, false);
    }
}

/// Whether this says that the journal is gone from here, but not from the store.
pub(super) fn is_for_store(finding: &Finding) -> bool {
    finding.problem.ends_with(STORE_BUILDS_IT)
}

pub(super) fn is_about_store(finding: &Finding) -> bool {
    finding.problem == STORE_HAS_IT
}

fn check_snapshots(disk: &dyn Disk, directory: &Path, report: &mut Report) -> Result<()> {
    for (sequence, path) in journal::snapshots(disk, directory)? {
        let parsed =
            journal::read_snapshot(disk, &path, sequence).map(|json| State::default().restore(&json));
        match parsed {
            Ok(Ok(())) => report.snapshots = report.snapshots.saturating_add(1),
            Ok(Err(what)) => report.find(&path, format!("the state in it does not parse: {what}"), false),
            Err(journal::Error::Io { source, .. }) if is_directory(&source) => {
                report.find(&path, "a directory lies where a snapshot should", false);
            }
            Err(error @ journal::Error::Io { .. }) => return Err(error.into()),
            Err(error) => report.find(&path, error.to_string(), false),
        }
    }
    Ok(())
}

/// Looks at frames that a start would not read, too: an older snapshot may need them one day.
fn check_frames(disk: &dyn Disk, directory: &Path, report: &mut Report) -> Result<()> {
    let segments = journal::segments(disk, directory)?;
    report.segments = segments.len();
    let before = segments.first().map_or(0, |(first, _)| first.saturating_sub(1));
    match journal::read_frames(disk, directory, before, &mut |_, _| Ok(())) {
        Ok(_) => {}
        // It was found before, where a start would read it.
        Err(journal::Error::Io { source, .. }) if is_directory(&source) => {}
        Err(error @ journal::Error::Io { .. }) => return Err(error.into()),
        Err(error) => {
            let problem = error.to_string();
            let known = report.findings.iter().any(|finding| finding.problem == problem);
            if let (journal::Error::Damaged { path, .. } | journal::Error::TooNew { path, .. }, false) =
                (&error, known)
            {
                report.find(path, problem, false);
            }
        }
    }
    Ok(())
}

/// Archives against themselves, and against what the journal says of them.
fn check_archives(disk: &Arc<dyn Disk>, data_dir: &Path, state: &State, report: &mut Report) -> Result<()> {
    let archives = Archives::new(Arc::clone(disk), data_dir);
    let jobs = archives
        .jobs()
        .map_err(|error| Error::Internal(error.to_string()))?;
    for archived in state.archived().filter(|archived| !jobs.contains(&archived.id)) {
        let problem = format!(
            "is missing: restore it from the artifact store or a backup, or {} is known by its summary only",
            archived.id
        );
        report.find(&archives.path(archived.id), problem, false);
    }
    if let Some(unknown) = jobs
        .iter()
        .find(|job| **job > state.last_job())
        .filter(|_| report.starts)
    {
        let problem = format!(
            "is of a job after {}, the last that the journal knows: the journal has lost its end, which no repair brings \
             back; archives of such jobs are kept under other names at the next start",
            state.last_job()
        );
        report.find(&archives.path(*unknown), problem, false);
    }
    for job in jobs {
        match archives.read(job) {
            Ok(_) => report.archives = report.archives.saturating_add(1),
            Err(error) => report.find(&archives.path(job), error.to_string(), false),
        }
    }
    Ok(())
}

fn can_be_written(directory: &Path) -> bool {
    let Ok(path) = CString::new(directory.as_os_str().as_bytes()) else {
        return true;
    };
    // SAFETY: `path` ends with a null byte.
    let refused = unsafe { libc::access(path.as_ptr(), libc::W_OK) } != 0;
    let error = io::Error::last_os_error();
    // On a disk that is not the machine's there may be no such directory.
    !(refused
        && matches!(
            error.kind(),
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied
        ))
}
