//! What a child keeps between attempts: the parent, its ends or its stage of one, and its activations for one shard.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use espalier_arch::Architecture;
use espalier_model::checkpoint::SortedParent;
use espalier_model::ops::Layout;
use espalier_model::runner::Runner;
use espalier_model::{StageWeights, Tensor};
use espalier_proto::task::{ArtifactId, ParentRef, Shard};

use super::Context;
use super::parent::{self, Blocks, Held, Resident};
use super::plan::Training;
use super::streams::{Arrived, Form, Part, Start, Unit, through};
use crate::Result;
use crate::data::shard::{self, Sequences};
use crate::engine::vllm::Vllm;

/// A stage of a parent in memory, sorted if its reference says so, and where the rest is.
#[derive(Debug)]
pub(super) struct ResidentStage {
    /// The parent's files.
    pub source: SortedParent,
    /// The stage.
    pub weights: StageWeights,
}

/// The parent's last states for some sequences that run together.
#[derive(Debug)]
pub(super) struct Batch {
    /// How the rows divide into sequences.
    pub layout: Layout,
    /// The tokens of every row.
    pub tokens: Vec<u32>,
    /// Hidden states after the final norm, `(rows, hidden)`.
    pub finals: Tensor,
}

/// The batches of a shard.
#[derive(Debug)]
struct Batches {
    of: (ParentRef, ArtifactId),
    list: Arc<Vec<Batch>>,
    /// Inputs of blocks, one for each batch: those of all blocks where they fit, else of the one after the last that something
    /// branched off before.
    inputs: BTreeMap<usize, Vec<Tensor>>,
}

/// What a child keeps between attempts.
#[derive(Debug, Default)]
pub struct Caches {
    parent: Option<(ParentRef, Held)>,
    stage: Option<(ParentRef, Arc<ResidentStage>)>,
    batches: Option<Batches>,
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
    pub(crate) fn end_vllm(&mut self) {
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

    /// The parent or its ends, loaded and sorted on first use.
    ///
    /// # Errors
    /// When it cannot be loaded, has changed since ingest, or its permutation does not fit.
    pub(super) fn held(&mut self, context: &Context<'_>, reference: &ParentRef) -> Result<Held> {
        if let Some((kept, held)) = &self.parent
            && kept == reference
        {
            held.expect_unchanged(reference)?;
            return Ok(held.clone());
        }
        self.clear();
        context.progress(0, 0, "", || format!("loading {}", reference.source))?;
        let held = Held::load(context, reference)?;
        self.parent = Some((reference.clone(), held.clone()));
        Ok(held)
    }

    /// The whole parent, loaded and sorted on first use.
    ///
    /// # Errors
    /// As [`Caches::held`], and when the device has no room for all of it.
    pub(super) fn parent(&mut self, context: &Context<'_>, reference: &ParentRef) -> Result<Arc<Resident>> {
        if let Some((kept, Held::Whole(resident))) = &self.parent
            && kept == reference
        {
            return Ok(Arc::clone(resident));
        }
        self.clear();
        context.progress(0, 0, "", || format!("loading {}", reference.source))?;
        let resident = Arc::new(Resident::load(context, parent::open(context, reference)?)?);
        self.parent = Some((reference.clone(), Held::Whole(Arc::clone(&resident))));
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
            // Students are cut out of its files again.
            parent::expect_fingerprint(stage.source.parent(), reference)?;
            return Ok(Arc::clone(stage));
        }
        self.clear();
        context.progress(0, 0, "", || format!("loading a stage of {}", reference.source))?;
        let source = parent::open(context, reference)?;
        let range = choose(&source.parent().architecture)?;
        let operations = &*context.operations;
        let bytes = source.stage_bytes(&range, operations);
        context.plan().expect_room("the parent's stage", bytes)?;
        let weights = source.stage(range, operations)?;
        let stage = Arc::new(ResidentStage { source, weights });
        self.stage = Some((reference.clone(), Arc::clone(&stage)));
        Ok(stage)
    }

    /// A shard's tokens and the last states for them of a parent that is held, computed on first use.
    ///
    /// # Errors
    /// When the shard or the parent cannot be read, the attempt should stop or the device fails.
    pub(super) fn batches(
        &mut self,
        context: &Context<'_>,
        (reference, held): (&ParentRef, &Held),
        shard: &Shard,
    ) -> Result<Arc<Vec<Batch>>> {
        let part = Part::before_others("the parent itself");
        let batches = self.branched(context, (reference, held), shard, &[], part, |_, _| Ok(()))?;
        Ok(Arc::clone(&batches.list))
    }

    /// Gives `take` each of those batches with the hidden states, before the final norm, that it has in `forms`, which are in
    /// the order in which they branch off the parent. One walk of the parent's blocks for as many batches as have room.
    ///
    /// # Errors
    /// As [`Caches::batches`], and those of `take`.
    pub(super) fn branches(
        &mut self,
        context: &Context<'_>,
        (reference, held): (&ParentRef, &Held),
        shard: &Shard,
        forms: &[Form],
        part: Part<'_>,
        take: impl FnMut(&Batch, Vec<Tensor>) -> Result<()>,
    ) -> Result<()> {
        self.branched(context, (reference, held), shard, forms, part, take)?;
        Ok(())
    }

