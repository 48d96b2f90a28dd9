//! What an attempt leaves for the next: every rank's share of weights and moments, and a record that names them.
//!
//! A share is an artifact. The record is written last, by the first rank and under its attempt's number, once every
//! rank has said what its share is called. Shares are read by any number of ranks. Where a device computes by itself a
//! share is written by a thread beside training.

use std::ops::Range;
use std::path::PathBuf;
use std::thread::JoinHandle;

use espalier_artifact::{BlockingStore, Name};
use espalier_model::train::{Parts, Trainer, Writing};
use espalier_proto::task::{ArtifactId, Recover};
use serde::{Deserialize, Deserializer, Serialize};

use super::losses::Losses;
use super::team::Team;
use crate::executor::Context;
use crate::{Error, Result};

/// The record of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Checkpoint {
    /// Of every rank, in their order.
    pub shares: Vec<ArtifactId>,
    /// The guard's loss before the first step. JSON has no word for one that is not a number.
    #[serde(deserialize_with = "number_or_null")]
    pub before: f64,
    /// Of all steps so far.
    pub losses: Losses,
    /// Spent on them.
    pub seconds: f64,
}

fn number_or_null<'de, D: Deserializer<'de>>(json: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(json)?.unwrap_or(f64::NAN))
}

/// A checkpoint whose share this rank is writing.
#[derive(Debug)]
pub(super) struct Begun {
    share: Share,
    before: f64,
    losses: Losses,
    seconds: f64,
}

#[derive(Debug)]
enum Share {
    Written(ArtifactId),
    OnItsWay(OnItsWay),
}

/// A share that a thread writes. One that nobody waits for any more is waited for when it is dropped.
#[derive(Debug)]
struct OnItsWay(Option<JoinHandle<Result<ArtifactId>>>);

impl OnItsWay {
    /// Whether [`OnItsWay::finish`] would not wait.
    fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn finish(mut self) -> Result<ArtifactId> {
        let written = self.0.take().map(JoinHandle::join);
        written.and_then(std::result::Result::ok).unwrap_or_else(|| {
            Err(Error::Child {
                reason: "the thread that writes a checkpoint has panicked".to_owned(),
            })
        })
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // Nobody asks what came of it.
            let _ = thread.join();
        }
    }
}

/// The checkpoints of a task.
pub(super) struct Checkpoints<'a, 'b> {
    context: &'a Context<'b>,
    team: &'a Team,
    about: Name,
    /// The last one of this attempt.
    own: Option<Checkpoint>,
}

impl<'a, 'b> Checkpoints<'a, 'b> {
    /// Those of attempts at the same question as `task`.
    ///
    /// # Errors
    /// When the task cannot be written as JSON.
    pub fn of(context: &'a Context<'b>, team: &'a Team, task: &Recover) -> Result<Self> {
        // Of everything that decides the result; not of where an attempt starts from.
        let asked = Recover {
            resume: None,
            ..task.clone()
        };
        let json = serde_json::to_vec(&asked).map_err(|error| Error::Invalid {
            reason: error.to_string(),
        })?;
        Ok(Self {
            context,
            team,
            about: Name::of(&json),
            own: None,
        })
    }

    /// The checkpoint that `task` names, else of those that attempts have recorded by now the one with the most steps;
    /// with whose it is. None whose shares are among `unusable`. Every rank gets what the first one finds.
    ///
    /// # Errors
    /// When the store cannot be read, or a rank was lost.
    pub fn furthest(
        &self,
        task: &Recover,
        steps: usize,
        unusable: &[Vec<ArtifactId>],
    ) -> Result<Option<(Checkpoint, String)>> {
        let found = self.team.is_first().then(|| self.recorded(task, steps, unusable));
        self.team.first(found.transpose()?)
    }

