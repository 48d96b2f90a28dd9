//! How an attempt begins: with a fresh trainer, or with the one that earlier attempts left.

use std::time::Instant;

use espalier_model::train::{Grid, Parts, Trainer};
use espalier_proto::task::ArtifactId;

use super::checkpoint::{Checkpoint, Checkpoints};
use super::losses::Losses;
use super::teacher::Teacher;
use super::{Attempt, Course};
use crate::executor::Caches;
use crate::{Error, Result};

/// Checkpoints that cannot be used before an attempt begins afresh.
const MOST_UNUSABLE: usize = 100;

impl Attempt<'_, '_> {
    /// A fresh trainer, or the one that earlier attempts left.
    pub(super) fn begin(&self, caches: &mut Caches, checkpoints: &Checkpoints<'_, '_>) -> Result<Course> {
        // Ranks find each other once, whatever becomes of the checkpoints.
        let grid = self.team.grid()?;
        let earlier = self.earlier(checkpoints)?;
        let mut trainer = match &earlier {
            Some((_, parts)) => {
                let (operations, kept) = (self.operations(), self.training.activation_bytes);
                self.taught(Trainer::resume(operations, parts, self.blocks()?, grid, kept)?)?
            }
            None => self.fresh(grid)?,
        };
        // Calls between trainers have deadlines, and some ranks have read for longer than others.
        self.team.meet()?;
        let (before, losses, earlier_seconds) = match earlier {
            Some((
                Checkpoint {
                    before,
                    losses,
                    seconds,
                    ..
                },
                _,
            )) => (before, losses, seconds),
            None => (self.guard_loss(caches, &mut trainer)?, Losses::default(), 0.0),
        };
        Ok(Course {
            trainer,
            before,
            losses,
            earlier_seconds,
            begun: Instant::now(),
        })
    }

    /// The furthest checkpoint that every rank can use, with what this rank needs of its shares.
    ///
    /// # Errors
    /// When a rank cannot tell whether it can use one: what is there may be had by the next attempt.
    fn earlier(&self, checkpoints: &Checkpoints<'_, '_>) -> Result<Option<(Checkpoint, Parts)>> {
        let mut unusable: Vec<Vec<ArtifactId>> = Vec::new();
        // Looked for again after each that is of no use: its attempt may be at work yet and have replaced it.
        while unusable.len() < MOST_UNUSABLE
            && let Some((checkpoint, whose)) = checkpoints.furthest(self.task, self.steps, &unusable)?
        {
            let opened = match self.opened(checkpoints, &checkpoint) {
                Ok(parts) => Some(parts),
                Err(error) if says_unusable(&error) => {
                    tracing::warn!(%error, whose, "a checkpoint cannot be used");
                    None
                }
                Err(error) => return Err(error),
            };
            let is_unusable = self.team.any(opened.is_none())?;
            if let Some(parts) = opened.filter(|_| !is_unusable) {
                let step = checkpoint.losses.steps();
                tracing::info!(step, whose, "going on from a checkpoint");
                self.context.goes_on_from(step * self.step_tokens());
                return Ok(Some((checkpoint, parts)));
            }
            unusable.push(checkpoint.shares);
        }
        Ok(None)
    }

    /// What this rank needs of a checkpoint's shares, which are of the student's shape and the step that the record says.
    fn opened(&self, checkpoints: &Checkpoints<'_, '_>, checkpoint: &Checkpoint) -> Result<Parts> {
        let parts = checkpoints.open(checkpoint, &self.blocks()?)?;
        let (steps, recorded) = (parts.steps(), checkpoint.losses.steps());
        let reason = if *parts.architecture() != self.student {
            "it is of a model of another shape".to_owned()
        } else if usize::try_from(steps) != Ok(recorded) {
            format!("it is of step {steps}, expected {recorded}, of which its record has the losses")
        } else {
            return Ok(parts);
        };
        let shares: Vec<&str> = checkpoint.shares.iter().map(|share| share.0.as_str()).collect();
        Err(Error::Content {
            artifact: shares.join(", "),
            reason,
        })
    }

    fn fresh(&self, grid: Option<Grid>) -> Result<Trainer> {
        let (operations, kept) = (self.operations(), self.training.activation_bytes);
        let candidate = &self.task.candidate;
        let untrained = self.teacher.untrained(&*operations, candidate, self.blocks()?)?;
        let trainer = match grid {
            None => Trainer::new(operations, &untrained.into_model()?, kept)?,
            Some(grid) => Trainer::join(operations, &untrained, grid, kept)?,
        };
        self.taught(trainer)
    }

    /// The trainer, with the parent's stage where there are several: their states are nowhere to be found whole.
    fn taught(&self, trainer: Trainer) -> Result<Trainer> {
        match &self.teacher {
            Teacher::Whole(_) => Ok(trainer),
            Teacher::Stage(stage) => Ok(trainer.with_parent(stage.weights.clone())?),
        }
    }
}

/// Whether a checkpoint is gone or is not what it should be. Anything else says nothing about it: a disk that is full, or a
/// store that does not answer, must not cost what it holds.
fn says_unusable(error: &Error) -> bool {
    use std::io::ErrorKind;

    use espalier_artifact::Error as Artifact;
    use espalier_model::Error as Model;
    match error {
        Error::Content { .. } => true,
        Error::Artifact(Artifact::Name { .. } | Artifact::NotFound { .. } | Artifact::Damaged { .. }) => true,
        // It went away, or was cut, while it was opened.
        Error::Artifact(Artifact::Io { source, .. }) | Error::Model(Model::Io { source, .. }) => matches!(
            source.kind(),
            ErrorKind::NotFound | ErrorKind::UnexpectedEof | ErrorKind::InvalidData
        ),
        Error::Model(error) => matches!(
            error,
            Model::Damaged { .. }
                | Model::MissingState { .. }
                | Model::CheckpointTensor { .. }
                | Model::TensorShape { .. }
                | Model::OutOfRange { .. }
        ),
        _ => false,
    }
}