    fn branched(
        &mut self,
        context: &Context<'_>,
        (reference, held): (&ParentRef, &Held),
        shard: &Shard,
        forms: &[Form],
        part: Part<'_>,
        take: impl FnMut(&Batch, Vec<Tensor>) -> Result<()>,
    ) -> Result<&Batches> {
        let of = (reference.clone(), shard.artifact.clone());
        // Others go before these come.
        self.batches = self.batches.take().filter(|kept| kept.of == of);
        match &mut self.batches {
            Some(kept) => {
                kept.go_on(context, held.blocks(), forms, part, take)?;
                Ok(kept)
            }
            missing => {
                let sequences = shard::read(context.store, shard, held.architecture().vocab_size)?;
                let computed = Batches::compute(context, held.blocks(), of, &sequences, (forms, part), take)?;
                Ok(missing.insert(computed))
            }
        }
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

impl Batches {
    /// Runs the parent over a shard for the first time, and what branches off it. Where something does, inputs are kept: those
    /// of all blocks where the parent is held and they fit, else of the block after the last that something branched off
    /// before, from which the next is likely to go on.
    fn compute(
        context: &Context<'_>,
        blocks: Blocks<'_>,
        of: (ParentRef, ArtifactId),
        sequences: &Sequences,
        (forms, part): (&[Form], Part<'_>),
        mut take: impl FnMut(&Batch, Vec<Tensor>) -> Result<()>,
    ) -> Result<Self> {
        let (architecture, runner) = (blocks.architecture(), blocks.runner());
        let depth = architecture.blocks.len();
        let plan = blocks.plan(context);
        let once = states_bytes(context, blocks, sequences.tokens.len());
        let keeps = match forms.last() {
            None => 0..0,
            Some(_) if !blocks.are_read() && once.saturating_mul(depth) <= plan.input_bytes() => 0..depth,
            Some(last) => {
                let next = last.branches_before() + 1;
                next..depth.min(next + 1)
            }
        };
        let batches = layouts(sequences, plan.rows(architecture));
        let units: Vec<Unit<'_>> = batches
            .iter()
            .map(|(layout, tokens)| Unit {
                forms,
                layout: *layout,
                start: Start::Tokens(tokens),
                own: Some(depth),
            })
            .collect();
        let (mut list, mut inputs) = (Vec::new(), BTreeMap::<usize, Vec<Tensor>>::new());
        let before = |block: usize, own: &[&Tensor]| {
            if keeps.contains(&block) {
                let states = own.iter().map(|states| (*states).clone());
                inputs.entry(block).or_default().extend(states);
            }
            Ok(())
        };
        let kept = once.saturating_mul(keeps.len().saturating_add(1));
        through(context, blocks, units, kept, part, before, |index, arrived| {
            let (Some((layout, tokens)), Some(own)) = (batches.get(index), arrived.own) else {
                return Ok(());
            };
            let batch = Batch {
                layout: *layout,
                tokens: tokens.clone(),
                finals: runner.final_norm(&own)?,
            };
            drop(own);
            take(&batch, arrived.forms)?;
            list.push(batch);
            Ok(())
        })?;
        Ok(Self {
            of,
            list: Arc::new(list),
            inputs,
        })
    }

    /// Runs what branches off the parent, from what is kept of the nearest block before. In its place the parent's own states
    /// are kept before the block after the last, where those are not.
    fn go_on(
        &mut self,
        context: &Context<'_>,
        blocks: Blocks<'_>,
        forms: &[Form],
        part: Part<'_>,
        mut take: impl FnMut(&Batch, Vec<Tensor>) -> Result<()>,
    ) -> Result<()> {
        let (Some(first), Some(last)) = (forms.first(), forms.last()) else {
            return Ok(());
        };
        let next = last.branches_before() + 1;
        let is_wanted = next < blocks.architecture().blocks.len() && !self.inputs.contains_key(&next);
        let own = is_wanted.then_some(next);
        let list = Arc::clone(&self.list);
        let nearest = self.inputs.range(..=first.branches_before()).next_back();
        let start_of = |index: usize| {
            let (block, states) = nearest?;
            Some((*block, states.get(index)?.clone()))
        };
        let units: Vec<Unit<'_>> = list
            .iter()
            .enumerate()
            .map(|(index, batch)| Unit {
                forms,
                layout: batch.layout,
                start: match start_of(index) {
                    Some((block, states)) => Start::Before(block, states),
                    None => Start::Tokens(&batch.tokens),
                },
                own,
            })
            .collect();
        let rows: usize = list.iter().map(|batch| batch.layout.rows()).sum();
        let more = match (own, nearest) {
            (Some(_), None) => states_bytes(context, blocks, rows),
            // None, or as much goes as comes.
            _ => 0,
        };
        if is_wanted {
            // They are held no longer than it takes to go on from them.
            self.inputs.clear();
        }
        let mut states = Vec::new();
        let arrive = |index: usize, arrived: Arrived| {
            states.extend(arrived.own);
            list.get(index).map_or(Ok(()), |batch| take(batch, arrived.forms))
        };
        through(context, blocks, units, more, part, |_, _| Ok(()), arrive)?;
        if is_wanted {
            self.inputs.insert(next, states);
        }
        Ok(())
    }
}

/// Bytes of hidden states of so many rows.
pub(super) fn states_bytes(context: &Context<'_>, blocks: Blocks<'_>, rows: usize) -> usize {
    let row = blocks.architecture().hidden * context.operations.activation_bytes();
    rows.saturating_mul(row)
}
