//! The cost model: what each block and the base add to every metric.

use std::rc::Rc;

use espalier_arch::{Architecture, BlockShape};
use serde::{Deserialize, Serialize};

use super::checked::{Checked, Doubts};
use super::cone::Priced;
use super::corrections::{Anchor, Corrections};
use super::host::Host;
use super::rows::Load;
use super::sampled::Sampled;
use super::shapes::Times;
use super::timed::{Joining, Timed, both, slower};
use super::{check, decode_steps};
use crate::running::waits;
use crate::{
    AbsoluteLimit, CostTable, Error, Figures, MemoryModel, Metric, Result, Subject, Whole, Workload,
};

/// What one block, or the base, adds to each additive metric; times are the device's own where the table tells the
/// host's part apart.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Costs {
    /// Milliseconds from the request to its last token.
    pub latency_ms: f64,
    /// Milliseconds to the first token.
    pub first_token_ms: f64,
    /// Milliseconds from one output token to the next.
    pub per_token_ms: f64,
    /// Milliseconds in which the workload's requests, once each, are worked off: throughput is its inverse.
    pub turnover_ms: f64,
    /// Bytes of weights and state.
    pub memory_bytes: f64,
    /// Parameters of blocks.
    pub block_parameters: f64,
}

impl Costs {
    /// The sum that a limit on `metric` is over.
    pub fn get(&self, metric: Metric) -> f64 {
        match metric {
            Metric::Latency => self.latency_ms,
            Metric::FirstToken => self.first_token_ms,
            Metric::PerToken => self.per_token_ms,
            Metric::Throughput => self.turnover_ms,
            Metric::Memory => self.memory_bytes,
            Metric::BlockParameters => self.block_parameters,
        }
    }
}

/// What a candidate will cost, each figure with its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// Every metric.
    pub figures: Figures,
    /// Standard error of each; memory and parameters have none.
    pub errors: Figures,
    /// The device's times alone, where the table tells the host's part apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Figures>,
}

/// Prices any candidate of one parent under one workload.
#[derive(Debug)]
pub struct CostModel {
    pub(super) times: Times,
    workload: Workload,
    /// Sequences that run together: the workload's concurrency, or fewer where an engine batches continuously.
    running: usize,
    batches_continuously: bool,
    needs_attention: bool,
    ranks: usize,
    pub(super) hidden: usize,
    memory: MemoryModel,
    other_memory_bytes: f64,
    anchor: Anchor,
    corrections: Corrections,
    doubts: Doubts,
    host: Option<Host>,
}

/// What the blocks and the base of a model come to.
struct Sums {
    /// The device's, where the table tells the host's apart.
    times: Timed,
    memory_bytes: f64,
    block_parameters: f64,
}

/// The costs of shapes, each worked out once: a parent has a few shapes in many blocks.
#[derive(Debug)]
pub(crate) struct Prices<'a> {
    model: &'a CostModel,
    known: Vec<(BlockShape, Rc<Priced>)>,
}

impl<'a> Prices<'a> {
    pub(crate) fn new(model: &'a CostModel) -> Self {
        Self {
            model,
            known: Vec::new(),
        }
    }

    /// As [`CostModel::price`].
    pub(crate) fn of(&mut self, shape: Option<&BlockShape>) -> Result<Rc<Priced>> {
        let Some(shape) = shape else {
            return Ok(Rc::default());
        };
        if let Some((_, priced)) = self.known.iter().find(|(known, _)| known == shape) {
            return Ok(Rc::clone(priced));
        }
        let priced = Rc::new(self.model.price(Some(shape))?);
        self.known.push((shape.clone(), Rc::clone(&priced)));
        Ok(priced)
    }
}

