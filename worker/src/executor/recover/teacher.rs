//! What a rank holds of the parent: all of it, or only its stage where there are several; and the untrained student
//! that is cut out of it.

use std::ops::Range;
use std::sync::Arc;

use espalier_arch::{Architecture, Candidate};
use espalier_model::StageWeights;
use espalier_model::ops::Operations;
use espalier_proto::task::{ArtifactId, Recover};

use super::team::Team;
use crate::Result;
use crate::executor::caches::ResidentStage;
use crate::executor::parent::Resident;
use crate::executor::{Caches, Context};

/// The parent, as one rank has it.
pub(super) enum Teacher {
    /// Its final states are made here.
    Whole(Arc<Resident>),
    /// Its states pass through the ranks.
    Stage(Arc<ResidentStage>),
}

impl Teacher {
    /// Loads what this rank needs.
    ///
    /// # Errors
    /// When it cannot be loaded or does not fit the device, or the parent has fewer blocks than there are stages.
    pub fn load(context: &Context<'_>, caches: &mut Caches, task: &Recover, team: &Team) -> Result<Self> {
        if team.layers().stages == 1 {
            return Ok(Self::Whole(caches.parent(context, &task.parent)?));
        }
        let tokens = task.shards.first().map_or(0, |shard| shard.sequence_tokens);
        let choose = |architecture: &Architecture| team.blocks(architecture, tokens);
        let stage = caches.stage(context, &task.parent, choose)?;
        tracing::debug!(
            blocks = ?stage.weights.range(),
            bytes = stage.weights.bytes(),
            "a stage of the parent is loaded"
        );
        Ok(Self::Stage(stage))
    }

    /// The shape of the whole parent.
    pub fn architecture(&self) -> &Architecture {
        match self {
            Self::Whole(resident) => &resident.model.architecture,
            Self::Stage(stage) => stage.weights.architecture(),
        }
    }

    /// Blocks `range` of the untrained student. What of them lies in the parent's other stages is read for it alone: it
    /// should be dropped once the trainer has its copy.
    ///
    /// # Errors
    /// When the candidate does not fit the parent, or the parent's files cannot be read any more.
    pub fn untrained(
        &self,
        operations: &dyn Operations,
        candidate: &Candidate,
        range: Range<usize>,
    ) -> Result<StageWeights> {
        Ok(match self {
            Self::Whole(resident) => StageWeights::of(&resident.model.slice(candidate)?, range)?,
            Self::Stage(stage) => {
                let held = &stage.weights;
                stage.source.student_stage(candidate, range, held, operations)?
            }
        })
    }

    /// Writes the whole untrained student; from the parent's files, past the device, where that has only a stage.
    ///
    /// # Errors
    /// When the candidate does not fit the parent, its files cannot be read any more, or the store cannot be written.
    pub fn write_untrained(&self, context: &Context<'_>, candidate: &Candidate) -> Result<ArtifactId> {
        context.put_written(|path| match self {
            Self::Whole(resident) => resident.model.slice(candidate)?.save(path, &*context.operations),
            Self::Stage(stage) => stage.source.student(candidate)?.save(path),
        })
    }
}
