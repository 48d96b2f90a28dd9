//! Students as tasks name them: the sorted parent's prefixes, or trained weights.

use std::sync::Arc;

use espalier_arch::Architecture;
use espalier_model::runner::Runner;
use espalier_model::weights::SavedModel;
use espalier_proto::task::{ArtifactId, Student};

use super::Context;
use super::parent::{Blocks, Streamed, has_room};
use crate::{Error, Result};

/// A student with weights of its own.
#[derive(Debug)]
pub(super) enum Trained {
    /// All of it is on the device.
    Whole(Runner),
    /// What stands around its blocks is.
    Streamed(Streamed<SavedModel>),
}

impl Trained {
    /// The student's own weights, where it has any: as much of them as the device has room for.
    ///
    /// # Errors
    /// When they cannot be read, are of another shape than the candidate's, or not even two blocks have room.
    pub fn load(context: &Context<'_>, parent: &Architecture, student: &Student) -> Result<Option<Self>> {
        let Some(artifact) = &student.weights else {
            return Ok(None);
        };
        let saved = open(context, artifact, &parent.with_candidate(&student.candidate)?)?;
        if !has_room(context, &saved, "the student") {
            const LEAST: &str = "the student's embedding, its head and two of its blocks";
            return Ok(Some(Self::Streamed(Streamed::load(context, saved, LEAST)?)));
        }
        let model = Arc::new(saved.load(&*context.operations)?);
        let runner = Runner::new(Arc::clone(&context.operations), model);
        Ok(Some(Self::Whole(runner)))
    }

    /// Its blocks.
    pub fn blocks(&self) -> Blocks<'_> {
        match self {
            Self::Whole(runner) => Blocks::of(runner),
            Self::Streamed(streamed) => streamed.blocks(),
        }
    }
}

/// Trained weights of a model of this shape, opened.
///
/// # Errors
/// When they cannot be read, or are of another shape.
pub(super) fn open(
    context: &Context<'_>,
    artifact: &ArtifactId,
    expected: &Architecture,
) -> Result<SavedModel> {
    let path = context.store.get_file(&artifact.0)?;
    let saved = SavedModel::open(&path)?;
    if saved.architecture() != expected {
        let reason = "its weights are of another shape than the candidate's".to_owned();
        return Err(Error::Content {
            artifact: artifact.0.clone(),
            reason,
        });
    }
    Ok(saved)
}