impl CostModel {
    /// `memory` says how the engine stores weights and state. `measured` is the parent: what it needs beyond weights and
    /// state is taken to stay, under other workloads too; and where it was measured under this one and takes longer than the
    /// sums of its times, all that is predicted is scaled alike. Without it, sums of the table's times stand, and only weights
    /// and state are counted, and what the engine needs by itself where the table says so.
    ///
    /// # Errors
    /// When the workload is empty, the table was measured at another hidden width, or a row is no time.
    pub fn new(
        table: &CostTable,
        workload: &Workload,
        parent: &Architecture,
        memory: MemoryModel,
        measured: Option<Whole<'_>>,
    ) -> Result<Self> {
        check(workload)?;
        if table.key.hidden != parent.hidden {
            return Err(Error::HiddenWidth {
                table: table.key.hidden,
                model: parent.hidden,
            });
        }
        let mut model = Self {
            times: Times::new(table)?,
            workload: *workload,
            running: workload.concurrency,
            batches_continuously: table.key.batches_continuously(),
            needs_attention: table.key.needs_attention(),
            ranks: table.key.parallelism,
            hidden: parent.hidden,
            // The built-in engine has no pages and keeps what lies behind a window: only its overhead is measured.
            memory: memory.paged(table.memory.as_ref().filter(|_| table.key.batches_continuously())),
            other_memory_bytes: 0.0,
            anchor: Anchor::default(),
            corrections: Corrections::default(),
            doubts: Doubts::default(),
            host: None,
        };
        model.other_memory_bytes = match (measured, &table.memory) {
            (Some(whole), _) => {
                let counted = model.counted_bytes(parent, whole.workload)?;
                (bytes(whole.measurement.memory_bytes) - counted).max(0.0)
            }
            (None, Some(engine)) => bytes(engine.overhead_bytes),
            (None, None) => 0.0,
        };
        model.host = model.told_host()?;
        // A table without rows of the parent's own says nothing of how far its sums are off.
        if let Some(whole) = measured.filter(|whole| whole.workload == workload)
            && let Ok(predicted) = model.predict(parent)
        {
            model.anchor = Anchor::of(&predicted, whole.measurement);
            model.host = model.told_host()?;
        }
        Ok(model)
    }

    /// The same model by the sums of the table's times, whatever the parent was measured to take.
    ///
    /// # Errors
    /// As [`CostModel::new`].
    pub fn by_sums(mut self) -> Result<Self> {
        self.anchor = Anchor::default();
        self.host = self.told_host()?;
        Ok(self)
    }

    /// The same model with other corrections, of checks of smaller models of `parent`. Of what else it is made, as
    /// [`CostModel::extrapolating`], comes before.
    ///
    /// # Errors
    /// As [`CostModel::new`], and when the checked model is none of the parent's.
    pub fn corrected(mut self, corrections: &Corrections, parent: &Architecture) -> Result<Self> {
        self.corrections = corrections.clone();
        self.doubts = Doubts::default();
        self.host = self.told_host()?;
        let checked = corrections.checked.as_ref();
        if let Some(checked) = checked.filter(|checked| checked.workload == self.workload) {
            self.doubts = self.doubts_after(checked, parent)?;
            self.host = self.told_host()?;
        }
        Ok(self)
    }

    /// None are known where the table has no rows of the checked model's.
    fn doubts_after(&mut self, checked: &Checked, parent: &Architecture) -> Result<Doubts> {
        let architecture = parent.with_candidate(&checked.candidate)?;
        let running = self.running;
        let doubts = self.run_together(checked.running).and_then(|()| {
            let sums = self.sums(&architecture)?;
            let predicted = self.by_clock(&sums.times, architecture.blocks.len());
            Ok(Doubts::of(checked, &predicted))
        });
        self.run_together(running)?;
        Ok(doubts.unwrap_or_default())
    }

    /// Has `running` sequences run together from now on: memory holds the state of so many, the throughput is that of
    /// their steps, and requests beyond them wait, which is part of their latency.
    ///
    /// # Errors
    /// When the table tells the host's part apart, and not at that batch.
    pub fn run_together(&mut self, running: usize) -> Result<()> {
        self.running = running.max(1);
        self.host = self.told_host()?;
        Ok(())
    }

