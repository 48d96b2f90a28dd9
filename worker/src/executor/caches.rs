//! What a child keeps between attempts: the parent, or its stage of one, and its activations for one shard.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use espalier_arch::Architecture;
use espalier_model::checkpoint::{Parent, SortedParent};
use espalier_model::ops::Layout;
use espalier_model::runner::Runner;
use espalier_model::sort::Permutation;
use espalier_model::{Model, StageWeights, Tensor};
use espalier_proto::task::{ArtifactId, ParentRef, Shard};

use super::Context;
use super::plan::Training;
use crate::data::shard::{self, Sequences};
use crate::engine::vllm::Vllm;
use crate::{Error, Result};

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

/// A stage of a parent in memory, sorted if its reference says so, and where the rest is.
#[derive(Debug)]
pub(super) struct ResidentStage {
    /// The parent's files.
    pub source: SortedParent,
    /// The stage.
    pub weights: StageWeights,
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
    stage: Option<(ParentRef, Arc<ResidentStage>)>,
    batches: Option<(ParentRef, ArtifactId, bool, Arc<Vec<Batch>>)>,
    finals: FinalStates,
    /// Its process outlives a change of parent: it takes long to start.
    vllm: Option<Vllm>,
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
        *self = Self {
            vllm: self.vllm.take(),
            ..Self::default()
        };
    }

    /// vLLM with the process that the last task left, if it did; the next finds it only when it is given back.
    pub(super) fn take_vllm(&mut self, context: &Context<'_>) -> Vllm {
        self.vllm.take().unwrap_or_else(|| context.vllm())
    }

    /// Keeps vLLM's process for the next task.
    pub(super) fn keep_vllm(&mut self, vllm: Vllm) {
        self.vllm = Some(vllm);
    }

    /// Ends vLLM's process, if one runs.
    pub(super) fn end_vllm(&mut self) {
        self.vllm = None;
    }

    /// Forgets activations but not the parent.
    pub(super) fn clear_batches(&mut self) {
        self.batches = None;
    }

    /// Bytes of the parent's final hidden states that are kept.
    pub(super) fn state_bytes(&self) -> usize {
        self.finals.bytes
    }

    /// Forgets the parent's final hidden states where they are more than this.
    pub(super) fn shrink_states(&mut self, most: usize) {
        if self.finals.bytes > most {
            self.finals = FinalStates::default();
        }
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

    /// The parent's stage with the blocks that `choose` gives of its shape, loaded and sorted on first use. Nothing
    /// else of it is loaded, and nothing kept beside it.
    ///
    /// # Errors
    /// Those of `choose`, when the stage does not fit the device, and as [`Caches::parent`].
    pub(super) fn stage(
        &mut self,
        context: &Context<'_>,
        reference: &ParentRef,
        choose: impl Fn(&Architecture) -> Result<Range<usize>>,
    ) -> Result<Arc<ResidentStage>> {
        if let Some((kept, stage)) = &self.stage
            && kept == reference
            && choose(stage.weights.architecture())? == stage.weights.range()
        {
            return Ok(Arc::clone(stage));
        }
        self.clear();
        context.progress(0, 0, "", || format!("loading a stage of {}", reference.source))?;
        let source = open(context, reference)?;
        let range = choose(&source.parent().architecture)?;
        let operations = &*context.operations;
        let bytes = source.stage_bytes(&range, operations);
        context.plan().expect_room("the parent's stage", bytes)?;
        let weights = source.stage(range, operations)?;
        let stage = Arc::new(ResidentStage { source, weights });
        self.stage = Some((reference.clone(), Arc::clone(&stage)));
        Ok(stage)
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

    /// The parent's final hidden states of some sequences, in their order. They are kept up to the training's
    /// `state_bytes`; those that are not are computed, as many together as its `parent_rows` say.
    pub(super) fn final_states(
        &mut self,
        context: &Context<'_>,
        reference: &ParentRef,
        sequences: &[Sequence<'_>],
        training: &Training,
    ) -> Result<Tensor> {
        let resident = self.parent(context, reference)?;
        if self.finals.of.as_ref() != Some(reference) {
            self.finals = FinalStates {
                of: Some(reference.clone()),
                ..FinalStates::default()
            };
        }
        let mut states: Vec<Option<Tensor>> = sequences
            .iter()
            .map(|sequence| self.finals.states.get(&sequence.key()).cloned())
            .collect();
        let missing: Vec<usize> = (0..sequences.len())
            .filter(|index| states[*index].is_none())
            .collect();
        let tokens_each = sequences
            .first()
            .map_or(1, |sequence| sequence.tokens.len().max(1));
        let together = (training.parent_rows / tokens_each).max(1);
        for piece in missing.chunks(together) {
            let layout = Layout {
                sequences: piece.len(),
                tokens: tokens_each,
            };
            let tokens: Vec<u32> = piece
                .iter()
                .flat_map(|index| sequences[*index].tokens)
                .copied()
                .collect();
            let computed = finals(&resident.runner, &tokens, layout)?;
            if piece.len() == sequences.len() {
                self.finals.keep(sequences, &computed, training.state_bytes)?;
                return Ok(computed);
            }
            for (place, index) in piece.iter().enumerate() {
                let own = computed.narrow_rows(place * tokens_each, tokens_each)?;
                states[*index] = Some(own);
            }
            let computed_of: Vec<Sequence<'_>> = piece.iter().map(|index| sequences[*index]).collect();
            self.finals.keep(&computed_of, &computed, training.state_bytes)?;
        }
        let states: Vec<&Tensor> = states.iter().flatten().collect();
        Ok(match states.as_slice() {
            [only] => (*only).clone(),
            several => context.operations.concatenate(several)?,
        })
    }
}

/// A sequence of a shard.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sequence<'a> {
    /// The shard.
    pub shard: &'a ArtifactId,
    /// Which of its sequences.
    pub index: usize,
    /// Its tokens.
    pub tokens: &'a [u32],
}

impl Sequence<'_> {
    fn key(&self) -> (ArtifactId, usize) {
        (self.shard.clone(), self.index)
    }
}

