//! What a child keeps between attempts: the parent, and its activations for one shard.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use espalier_model::checkpoint::Parent;
use espalier_model::ops::Layout;
use espalier_model::runner::Runner;
use espalier_model::sort::Permutation;
use espalier_model::{Model, Tensor};
use espalier_proto::task::{ArtifactId, ParentRef, Shard};

use super::Context;
use crate::data::shard::{self, Sequences};
use crate::{Error, Result};

/// Block inputs are kept when they fit in this many bytes; else they are computed again for each block.
const BLOCK_INPUT_BYTES: usize = 1 << 30;
/// Final hidden states of the parent that may be kept over recoveries.
const FINAL_STATE_BYTES: usize = 512 << 20;
/// Rows that run through the model together.
pub(super) const BATCH_ROWS: usize = 2048;

/// A parent in memory, sorted if its reference says so.
#[derive(Debug)]
pub struct Resident {
    /// Config, tokenizer, side files.
    pub parent: Parent,
    /// Its weights.
    pub model: Arc<Model>,
    /// Runs it.
    pub runner: Runner,
}

/// Activations of the parent for some sequences that run together.
#[derive(Debug)]
pub(super) struct Batch {
    /// How the rows divide into sequences.
    pub layout: Layout,
    /// The tokens of every row.
    pub tokens: Vec<u32>,
    /// The input of each block, when they are kept.
    pub inputs: Option<Vec<Tensor>>,
    /// Hidden states after the final norm, `(rows, hidden)`.
    pub finals: Tensor,
}

/// What a child keeps between attempts.
#[derive(Debug, Default)]
pub struct Caches {
    parent: Option<(ParentRef, Arc<Resident>)>,
    batches: Option<(ParentRef, ArtifactId, bool, Arc<Vec<Batch>>)>,
    finals: FinalStates,
}

/// The parent's final hidden states of single sequences, for recoveries that share data.
#[derive(Debug, Default)]
struct FinalStates {
    of: Option<ParentRef>,
    states: HashMap<(ArtifactId, usize), Tensor>,
    bytes: usize,
}

impl Caches {
    /// Forgets everything, for executors that need the memory or measure.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Forgets activations but not the parent.
    pub(super) fn clear_batches(&mut self) {
        self.batches = None;
    }

    /// The parent, loaded and sorted on first use.
    ///
    /// # Errors
    /// When it cannot be loaded, has changed since ingest, or its permutation does not fit.
    pub(super) fn parent(&mut self, context: &Context<'_>, reference: &ParentRef) -> Result<Arc<Resident>> {
        if let Some((kept, resident)) = &self.parent
            && kept == reference
        {
            return Ok(Arc::clone(resident));
        }
        self.clear();
        context.progress(0, 0, "", || format!("loading {}", reference.source))?;
        let resident = Arc::new(load(context, reference)?);
        self.parent = Some((reference.clone(), Arc::clone(&resident)));
        Ok(resident)
    }

    /// A shard's tokens and the parent's activations for them, computed on first use. Block inputs are among
    /// them when `with_inputs` and they fit.
    pub(super) fn batches(
        &mut self,
        context: &Context<'_>,
        reference: &ParentRef,
        shard: &Shard,
        with_inputs: bool,
    ) -> Result<Arc<Vec<Batch>>> {
        let resident = self.parent(context, reference)?;
        if let Some((parent, artifact, inputs, batches)) = &self.batches
            && parent == reference
            && *artifact == shard.artifact
            && (*inputs || !with_inputs)
        {
            return Ok(Arc::clone(batches));
        }
        self.batches = None;
        let sequences = shard::read(context.store, shard, resident.model.architecture.vocab_size)?;
        let batches = Arc::new(run_batches(context, &resident, &sequences, with_inputs)?);
        self.batches = Some((
            reference.clone(),
            shard.artifact.clone(),
            with_inputs,
            Arc::clone(&batches),
        ));
        Ok(batches)
    }