    /// Sequences that run together.
    pub fn running(&self) -> usize {
        self.running
    }

    /// The same model, drawing lines on beyond what was measured; predictions say how much they are in doubt.
    ///
    /// # Errors
    /// As [`CostModel::new`].
    pub fn extrapolating(mut self) -> Result<Self> {
        self.times.extrapolating();
        self.host = self.told_host()?;
        Ok(self)
    }

    /// Whether the engine takes a new sequence in as soon as one has ended, so that any number up to the concurrency
    /// may run.
    pub fn batches_continuously(&self) -> bool {
        self.batches_continuously
    }

    /// Whether the engine can serve no model without attention.
    pub fn needs_attention(&self) -> bool {
        self.needs_attention
    }

    /// Requests in flight together.
    pub fn concurrency(&self) -> usize {
        self.workload.concurrency
    }

    /// What `shape` adds to each metric; none is a skipped block and adds nothing.
    ///
    /// # Errors
    /// When the table holds neither the shape at the workload's loads nor neighbours of it, or ranks cannot share it.
    pub fn block_costs(&self, shape: Option<&BlockShape>) -> Result<Costs> {
        Ok(self.price(shape)?.costs)
    }

    /// What everything that is no block adds.
    ///
    /// # Errors
    /// When the table does not hold the base at the workload's points.
    pub fn base_costs(&self, architecture: &Architecture) -> Result<Costs> {
        Ok(self.base_price(architecture)?.costs)
    }

    /// What `architecture` will cost.
    ///
    /// # Errors
    /// When the table lacks one of its shapes, or the architecture has another hidden width.
    pub fn predict(&self, architecture: &Architecture) -> Result<Prediction> {
        Ok(self.prediction(&self.sums(architecture)?, architecture.blocks.len()))
    }

    /// What the blocks and the base of `architecture` come to.
    fn sums(&self, architecture: &Architecture) -> Result<Sums> {
        if architecture.hidden != self.hidden {
            return Err(Error::HiddenWidth {
                table: self.hidden,
                model: architecture.hidden,
            });
        }
        let mut counts: Vec<(&BlockShape, f64)> = Vec::new();
        for block in &architecture.blocks {
            match counts.iter_mut().find(|(shape, _)| **shape == block.shape) {
                Some((_, count)) => *count += 1.0,
                None => counts.push((&block.shape, 1.0)),
            }
        }
        let mut sums = Sums {
            times: self.base_times(architecture)?,
            memory_bytes: self.base_bytes(architecture)?,
            block_parameters: 0.0,
        };
        for (shape, count) in counts {
            sums.times.add(&self.block_times(shape)?, count);
            sums.memory_bytes += self.block_bytes(shape)? * count;
            sums.block_parameters += parameters(shape, self.hidden) * count;
        }
        Ok(sums)
    }

    /// The limit as a bound on the sum over blocks and base.
    pub fn sum_limit(&self, limit: &AbsoluteLimit) -> f64 {
        self.figure(limit.metric, limit.value)
    }

    /// The figure that a sum over blocks and base comes to, and the sum that a figure comes from: a throughput is the inverse
    /// of a time.
    pub(crate) fn figure(&self, metric: Metric, sum: f64) -> f64 {
        match metric {
            Metric::Throughput => self.tokens() * 1000.0 / sum,
            _ => sum,
        }
    }

    /// The host's part; none where the table does not tell it apart.
    pub(super) fn host(&self) -> Option<&Host> {
        self.host.as_ref()
    }

    /// Output tokens of the whole workload.
    #[allow(clippy::cast_precision_loss)] // far below 2^53
    fn tokens(&self) -> f64 {
        self.workload.concurrency as f64 * self.workload.output_tokens as f64
    }

    #[allow(clippy::cast_precision_loss)] // far below 2^53
    pub(super) fn steps(&self) -> f64 {
        decode_steps(&self.workload).unwrap_or(1) as f64
    }

