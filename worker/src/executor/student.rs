//! Students as tasks name them: the sorted parent's prefixes, or trained weights.

use espalier_model::Model;
use espalier_proto::task::Student;

use super::{Context, Resident};
use crate::{Error, Result};

/// The student's model: views of the parent, or weights of its own.
///
/// # Errors
/// When the candidate does not fit the parent, or the weights are of another shape.
pub(super) fn load(context: &Context<'_>, resident: &Resident, student: &Student) -> Result<Model> {
    let Some(artifact) = &student.weights else {
        return Ok(resident.model.slice(&student.candidate)?);
    };
    let expected = resident.model.architecture.with_candidate(&student.candidate)?;
    let path = context.store.get_file(&artifact.0)?;
    let model = Model::load(&path, &*context.operations)?;
    if model.architecture != expected {
        let reason = "its weights are of another shape than the candidate's".to_owned();
        return Err(Error::Content {
            artifact: artifact.0.clone(),
            reason,
        });
    }
    Ok(model)
}
