//! The directory of an outcome: filled beside its place under another name, and renamed last.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use espalier_proto::task::{ATTEMPT_SUFFIX, Exported};

/// Where an outcome grows before it is complete: `output.partial`.
pub fn partial(output: &Path) -> PathBuf {
    let mut name = OsString::from(output);
    name.push(".partial");
    PathBuf::from(name)
}

/// Refuses an output that a job could not be put at.
///
/// # Errors
/// One line for the user.
pub fn check_free(output: &Path) -> Result<(), String> {
    if !output.is_absolute() {
        return Err(format!(
            "output: `{}` is relative: give an absolute path",
            output.display()
        ));
    }
    if fs::symlink_metadata(output).is_ok() {
        return Err(format!(
            "output: `{}` exists: choose another directory, or move it away",
            output.display()
        ));
    }
    let partial = partial(output);
    if fs::symlink_metadata(&partial).is_ok() {
        return Err(format!(
            "output: `{}` is left over from an interrupted job: remove it, or choose another directory",
            partial.display()
        ));
    }
    let ancestors = output.ancestors().skip(1);
    let there = ancestors.into_iter().find(|ancestor| ancestor.exists());
    let there = there.unwrap_or_else(|| Path::new("/"));
    let probe = there.join(probe_name());
    fs::create_dir(&probe)
        .and_then(|()| fs::remove_dir(&probe))
        .map_err(|error| {
            format!(
                "output: nothing can be made in `{}` ({error}): choose another directory",
                there.display()
            )
        })
}

/// A name that neither another check nor another coordinator, which may have the same process id in its container,
/// takes at the same time, and that one left behind does not have.
fn probe_name() -> String {
    static PROBES: AtomicU64 = AtomicU64::new(0);
    let number = PROBES.fetch_add(1, Ordering::Relaxed);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!(
        ".espalier-probe-{}-{number}-{}",
        std::process::id(),
        since.as_nanos()
    )
}

/// Writes the reports and moves the whole into place. May be called again after an interruption.
///
/// # Errors
/// One line for the user.
pub fn finish(write_report: &dyn Fn(&Path) -> Result<(), String>, output: &Path) -> Result<(), String> {
    let partial = partial(output);
    if let Err(error) = move_into_place(write_report, &partial, output) {
        // A coordinator that came before this one may have done it, at any moment since this one began.
        let moved_before = !partial.is_dir() && output.join("report.json").is_file();
        if !moved_before {
            return Err(error);
        }
    }
    let parent = output.parent().unwrap_or_else(|| Path::new("/"));
    fs::File::open(parent)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| format!("cannot sync `{}`: {error}", parent.display()))
}

fn move_into_place(
    write_report: &dyn Fn(&Path) -> Result<(), String>,
    partial: &Path,
    output: &Path,
) -> Result<(), String> {
    if !partial.is_dir() {
        return Err(format!(
            "`{}` has disappeared while the job ran",
            partial.display()
        ));
    }
    if fs::symlink_metadata(output).is_ok() {
        // A rename would replace an empty directory silently, and fail on anything else.
        return Err(format!(
            "`{}` appeared while the job ran: move it away and retry the job",
            output.display()
        ));
    }
    write_report(partial)?;
    let moved = sync_tree(partial).and_then(|()| fs::rename(partial, output));
    moved.map_err(|error| {
        format!(
            "cannot move `{}` to `{}`: {error}",
            partial.display(),
            output.display()
        )
    })
}

/// Moves the directory that the promoted attempt exported to its place in `partial`, and removes those of the
/// attempts beside it. May be called again after an interruption.
///
/// # Errors
/// One line for the user.
pub fn promote(exported: &Exported, partial: &Path) -> Result<(), String> {
    let named = |path: &str| Path::new(path).file_name().map(|name| partial.join(name));
    let (Some(place), Some(written)) = (named(&exported.directory), named(&exported.written_to())) else {
        return Err(format!("`{}` names no directory", exported.directory));
    };
    if written != place && written.is_dir() {
        fs::rename(&written, &place).map_err(|error| {
            format!(
                "cannot move `{}` to `{}`: {error}",
                written.display(),
                place.display()
            )
        })?;
    }
    let Some(prefix) = place.file_name().and_then(|name| name.to_str()) else {
        return Ok(());
    };
    let prefix = format!("{prefix}{ATTEMPT_SUFFIX}");
    let others =
        fs::read_dir(partial).map_err(|error| format!("cannot read `{}`: {error}", partial.display()))?;
    for entry in others.flatten() {
        // Those still being written have a name of their own before this one.
        if entry.file_name().to_string_lossy().contains(&prefix) {
            let path = entry.path();
            fs::remove_dir_all(&path)
                .map_err(|error| format!("cannot remove `{}`: {error}", path.display()))?;
        }
    }
    Ok(())
}