    pub(super) fn costs(&self, times: &Timed) -> Costs {
        let course = times.first.value + times.decode.value;
        let waited = self.waits() * course;
        Costs {
            latency_ms: waited + course,
            first_token_ms: waited + times.first.value,
            per_token_ms: times.decode.value / self.steps(),
            turnover_ms: times.steady.value + times.joined.value,
            ..Costs::default()
        }
    }

    /// First tokens, decode steps and turnover by the clock: each the device's or the host's. An engine that does not batch
    /// continuously has no turnover of its own.
    fn by_clock(&self, times: &Timed, blocks: usize) -> [Sampled; 3] {
        let mut waiting = times.clone();
        let mut host = Timed::default();
        if let Some(told) = &self.host {
            waiting.add(&told.alone, 1.0);
            host = told.of(blocks);
        }
        let turnover = if self.batches_continuously {
            both(
                slower(&waiting.steady, &host.steady),
                slower(&waiting.joined, &host.joined),
            )
        } else {
            Sampled::default()
        };
        [
            slower(&waiting.first, &host.first).clone(),
            slower(&waiting.decode, &host.decode).clone(),
            turnover,
        ]
    }

    fn prediction(&self, sums: &Sums, blocks: usize) -> Prediction {
        let own = |times: &Sampled| (times.value, times.error());
        let times = &sums.times;
        let [first, decode, turnover] = self.by_clock(times, blocks);
        let (first, decode) = (own(&first), own(&decode));
        let turnover = if self.batches_continuously {
            own(&turnover)
        } else {
            (first.0 + decode.0, first.1.hypot(decode.1))
        };
        let device = self.host.as_ref().map(|_| {
            let turnover = own(&both(&times.steady, &times.joined));
            self.figures(own(&times.first), own(&times.decode), turnover).0
        });
        let (figures, errors) = self.figures(first, decode, turnover);
        Prediction {
            figures: Figures {
                memory_bytes: Some(sums.memory_bytes),
                block_parameters: Some(sums.block_parameters),
                ..figures
            },
            errors: Figures {
                memory_bytes: Some(0.0),
                block_parameters: Some(0.0),
                ..errors
            },
            device,
        }
    }

    /// Figures and errors of the timed metrics, from (time, error) of first token, all steps, and turnover.
    fn figures(&self, first: (f64, f64), decode: (f64, f64), turnover: (f64, f64)) -> (Figures, Figures) {
        let throughput = self.tokens() * 1000.0 / turnover.0;
        let (waits, course) = (self.waits(), first.0 + decode.0);
        let of = |latency, first, per_token, throughput| Figures {
            latency_ms: Some(latency),
            first_token_ms: Some(first),
            per_token_ms: Some(per_token),
            throughput_tokens_per_second: Some(throughput),
            ..Figures::default()
        };
        (
            of(
                (waits + 1.0) * course,
                waits * course + first.0,
                decode.0 / self.steps(),
                throughput,
            ),
            of(
                (waits + 1.0) * first.1.hypot(decode.1),
                ((waits + 1.0) * first.1).hypot(waits * decode.1),
                decode.1 / self.steps(),
                throughput * turnover.1 / turnover.0,
            ),
        )
    }

    pub(super) fn block_times(&self, shape: &BlockShape) -> Result<Timed> {
        let times = self.timed(|load| self.times.block(shape, load).map(Some), Joining::Adds)?;
        Ok(self.left_of(times))
    }

    pub(super) fn base_times(&self, architecture: &Architecture) -> Result<Timed> {
        let base = Subject::Base {
            vocab_size: architecture.vocab_size,
        };
        let times = self.timed(|load| self.needed(&base, load), Joining::Adds)?;
        Ok(self.left_of(times))
    }

