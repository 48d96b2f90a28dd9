//! The parent as executors run it: whole on the device, or, where that has no room for it, only what stands around its
//! blocks, which are then read again for each walk over them.

use std::sync::Arc;

use espalier_arch::Architecture;
use espalier_model::checkpoint::{BlockFiles, Parent, SortedParent};
use espalier_model::runner::Runner;
use espalier_model::sort::Permutation;
use espalier_model::{BlockWeights, Model};
use espalier_proto::task::{ArtifactId, ParentRef};

use super::Context;
use super::plan::Plan;
use crate::{Error, Result};

/// A parent in memory, sorted if its reference says so.
#[derive(Debug)]
pub(super) struct Resident {
    /// Config, tokenizer, side files.
    pub parent: Parent,
    /// Its weights.
    pub model: Arc<Model>,
    /// Runs it.
    pub runner: Runner,
}

/// A model of which only the ends are in memory.
#[derive(Debug)]
pub(super) struct Streamed<Files> {
    files: Files,
    /// Embedding, final norm and head: a model of no blocks.
    ends: Runner,
}

/// What of a parent is in memory. Clones are the same.
#[derive(Debug, Clone)]
pub(super) enum Held {
    /// All of it.
    Whole(Arc<Resident>),
    /// What stands around its blocks.
    Streamed(Arc<Streamed<SortedParent>>),
}

/// A model's blocks in their order, and what stands around them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks<'a> {
    runner: &'a Runner,
    /// Where the blocks are read from; none where the runner's model has them.
    files: Option<&'a dyn BlockFiles>,
}

impl Held {
    /// Loads what the device has room for.
    ///
    /// # Errors
    /// When a file cannot be read, the parent has changed since ingest, its permutation does not fit, or not even two of its
    /// blocks have room beside what stands around them.
    pub fn load(context: &Context<'_>, reference: &ParentRef) -> Result<Self> {
        let files = open(context, reference)?;
        if !has_room(context, &files, "the parent") {
            const LEAST: &str = "the parent's embedding, its head and two of its blocks";
            return Ok(Self::Streamed(Arc::new(Streamed::load(context, files, LEAST)?)));
        }
        Ok(Self::Whole(Arc::new(Resident::load(context, files)?)))
    }

    /// Config, tokenizer, side files.
    pub fn parent(&self) -> &Parent {
        match self {
            Self::Whole(resident) => &resident.parent,
            Self::Streamed(streamed) => streamed.files.parent(),
        }
    }

    /// The parent's shape.
    pub fn architecture(&self) -> &Architecture {
        &self.parent().architecture
    }

    /// Bytes of weights that were read, of one that is streamed.
    #[cfg(test)]
    pub fn loaded_bytes(&self) -> usize {
        match self {
            Self::Whole(_) => 0,
            Self::Streamed(streamed) => streamed.files.loaded_bytes(),
        }
    }

    /// Its blocks.
    pub fn blocks(&self) -> Blocks<'_> {
        match self {
            Self::Whole(resident) => Blocks::of(&resident.runner),
            Self::Streamed(streamed) => streamed.blocks(),
        }
    }

    /// Refuses a parent whose files are not those that were opened: whoever streams reads them again.
    ///
    /// # Errors
    /// When they have changed, or cannot be read.
    pub fn expect_unchanged(&self, reference: &ParentRef) -> Result<()> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Streamed(streamed) => expect_fingerprint(streamed.files.parent(), reference),
        }
    }
}

/// Whether the device holds all of a model beside a little that runs through it. Where it does not, that is said once: its
/// blocks will be streamed.
pub(super) fn has_room(context: &Context<'_>, files: &dyn BlockFiles, what: &str) -> bool {
    let bytes = files.bytes(&*context.operations);
    let Some(free) = context.plan().too_little_for(files.architecture(), bytes) else {
        return true;
    };
    let (needed, free) = (bytes.div_ceil(1 << 20), free >> 20);
    tracing::info!("{what} needs {needed} MiB, the device has {free}: its blocks are streamed");
    false
}

impl<Files: BlockFiles> Streamed<Files> {
    /// Loads what stands around the blocks.
    ///
    /// # Errors
    /// When not even two of the blocks, which `least` names with what stands around them, have room beside it, and when a
    /// file cannot be read any more.
    pub fn load(context: &Context<'_>, files: Files, least: &'static str) -> Result<Self> {
        let (operations, model) = (&context.operations, &files as &dyn BlockFiles);
        let needed = model
            .ends_bytes(&**operations)
            .saturating_add(model.walk_bytes(&**operations));
        context.plan().expect_room(least, needed)?;
        operations.prepare(model.architecture())?;
        let ends = Arc::new(model.ends(&**operations)?);
        let ends = Runner::new(Arc::clone(operations), ends);
        Ok(Self { files, ends })
    }

