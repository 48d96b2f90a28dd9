//! Export: a Hugging Face directory, with what the parent carried beside its weights. An attempt writes to a directory
//! of its own; the one that is promoted is moved into place with the outcome.
//!
//! One tensor after the other goes through the host's memory, from the file of what was trained or the parent's own: no
//! device needs room for it, and what was not trained is written as the parent has it, not as a device rounds it: in f16 or
//! bf16 where that is the parent's, in f32 where it has any wider matrix; of a quantised one in bf16.

use std::path::Path;

use espalier_arch::TensorSpec;
use espalier_model::Tensor;
use espalier_model::checkpoint::{Precision, SortedParent};
use espalier_model::export::{self, Tensors};
use espalier_model::ops::cpu::CpuOperations;
use espalier_proto::task::{Export, Exported, Student};

use super::{Context, parent, student};
use crate::{Error, Result};

pub(super) fn run(context: &Context<'_>, task: &Export) -> Result<Exported> {
    context.progress(0, 1, "directories", || task.directory.clone())?;
    let files = parent::open(context, &task.parent)?;
    let mut exported = Exported {
        directory: task.directory.clone(),
        attempt: context.attempt,
        weight_bytes: 0,
        parameters: 0,
        needs_remote_code: false,
    };
    let place = exported.written_to();
    let place = Path::new(&place);
    if exported.attempt != 0 && place.is_dir() {
        // Numbers come again when a coordinator has lost the end of its journal; the name is this attempt's alone.
        std::fs::remove_dir_all(place).map_err(|source| Error::Io {
            path: place.to_owned(),
            source,
        })?;
    }
    let written = write(context, &files, &task.student, place)?;
    context.progress(1, 1, "directories", String::new)?;
    exported.weight_bytes = written.weight_bytes;
    exported.parameters = written.parameters;
    exported.needs_remote_code = !written.uniform;
    Ok(exported)
}

fn write(
    context: &Context<'_>,
    files: &SortedParent,
    asked: &Student,
    place: &Path,
) -> Result<export::Exported> {
    let cut = files.student(&asked.candidate)?;
    let host = CpuOperations::new();
    let saved = match &asked.weights {
        Some(artifact) => Some(student::open(context, artifact, cut.architecture())?),
        None => None,
    };
    let tensor = |spec: &TensorSpec| -> espalier_model::Result<Tensor> {
        // It is no operation of the device's, yet something is done.
        context.beat();
        match &saved {
            Some(saved) => saved.tensor(spec, &host),
            None => cut.tensor(spec),
        }
    };
    let tensors = Tensors {
        architecture: cut.architecture(),
        tensor: &tensor,
        operations: &host,
    };
    // What was trained in f32 is written in the type that the parent came in, unless that was wider.
    let written = |precision| export::export_tensors(tensors, files.parent(), place, precision);
    match written(files.parent().stored_precision()) {
        Err(error @ espalier_model::Error::BeyondF16 { .. }) => {
            tracing::warn!(%error, "training has led beyond the parent's float16: the export is written in bfloat16");
            Ok(written(Precision::Bf16)?)
        }
        done => Ok(done?),
    }
}