    /// The time of a subject that the table has to have.
    pub(super) fn needed(&self, subject: &Subject, load: Load) -> Result<Option<Sampled>> {
        let found = self.times.subject(subject, load)?;
        found.map(Some).ok_or_else(|| Error::MissingRow {
            subject: subject.to_string(),
            point: load.point(),
        })
    }

    /// The same times, with the doubt that checks leave of them.
    pub(super) fn left_of(&self, timed: Timed) -> Timed {
        self.doubts.left_of(timed, self.running)
    }

    /// Every time that a subject needs, by `time` under each load; none counts as nothing. Doubts are as the table has them.
    pub(super) fn timed(
        &self,
        time: impl Fn(Load) -> Result<Option<Sampled>>,
        joining: Joining,
    ) -> Result<Timed> {
        let anchor = match joining {
            Joining::Adds => &self.anchor.device,
            Joining::Replaces | Joining::IsHidden => &self.anchor.host,
        };
        let first = self.prefill_together(&time)?;
        let decode = self.decode_at(self.running, &time)?;
        let mut timed = Timed {
            first: first.times(anchor.first_token * self.corrections.first_token),
            decode: decode.times(anchor.decode * self.corrections.decode),
            ..Timed::default()
        };
        if !self.batches_continuously {
            timed.steady = both(&timed.first, &timed.decode);
            return Ok(timed);
        }
        let correction = anchor.turnover * self.corrections.turnover;
        let (courses, running) = (self.courses(), decode.times(correction));
        // Each request's prompt joins one of the steps that it shares, several the same one where there are fewer steps. To
        // a sequence that runs alone nothing joins.
        let shared = match self.running {
            1 => 0.0,
            _ => courses.min(self.requests() / self.steps()),
        };
        let prompts = match joining {
            Joining::Replaces if self.running > 1 => self.joined_steps(),
            _ => self.requests(),
        };
        let mut joined = match time(self.prefill(1)) {
            Ok(Some(alone)) => alone.times(correction * prompts),
            // Without a prompt by itself, its share of the prompts together.
            Ok(None) | Err(Error::MissingRow { .. } | Error::Extrapolation { .. }) => {
                first.times(correction * courses)
            }
            Err(error) => return Err(error),
        };
        if joining == Joining::IsHidden && self.running > 1 {
            joined = Sampled::default();
        }
        if joining != Joining::Replaces {
            joined.add(&running, shared);
        }
        Ok(Timed {
            steady: running.times(courses - shared),
            joined,
            ..timed
        })
    }

    fn prefill(&self, sequences: usize) -> Load {
        Load::Prefill {
            tokens: self.workload.prompt_tokens,
            sequences,
        }
    }

    /// Prefill of the prompts that run together: where so many were not measured, their share of all.
    fn prefill_together(&self, time: &impl Fn(Load) -> Result<Option<Sampled>>) -> Result<Sampled> {
        match time(self.prefill(self.running)) {
            Ok(found) => Ok(found.unwrap_or_default()),
            Err(Error::MissingRow { .. } | Error::Extrapolation { .. })
                if self.running < self.workload.concurrency =>
            {
                let all = time(self.prefill(self.workload.concurrency))?.unwrap_or_default();
                Ok(all.times(1.0 / self.courses()))
            }
            Err(error) => Err(error),
        }
    }

    /// All decode steps of `sequences` together; nothing where the first token is the only one.
    pub(super) fn decode_at(
        &self,
        sequences: usize,
        time: &impl Fn(Load) -> Result<Option<Sampled>>,
    ) -> Result<Sampled> {
        let Some(steps) = decode_steps(&self.workload) else {
            return Ok(Sampled::default());
        };
        let load = Load::Decode {
            context: self.workload.prompt_tokens,
            steps,
            sequences,
        };
        Ok(time(load)?.unwrap_or_default())
    }

    /// How often as many as run together take their course until all requests have.
    #[allow(clippy::cast_precision_loss)] // far below 2^53
    fn courses(&self) -> f64 {
        self.requests() / self.running as f64
    }

