//! Export: a Hugging Face directory, with what the parent carried beside its weights.

use std::path::Path;

use espalier_proto::task::{Export, Exported};

use super::{Caches, Context, student};
use crate::Result;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Export) -> Result<Exported> {
    let resident = caches.parent(context, &task.parent)?;
    caches.clear_batches();
    context.progress(0, 1, "directories", || task.directory.clone())?;
    let model = student::load(context, &resident, &task.student)?;
    // What was trained in f32 is written in the type that the parent came in, unless that was wider.
    let precision = resident.parent.stored_precision();
    let written =
        espalier_model::export::export(&model, &resident.parent, Path::new(&task.directory), precision)?;
    context.progress(1, 1, "directories", String::new)?;
    Ok(Exported {
        directory: task.directory.clone(),
        weight_bytes: written.weight_bytes,
        parameters: written.parameters,
        needs_remote_code: !written.uniform,
    })
}
