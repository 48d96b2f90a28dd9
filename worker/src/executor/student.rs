//! Students as tasks name them: the sorted parent's prefixes, or trained weights.

use espalier_arch::Architecture;
use espalier_model::Model;
use espalier_model::weights::SavedModel;
use espalier_proto::task::{ArtifactId, Student};

use super::Context;
use crate::{Error, Result};

/// The student's own weights, loaded, where it has any.
///
/// # Errors
/// When they cannot be read, or are of another shape than the candidate's.
pub(super) fn trained(
    context: &Context<'_>,
    parent: &Architecture,
    student: &Student,
) -> Result<Option<Model>> {
    let Some(artifact) = &student.weights else {
        return Ok(None);
    };
    let saved = open(context, artifact, &parent.with_candidate(&student.candidate)?)?;
    Ok(Some(saved.load(&*context.operations)?))
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