    /// Steps that a prompt joins, of all that the requests take; none joins a sequence that runs alone.
    pub(super) fn joined_steps(&self) -> f64 {
        match self.running {
            1 => 0.0,
            _ => self.requests().min(self.courses() * self.steps()),
        }
    }

    /// Of the host's side.
    pub(super) fn turnover_correction(&self) -> f64 {
        self.anchor.host.turnover * self.corrections.turnover
    }

    /// See [`waits`].
    fn waits(&self) -> f64 {
        waits(self.workload.concurrency, self.running)
    }

    #[allow(clippy::cast_precision_loss)] // far below 2^53
    fn requests(&self) -> f64 {
        self.workload.concurrency as f64
    }

    /// Weights and state of one block on one rank, as many sequences running as run together.
    pub(super) fn block_bytes(&self, shape: &BlockShape) -> Result<f64> {
        let workload = Workload {
            concurrency: self.running,
            ..self.workload
        };
        self.block_bytes_under(shape, &workload)
    }

    fn block_bytes_under(&self, shape: &BlockShape, workload: &Workload) -> Result<f64> {
        let block = |shape: &BlockShape| bytes(self.memory.block_bytes(shape, self.hidden, workload));
        if self.ranks == 1 {
            return Ok(block(shape));
        }
        Ok(block(&shape.rank_share(self.ranks)?))
    }

    /// Everything that is no block, on one rank.
    pub(super) fn base_bytes(&self, architecture: &Architecture) -> Result<f64> {
        let other = self.other_memory_bytes + self.corrections.memory_bytes;
        let outside = |model: &Architecture| bytes(model.stored_outside_blocks(&self.memory.storage));
        if self.ranks == 1 {
            return Ok(outside(architecture) + other);
        }
        let mut bare = architecture.clone();
        bare.blocks.clear();
        Ok(outside(&bare.rank_share(self.ranks)?) + other)
    }

    /// What is counted of a whole model, before what the engine needs beside.
    fn counted_bytes(&self, architecture: &Architecture, workload: &Workload) -> Result<f64> {
        let mut sum = self.base_bytes(architecture)?;
        for block in &architecture.blocks {
            sum += self.block_bytes_under(&block.shape, workload)?;
        }
        Ok(sum)
    }
}

/// Bytes are far below 2^53.
#[allow(clippy::cast_precision_loss)]
fn bytes(count: u64) -> f64 {
    count as f64
}

/// Parameters of one block, its norm included.
#[allow(clippy::cast_precision_loss)] // far below 2^53
pub fn parameters(shape: &BlockShape, hidden: usize) -> f64 {
    shape.parameters(hidden) as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fixtures::{f32, small, table};

    #[test]
    fn what_lies_behind_a_window_is_given_up_by_an_engine_that_pages_and_kept_by_the_built_in_one() {
        let mut table = table(&[]);
        table.memory = Some(crate::EngineMemory {
            overhead_bytes: 7,
            block_tokens: 1,
            spare_blocks: 0,
            steps_under_way: 1,
        });
        let mut parent = small();
        for block in &mut parent.blocks {
            if let BlockShape::Attention(attention) = &mut block.shape {
                attention.sliding_window = Some(4);
            }
        }
        let long = Workload {
            prompt_tokens: 10,
            output_tokens: 1000,
            concurrency: 2,
        };
        let counted = |table: &CostTable| {
            let model = CostModel::new(table, &long, &parent, f32(), None).unwrap();
            model.counted_bytes(&parent, &long).unwrap() - 7.0
        };
        let whole = bytes(f32().counted_bytes(&parent, &long));
        assert_eq!(counted(&table), whole);
        table.key.engine = "vllm".to_owned();
        // Of 1010 tokens 3 and a step of 256, and the page that the window begins in the middle of: 260, in 3 blocks of 128
        // bytes a token, of 2 sequences.
        assert_eq!(counted(&table), whole - f64::from((1010 - 260) * 3 * 128 * 2));
    }
}