    /// The parent's final hidden states of one sequence of a shard.
    pub(super) fn final_states(
        &mut self,
        context: &Context<'_>,
        reference: &ParentRef,
        shard: &ArtifactId,
        index: usize,
        tokens: &[u32],
    ) -> Result<Tensor> {
        if self.finals.of.as_ref() != Some(reference) {
            self.finals = FinalStates {
                of: Some(reference.clone()),
                ..FinalStates::default()
            };
        }
        let key = (shard.clone(), index);
        if let Some(states) = self.finals.states.get(&key) {
            return Ok(states.clone());
        }
        let resident = self.parent(context, reference)?;
        let layout = Layout {
            sequences: 1,
            tokens: tokens.len(),
        };
        let states = finals(&resident.runner, tokens, layout)?;
        let bytes = states.bytes();
        if self.finals.bytes + bytes <= FINAL_STATE_BYTES {
            self.finals.of = Some(reference.clone());
            self.finals.bytes += bytes;
            self.finals.states.insert(key, states.clone());
        }
        Ok(states)
    }
}

fn load(context: &Context<'_>, reference: &ParentRef) -> Result<Resident> {
    let parent = Parent::open(&reference.source)?;
    let fingerprint = parent.fingerprint()?;
    if fingerprint != reference.fingerprint {
        return Err(Error::Invalid {
            reason: format!(
                "the parent {} has changed since the job began: its fingerprint is {fingerprint}, expected {}; \
                 submit the job again",
                reference.source, reference.fingerprint
            ),
        });
    }
    let operations = &context.operations;
    let mut model = parent.load(&**operations)?;
    if let Some(permutation) = &reference.permutation {
        let path = context.store.get_file(&permutation.0)?;
        model = load_permutation(&path, permutation)?.apply(&model, &**operations)?;
    }
    let model = Arc::new(model);
    let runner = Runner::new(Arc::clone(operations), Arc::clone(&model));
    Ok(Resident {
        parent,
        model,
        runner,
    })
}

fn load_permutation(path: &Path, artifact: &ArtifactId) -> Result<Permutation> {
    Permutation::load(path).map_err(|error| Error::Content {
        artifact: artifact.0.clone(),
        reason: error.to_string(),
    })
}

/// Hidden states after the final norm.
pub(super) fn finals(runner: &Runner, tokens: &[u32], layout: Layout) -> Result<Tensor> {
    let hidden = runner.embed(tokens)?;
    let blocks = runner.model().blocks.len();
    let hidden = runner.blocks(0..blocks, &hidden, layout)?;
    Ok(runner.final_norm(&hidden)?)
}

/// Sequences as batches of rows that run together.
pub(super) fn layouts(sequences: &Sequences) -> Vec<(Layout, Vec<u32>)> {
    let together = (BATCH_ROWS / sequences.sequence_tokens.max(1)).max(1);
    sequences
        .pieces(together)
        .into_iter()
        .map(|piece| {
            (
                Layout {
                    sequences: piece.len(),
                    tokens: piece.sequence_tokens,
                },
                piece.tokens,
            )
        })
        .collect()
}

fn run_batches(
    context: &Context<'_>,
    resident: &Resident,
    sequences: &Sequences,
    with_inputs: bool,
) -> Result<Vec<Batch>> {
    let (blocks, hidden) = (resident.model.blocks.len(), resident.model.architecture.hidden);
    let bytes = sequences
        .tokens
        .len()
        .saturating_mul(hidden * context.operations.activation_bytes())
        .saturating_mul(blocks);
    let keep = with_inputs && bytes <= BLOCK_INPUT_BYTES;
    let mut batches = Vec::new();
    for (layout, tokens) in layouts(sequences) {
        context.check_cancelled()?;
        let mut hidden = resident.runner.embed(&tokens)?;
        let mut inputs = Vec::new();
        for index in 0..blocks {
            context.check_cancelled()?;
            let output = resident.runner.block(index, &hidden, layout)?;
            let input = std::mem::replace(&mut hidden, output);
            if keep {
                inputs.push(input);
            }
        }
        let finals = resident.runner.final_norm(&hidden)?;
        batches.push(Batch {
            layout,
            tokens,
            inputs: keep.then_some(inputs),
            finals,
        });
    }
    Ok(batches)
}
