//! Export: a Hugging Face directory, with what the parent carried beside its weights. An attempt writes to a directory
//! of its own; the one that is promoted is moved into place with the outcome.

use std::path::Path;

use espalier_proto::task::{Export, Exported};

use super::{Caches, Context, student};
use crate::{Error, Result};

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Export) -> Result<Exported> {
    let resident = caches.parent(context, &task.parent)?;
    caches.clear_batches();
    context.progress(0, 1, "directories", || task.directory.clone())?;
    let model = student::load(context, &resident, &task.student)?;
    // What was trained in f32 is written in the type that the parent came in, unless that was wider.
    let precision = resident.parent.stored_precision();
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
    let written =
        espalier_model::export::export(&model, &resident.parent, place, precision, &*context.operations)?;
    context.progress(1, 1, "directories", String::new)?;
    exported.weight_bytes = written.weight_bytes;
    exported.parameters = written.parameters;
    exported.needs_remote_code = !written.uniform;
    Ok(exported)
}