    fn recorded(
        &self,
        task: &Recover,
        steps: usize,
        unusable: &[Vec<ArtifactId>],
    ) -> Result<Option<(Checkpoint, String)>> {
        let store = self.context.store;
        let recorded = match &task.resume {
            Some(artifact) => vec![("named by the task".to_owned(), store.get_bytes(&artifact.0)?)],
            None => {
                let records = store.records(&self.about)?.into_iter();
                records
                    .map(|(attempt, bytes)| (format!("of attempt {attempt}"), bytes))
                    .collect()
            }
        };
        let mut checkpoints = Vec::with_capacity(recorded.len());
        for (whose, bytes) in recorded {
            match serde_json::from_slice::<Checkpoint>(&bytes) {
                Ok(checkpoint) if checkpoint.losses.steps() <= steps => checkpoints.push((checkpoint, whose)),
                Ok(_) | Err(_) => tracing::warn!(whose, "the record of a checkpoint cannot be read"),
            }
        }
        checkpoints.retain(|(checkpoint, _)| !unusable.contains(&checkpoint.shares));
        checkpoints.sort_by_key(|(checkpoint, _)| std::cmp::Reverse(checkpoint.losses.steps()));
        Ok(checkpoints.into_iter().next())
    }

    /// A checkpoint's shares, as many as hold what blocks `range` need, each fetched and at once opened: a cache may not
    /// have room for two of them.
    ///
    /// # Errors
    /// When one is missing or damaged, or they do not belong together.
    pub fn open(&self, checkpoint: &Checkpoint, range: &Range<usize>) -> Result<Parts> {
        let ranks = checkpoint.shares.len();
        let fetch = |rank: usize| -> Result<PathBuf> {
            let share = checkpoint.shares.get(rank).map_or("", |share| share.0.as_str());
            Ok(self.context.store.get_file(share)?)
        };
        Parts::open_for(range, self.team.nearest_first(ranks).into_iter().map(fetch))
    }

    /// Begins to write what this rank keeps. [`Checkpoints::finish`] has to follow, on every rank.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn begin(&self, trainer: &Trainer, before: f64, losses: &Losses, seconds: f64) -> Result<Begun> {
        let share = match self.context.operations.accelerator() {
            // Beside the training there would be a copy of everything, which the host has no room for.
            None => Share::Written(self.write(trainer)?),
            Some(_) => {
                let path = self.context.store.scratch_path()?;
                let writing = trainer.save_beside(path.clone())?;
                let store = self.context.store.again()?;
                let thread = std::thread::Builder::new().name("share".to_owned());
                let thread = thread.spawn(move || take_in(&store, writing, path));
                let thread = thread.map_err(|error| Error::Child {
                    reason: format!("cannot start the thread that takes a checkpoint in: {error}"),
                })?;
                Share::OnItsWay(OnItsWay(Some(thread)))
            }
        };
        let losses = losses.clone();
        Ok(Begun {
            share,
            before,
            losses,
            seconds,
        })
    }

    /// Writes what this rank keeps, now.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, trainer: &Trainer) -> Result<ArtifactId> {
        self.context.put_written(|path| trainer.save(path))
    }

    /// Records a checkpoint once every rank's share is there; then the first rank, which alone reads and writes records,
    /// removes the shares of the one before.
    ///
    /// # Errors
    /// When a share or the record cannot be written, or a rank was lost.
    pub fn finish(&mut self, begun: Begun) -> Result<()> {
        let share = match begun.share {
            Share::Written(share) => share,
            Share::OnItsWay(share) => share.finish()?,
        };
        let checkpoint = Checkpoint {
            shares: self.team.gather(share)?,
            before: begun.before,
            losses: begun.losses,
            seconds: begun.seconds,
        };
        if self.team.is_first() {
            let json = serde_json::to_vec(&checkpoint).map_err(|error| Error::Invalid {
                reason: error.to_string(),
            })?;
            let attempt = self.context.attempt;
            self.context.store.set_record(&self.about, attempt, &json)?;
        }
        // Until the new one is recorded the one before is what an attempt would go on from.
        self.team.meet()?;
        let previous = self.own.replace(checkpoint);
        self.discard(previous.as_ref());
        Ok(())
    }

    /// Checkpoints are large, and only the last one matters. An attempt removes only what it wrote itself, and
    /// only while no other's record names it: at the same step every attempt writes the same bytes, which are
    /// stored once.
    fn discard(&self, previous: Option<&Checkpoint>) {
        if !self.team.is_first() {
            return;
        }
        let Some(previous) = previous else { return };
        let current = self
            .own
            .as_ref()
            .map(|own| own.shares.as_slice())
            .unwrap_or_default();
        let removed = self.context.store.records(&self.about).and_then(|records| {
            for share in previous.shares.iter().filter(|share| !current.contains(share)) {
                // Whoever goes on from there removes it, or it is collected as garbage.
                if !is_anothers(&records, self.context.attempt, share) {
                    self.context.store.remove(&share.0)?;
                }
            }
            Ok(())
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "an old checkpoint cannot be removed");
        }
    }
}

