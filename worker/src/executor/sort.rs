//! Sort: sums of all shards, merged in the order given, become the order of every prunable axis.

use espalier_model::importance::Importance;
use espalier_proto::task::{ArtifactId, Sort, TaskOutput};

use super::{Context, parent};
use crate::{Error, Result};

pub(super) fn run(context: &Context<'_>, task: &Sort) -> Result<TaskOutput> {
    let total = task.importance.len();
    let mut merged: Option<Importance> = None;
    for (index, artifact) in task.importance.iter().enumerate() {
        context.progress(index, total, "shards", String::new)?;
        let sums = load(context, artifact)?;
        match &mut merged {
            Some(merged) => merged.add(&sums)?,
            None => merged = Some(sums),
        }
    }
    let merged = merged.ok_or_else(|| Error::Invalid {
        reason: "importance is empty, expected the sums of at least one shard".to_owned(),
    })?;
    // A few of its tensors are read, one at a time; what is kept of it in memory stays.
    let files = parent::open(context, &task.parent)?;
    let permutation = files.parent().permutation(&merged, &*context.operations)?;
    let permutation = context.put_written(|path| permutation.save(path))?;
    context.progress(total, total, "shards", String::new)?;
    Ok(TaskOutput::Sort { permutation })
}

fn load(context: &Context<'_>, artifact: &ArtifactId) -> Result<Importance> {
    let path = context.store.get_file(&artifact.0)?;
    Importance::load(&path).map_err(|error| Error::Content {
        artifact: artifact.0.clone(),
        reason: error.to_string(),
    })
}