    /// Its blocks.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks {
            runner: &self.ends,
            files: Some(&self.files),
        }
    }
}

impl Resident {
    /// Loads all of a parent.
    ///
    /// # Errors
    /// When it has no room, or a file cannot be read any more.
    pub fn load(context: &Context<'_>, files: SortedParent) -> Result<Self> {
        let operations = &context.operations;
        let bytes = (&files as &dyn BlockFiles).bytes(&**operations);
        context.plan().expect_room("the parent", bytes)?;
        let model = files.load(&**operations)?;
        operations.prepare(&model.architecture)?;
        let model = Arc::new(model);
        let runner = Runner::new(Arc::clone(operations), Arc::clone(&model));
        Ok(Self {
            parent: files.into_parent(),
            model,
            runner,
        })
    }
}

impl<'a> Blocks<'a> {
    /// Those of a model that is in memory.
    pub fn of(runner: &'a Runner) -> Self {
        Self { runner, files: None }
    }

    /// Embeds, norms and has the head; runs blocks that it is given.
    pub fn runner(self) -> &'a Runner {
        self.runner
    }

    /// Whether a walk reads them.
    pub fn are_read(self) -> bool {
        self.files.is_some()
    }

    /// The model's shape.
    pub fn architecture(self) -> &'a Architecture {
        match self.files {
            Some(files) => files.architecture(),
            None => &self.runner.model().architecture,
        }
    }

    /// How much is done at a time beside the blocks that a walk brings.
    pub fn plan(self, context: &Context<'_>) -> Plan {
        let walking = self
            .files
            .map_or(0, |files| files.walk_bytes(&*context.operations));
        context.plan().with_less(walking)
    }

    /// Bytes of hidden states that should go through the blocks together, beside `kept` that will be held meanwhile: as
    /// many as there is room for where a walk costs reading, no more than must where it does not.
    pub fn room(self, context: &Context<'_>, kept: usize) -> usize {
        match self.files {
            Some(_) => self.plan(context).with_less(kept).stream_bytes(),
            None => 0,
        }
    }

    /// Gives `visit` the weights of each of `blocks`, in this order.
    ///
    /// # Errors
    /// When there is no such block, a file cannot be read any more or the attempt should stop, and those of `visit`.
    pub fn walk(
        self,
        context: &Context<'_>,
        blocks: &[usize],
        mut visit: impl FnMut(usize, &BlockWeights) -> Result<()>,
    ) -> Result<()> {
        if let Some(files) = self.files {
            let waiting = || context.look_for_stop();
            return files.walk(blocks, &*context.operations, waiting, visit);
        }
        for block in blocks {
            let (_, weights) = self.runner.block_parts(*block)?;
            visit(*block, weights)?;
        }
        Ok(())
    }
}

/// Opens a parent in its order; no weight is read.
///
/// # Errors
/// When a file cannot be read, it has changed since ingest, or its permutation does not fit.
pub(super) fn open(context: &Context<'_>, reference: &ParentRef) -> Result<SortedParent> {
    let parent = Parent::open(&reference.source)?;
    expect_fingerprint(&parent, reference)?;
    let permutation = match &reference.permutation {
        Some(artifact) => Some(permutation(context, artifact)?),
        None => None,
    };
    Ok(SortedParent::new(parent, permutation)?)
}

/// Refuses files that are not those that the job began with.
///
/// # Errors
/// When they are not, or cannot be read.
pub(super) fn expect_fingerprint(parent: &Parent, reference: &ParentRef) -> Result<()> {
    let fingerprint = parent.fingerprint()?;
    if fingerprint == reference.fingerprint {
        return Ok(());
    }
    Err(Error::Invalid {
        reason: format!(
            "the parent {} has changed since the job began: its fingerprint is {fingerprint}, expected {}; \
             submit the job again",
            reference.source, reference.fingerprint
        ),
    })
}

fn permutation(context: &Context<'_>, artifact: &ArtifactId) -> Result<Permutation> {
    let path = context.store.get_file(&artifact.0)?;
    Permutation::load(&path).map_err(|error| Error::Content {
        artifact: artifact.0.clone(),
        reason: error.to_string(),
    })
}