impl Begun {
    /// Whether this rank's share is there, so that [`Checkpoints::finish`] does not wait for it.
    pub fn is_written(&self) -> bool {
        match &self.share {
            Share::Written(_) => true,
            Share::OnItsWay(share) => share.is_done(),
        }
    }
}

/// Takes a file in as an artifact once it is written. On an error nothing stays.
fn take_in(store: &BlockingStore, writing: Writing, path: PathBuf) -> Result<ArtifactId> {
    let stored = writing
        .finish()
        .map_err(Error::from)
        .and_then(|_| Ok(store.put_file(&path)?));
    if stored.is_err() {
        // The error that matters is the one above.
        let _ = std::fs::remove_file(&path);
    }
    Ok(ArtifactId(stored?.to_string()))
}

/// Whether the record of another attempt names this artifact; what the record says of it does not matter.
fn is_anothers<R: AsRef<[u8]>>(records: &[(u64, R)], own: u64, artifact: &ArtifactId) -> bool {
    let name = artifact.0.as_bytes();
    let names = |record: &[u8]| record.windows(name.len().max(1)).any(|window| window == name);
    records
        .iter()
        .any(|(attempt, record)| *attempt != own && names(record.as_ref()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use espalier_proto::task::ArtifactId;

    use super::*;

    #[test]
    fn a_record_of_a_loss_that_is_not_a_number_is_read_again() {
        let mut losses = Losses::default();
        losses.push(0.5);
        let record = Checkpoint {
            shares: vec![ArtifactId("ab".repeat(32))],
            before: f64::NAN,
            losses,
            seconds: 2.0,
        };
        let json = serde_json::to_vec(&record).unwrap();
        let read: Checkpoint = serde_json::from_slice(&json).unwrap();
        assert!(read.before.is_nan());
        assert_eq!((read.shares, read.losses), (record.shares, record.losses));
        let json = String::from_utf8(json).unwrap();
        let read: Checkpoint = serde_json::from_str(&json.replace("null", "1.25")).unwrap();
        assert_eq!(read.before, 1.25);
        let without = serde_json::from_str::<Checkpoint>(&json.replace("\"before\":null,", ""));
        assert!(without.unwrap_err().to_string().contains("before"));
    }

    #[test]
    fn a_checkpoint_is_anothers_while_the_record_of_another_attempt_names_it() {
        let (ours, theirs) = (ArtifactId("ab".repeat(32)), ArtifactId("cd".repeat(32)));
        let record = |share: &ArtifactId| format!("{{\"shares\":[\"{share}\"],\"losses\":[]}}");
        let alone = [(7, record(&ours)), (3, record(&theirs))];
        assert!(!is_anothers(&alone, 7, &ours));
        let equal_steps = [(7, record(&ours)), (3, record(&ours))];
        assert!(is_anothers(&equal_steps, 7, &ours));
        assert!(!is_anothers(&equal_steps, 7, &theirs));
    }
}