impl FinalStates {
    /// Keeps what was computed for sequences of equal length, all of it or, where it does not fit, nothing: parts
    /// would hold the memory of the whole.
    fn keep(&mut self, sequences: &[Sequence<'_>], computed: &Tensor, limit: usize) -> Result<()> {
        let bytes = computed.bytes();
        if self.bytes.saturating_add(bytes) > limit {
            return Ok(());
        }
        self.bytes += bytes;
        let each = computed.rows() / sequences.len().max(1);
        for (place, sequence) in sequences.iter().enumerate() {
            let own = computed.narrow_rows(place * each, each)?;
            self.states.insert(sequence.key(), own);
        }
        Ok(())
    }
}

/// Opens a parent in its order; no weight is read.
fn open(context: &Context<'_>, reference: &ParentRef) -> Result<SortedParent> {
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
    let permutation = match &reference.permutation {
        Some(artifact) => {
            let path = context.store.get_file(&artifact.0)?;
            Some(load_permutation(&path, artifact)?)
        }
        None => None,
    };
    Ok(SortedParent::new(parent, permutation)?)
}

fn load(context: &Context<'_>, reference: &ParentRef) -> Result<Resident> {
    let source = open(context, reference)?;
    let operations = &context.operations;
    let blocks = 0..source.parent().architecture.blocks.len();
    let bytes = source.stage_bytes(&blocks, &**operations);
    context.plan().expect_room("the parent", bytes)?;
    let model = source.load(&**operations)?;
    operations.prepare(&model.architecture)?;
    let model = Arc::new(model);
    let runner = Runner::new(Arc::clone(operations), Arc::clone(&model));
    Ok(Resident {
        parent: source.into_parent(),
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

/// Sequences as batches of about so many rows that run together.
pub(super) fn layouts(sequences: &Sequences, rows: usize) -> Vec<(Layout, Vec<u32>)> {
    let together = (rows / sequences.sequence_tokens.max(1)).max(1);
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
    let plan = context.plan();
    let keep = with_inputs && bytes <= plan.input_bytes();
    let mut batches = Vec::new();
    for (layout, tokens) in layouts(sequences, plan.rows(&resident.model.architecture)) {
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
