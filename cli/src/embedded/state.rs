//! What an embedded run leaves on disk beside its outcome: journal, artifacts and logs, which a coordinator can go on
//! from, and whether they stay.

use std::path::Path;

use anyhow::Context;
use espalier_proto::v1::{Job, JobState, Stage};
use tempfile::TempDir;

use crate::{failure, output};

/// Journal, artifacts and logs of one embedded run, beside the output so that they share its file system.
pub(super) struct State {
    directory: TempDir,
    keep: bool,
}

/// Stages that end before it is known that the limits can be met at all: where the job goes no further than these, it is
/// the spec that has to change.
const BEFOREHAND: [&str; 4] = ["ingest", "profile", "calibrate", "sort"];

/// What a run leaves to go on from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nothing,
    /// A job that has not ended.
    Unfinished,
    /// A job that failed after it had found something out that takes long.
    Failed {
        job: String,
    },
}

impl Left {
    /// By how the run ended; `submitted` is whether there was a job by then.
    pub(super) fn by(ended: &anyhow::Result<Job>, submitted: bool) -> Self {
        match ended {
            // An interrupt cancels the job.
            Err(error) if submitted && !failure::is_interrupted(error) => Self::Unfinished,
            Err(_) => Self::Nothing,
            Ok(job) if !output::has_ended(job) => Self::Unfinished,
            Ok(job) if job.state() == JobState::Failed && job.stages.iter().any(is_of_worth) => {
                Self::Failed { job: job.id.clone() }
            }
            Ok(_) => Self::Nothing,
        }
    }
}

fn is_of_worth(stage: &Stage) -> bool {
    stage.tasks_done > 0 && !BEFOREHAND.contains(&stage.kind.as_str())
}

impl State {
    pub(super) fn create(output: &Path, keep: bool) -> anyhow::Result<Self> {
        let mut beside = output.parent();
        while let Some(directory) = beside.filter(|directory| !directory.is_dir()) {
            beside = directory.parent();
        }
        let beside = beside.unwrap_or_else(|| Path::new("/"));
        let directory = tempfile::Builder::new()
            .prefix(".espalier-")
            .tempdir_in(beside)
            .with_context(|| {
                format!(
                    "cannot create a directory for the run's state in {}",
                    beside.display()
                )
            })?;
        Ok(Self { directory, keep })
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Removes the state, unless it is to be kept or somebody can go on from it; then says where it is and by which
    /// commands, `workers` among them.
    pub(super) fn finish(mut self, left: &Left, cost_tables: Option<&Path>, workers: &[String]) {
        let path = self.path().to_owned();
        if !self.keep && *left == Left::Nothing {
            if let Err(error) = self.directory.close() {
                output::say(&format!("cannot remove {}: {error}", path.display()));
            }
            return;
        }
        self.directory.disable_cleanup(true);
        let commands = commands(&path, left, cost_tables, workers);
        let to_go_on = if commands.is_empty() {
            ""
        } else {
            "; to go on from there:"
        };
        output::say(&format!("state kept in {}{to_go_on}", path.display()));
        for command in commands {
            output::say(&format!("  {command}"));
        }
    }
}

/// What goes on with the job, in this order; each of the first ones stays.
fn commands(state: &Path, left: &Left, cost_tables: Option<&Path>, workers: &[String]) -> Vec<String> {
    if *left == Left::Nothing {
        return Vec::new();
    }
    let mut coordinator = format!(
        "espalier coordinator --data-dir {}",
        word(&state.to_string_lossy())
    );
    if let Some(cost_tables) = cost_tables {
        coordinator.push_str(&format!(
            " --cost-tables {}",
            word(&cost_tables.to_string_lossy())
        ));
    }
    let mut commands = vec![coordinator];
    commands.extend_from_slice(workers);
    if let Left::Failed { job } = left {
        commands.push(format!("espalier job retry {job}"));
    }
    commands
}

/// A word as a shell reads it.
pub(super) fn word(text: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:,=+@%".contains(letter);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ended(state: JobState, scored: u32) -> anyhow::Result<Job> {
        let stage = |kind: &str, tasks_done| Stage {
            kind: kind.to_owned(),
            tasks_done,
            ..Stage::default()
        };
        Ok(Job {
            id: "job-1".to_owned(),
            state: state.into(),
            stages: vec![stage("ingest", 1), stage("profile", 1), stage("score", scored)],
            ..Job::default()
        })
    }

    #[test]
    fn what_a_failed_job_has_found_out_is_left_and_nothing_of_one_whose_spec_has_to_change() {
        let failed = Left::Failed {
            job: "job-1".to_owned(),
        };
        let cases = [
            (ended(JobState::Failed, 1), failed),
            (ended(JobState::Failed, 0), Left::Nothing),
            (ended(JobState::Succeeded, 1), Left::Nothing),
            (ended(JobState::Cancelled, 1), Left::Nothing),
            (ended(JobState::Running, 1), Left::Unfinished),
            (Err(failure::machine("the disk is full")), Left::Unfinished),
            (Err(failure::interrupted()), Left::Nothing),
        ];
        for (how, left) in cases {
            assert_eq!(Left::by(&how, true), left, "{how:?}");
        }
        assert_eq!(Left::by(&Err(failure::usage("the spec")), false), Left::Nothing);
    }

    #[test]
    fn a_state_that_can_be_gone_on_from_is_kept_and_others_are_not() {
        let place = tempfile::tempdir().unwrap();
        for (left, keep, stays) in [
            (Left::Nothing, false, false),
            (Left::Nothing, true, true),
            (Left::Unfinished, false, true),
        ] {
            let state = State::create(&place.path().join("out"), keep).unwrap();
            let path = state.path().to_owned();
            std::fs::write(path.join("journal"), "what was found out").unwrap();
            state.finish(&left, None, &[]);
            assert_eq!(path.join("journal").exists(), stays, "{left:?}, {keep}");
        }
    }

    #[test]
    fn only_a_job_that_failed_has_to_be_retried_and_paths_are_quoted() {
        let workers = ["espalier worker run".to_owned()];
        let said = |left: &Left, tables| commands(Path::new("/a b/.x"), left, tables, &workers).join("; ");
        assert_eq!(said(&Left::Nothing, None), "");
        assert_eq!(
            said(&Left::Unfinished, Some(Path::new("/t"))),
            "espalier coordinator --data-dir '/a b/.x' --cost-tables /t; espalier worker run"
        );
        let job = "job-1".to_owned();
        assert_eq!(
            said(&Left::Failed { job }, None),
            "espalier coordinator --data-dir '/a b/.x'; espalier worker run; espalier job retry job-1"
        );
        assert_eq!(word("it's"), r"'it'\''s'");
    }
}