/// Removes what a job had half-written.
///
/// # Errors
/// One line for the log.
pub fn remove_partial(output: &Path) -> Result<(), String> {
    let partial = partial(output);
    match fs::remove_dir_all(&partial) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("cannot remove `{}`: {error}", partial.display())),
    }
}

/// Makes files and names below a directory durable, before a rename promises that they are there.
fn sync_tree(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            fs::File::open(&path)?.sync_all()?;
        }
    }
    fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn only_the_promoted_attempt_s_export_is_moved_into_place() {
        let directory = tempfile::tempdir().unwrap();
        let partial = directory.path();
        for attempt in [3, 7, 12] {
            let written = partial.join(format!("checkpoint.attempt-{attempt}"));
            fs::create_dir(&written).unwrap();
            fs::write(written.join("config.json"), attempt.to_string()).unwrap();
        }
        let exported = Exported {
            directory: "/out/checkpoint".to_owned(),
            attempt: 7,
            weight_bytes: 0,
            parameters: 0,
            needs_remote_code: false,
        };
        for _ in 0..2 {
            promote(&exported, partial).unwrap();
            let text = fs::read_to_string(partial.join("checkpoint/config.json")).unwrap();
            assert_eq!(text, "7");
            assert_eq!(fs::read_dir(partial).unwrap().count(), 1);
        }
    }

    #[test]
    fn an_output_below_a_place_where_nothing_can_be_made_is_refused() {
        let refused = check_free(Path::new("/proc/nowhere/out"));
        assert!(
            refused.is_err_and(|message| message.contains("nothing can be made in `/proc`")),
            "an output below /proc was accepted"
        );
    }

    #[test]
    fn an_output_that_appears_while_the_job_runs_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("out");
        fs::create_dir(partial(&output)).unwrap();
        fs::create_dir(&output).unwrap();
        let refused = finish(&|_| Ok(()), &output).unwrap_err();
        assert!(refused.contains("appeared while the job ran"), "{refused}");
        assert!(partial(&output).is_dir(), "what the job made was touched");
        fs::remove_dir(&output).unwrap();
        fs::write(partial(&output).join("report.json"), "{}").unwrap();
        finish(&|_| Ok(()), &output).unwrap();
        finish(&|_| Ok(()), &output).unwrap();
        assert!(output.join("report.json").is_file());
    }

    #[test]
    fn an_outcome_that_another_coordinator_moved_into_place_meanwhile_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("out");
        fs::create_dir(partial(&output)).unwrap();
        let other = |partial: &Path| {
            fs::write(partial.join("report.json"), "{}").unwrap();
            fs::rename(partial, &output).unwrap();
            Err("the report cannot be written: there is no such directory".to_owned())
        };
        finish(&other, &output).unwrap();
        assert!(output.join("report.json").is_file());
    }

    #[test]
    fn outputs_beside_each_other_are_checked_at_once_and_a_probe_left_behind_is_in_nobodys_way() {
        let directory = tempfile::tempdir().unwrap();
        let left = format!(".espalier-probe-{}", std::process::id());
        fs::create_dir(directory.path().join(left)).unwrap();
        let check = |number: usize| check_free(&directory.path().join(format!("out-{number}")));
        std::thread::scope(|scope| {
            let checks: Vec<_> = (0..4)
                .map(|thread| scope.spawn(move || (0..64).try_for_each(|round| check(thread * 64 + round))))
                .collect();
            for checked in checks {
                assert_eq!(checked.join().unwrap(), Ok(()));
            }
        });
    }
}
