//! The cost model: what each block and the base add to every metric.

use std::collections::BTreeMap;

use espalier_arch::{Architecture, BlockShape};
use serde::{Deserialize, Serialize};

use super::rows::{Rows, Time, block_key, key};
use super::{check, decode_steps};
use crate::{
    AbsoluteLimit, CostTable, Error, Figures, Measurement, MemoryModel, Metric, Point, Result, Subject,
    Workload,
};

/// What one block, or the base, adds to each additive metric.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Costs {
    /// Milliseconds from the request to its last token.
    pub latency_ms: f64,
    /// Milliseconds to the first token.
    pub first_token_ms: f64,
    /// Milliseconds from one output token to the next.
    pub per_token_ms: f64,
    /// Bytes of weights and state.
    pub memory_bytes: f64,
    /// Parameters of blocks.
    pub block_parameters: f64,
    /// Standard errors of the three times, in their order.
    pub errors_ms: [f64; 3],
}

impl Costs {
    /// The sum that a limit on `metric` is over. Throughput is limited through latency.
    pub fn get(&self, metric: Metric) -> f64 {
        match metric {
            Metric::Latency | Metric::Throughput => self.latency_ms,
            Metric::FirstToken => self.first_token_ms,
            Metric::PerToken => self.per_token_ms,
            Metric::Memory => self.memory_bytes,
            Metric::BlockParameters => self.block_parameters,
        }
    }
}

/// Factors by which times turned out larger than the table says, from checks of whole candidates. 1 at first.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corrections {
    /// Of the time to the first token.
    pub first_token: f64,
    /// Of every decode step.
    pub decode: f64,
    /// Bytes beside those counted.
    pub memory_bytes: f64,
}

impl Default for Corrections {
    fn default() -> Self {
        Self {
            first_token: 1.0,
            decode: 1.0,
            memory_bytes: 0.0,
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
}

/// Prices any candidate of one parent under one workload.
#[derive(Debug)]
pub struct CostModel {
    rows: Rows,
    workload: Workload,
    hidden: usize,
    memory: MemoryModel,
    other_memory_bytes: f64,
    corrections: Corrections,
}

impl CostModel {
    /// `memory` says how the engine stores weights and state. `measured` is the parent under the workload: what it
    /// needs beyond weights and state is taken to stay. Without it, only weights and state are counted, and what the
    /// engine needs by itself where the table says so.
    ///
    /// # Errors
    /// When the workload is empty, the table was measured at another hidden width, or a row is no time.
    pub fn new(
        table: &CostTable,
        workload: &Workload,
        parent: &Architecture,
        memory: MemoryModel,
        measured: Option<&Measurement>,
    ) -> Result<Self> {
        check(workload)?;
        if table.key.hidden != parent.hidden {
            return Err(Error::HiddenWidth {
                table: table.key.hidden,
                model: parent.hidden,
            });
        }
        let mut model = Self {
            rows: Rows::new(table)?,
            workload: *workload,
            hidden: parent.hidden,
            memory: memory.paged(table.memory.as_ref()),
            other_memory_bytes: 0.0,
            corrections: Corrections::default(),
        };
        model.other_memory_bytes = match (measured, &table.memory) {
            (Some(measured), _) => {
                let counted = model.memory.counted_bytes(parent, workload);
                bytes(measured.memory_bytes.saturating_sub(counted))
            }
            (None, Some(engine)) => bytes(engine.overhead_bytes),
            (None, None) => 0.0,
        };
        Ok(model)
    }

    /// The same model with other corrections.
    #[must_use]
    pub fn corrected(mut self, corrections: Corrections) -> Self {
        self.corrections = corrections;
        self
    }

    /// What `shape` adds to each metric; none is a skipped block and adds nothing.
    ///
    /// # Errors
    /// When the table does not hold the shape at the workload's points.
    pub fn block_costs(&self, shape: Option<&BlockShape>) -> Result<Costs> {
        let Some(shape) = shape else {
            return Ok(Costs::default());
        };
        let mut costs = self.times(&block_key(shape))?;
        costs.memory_bytes = bytes(self.memory.block_bytes(shape, self.hidden, &self.workload));
        costs.block_parameters = parameters(shape, self.hidden);
        Ok(costs)
    }

    /// What everything that is no block adds.
    ///
    /// # Errors
    /// When the table does not hold the base at the workload's points.
    pub fn base_costs(&self, architecture: &Architecture) -> Result<Costs> {
        let mut costs = self.times(&key(&Subject::Base {
            vocab_size: architecture.vocab_size,
        }))?;
        costs.memory_bytes = bytes(architecture.stored_outside_blocks(&self.memory.storage))
            + self.other_memory_bytes
            + self.corrections.memory_bytes;
        Ok(costs)
    }

    /// What `architecture` will cost.
    ///
    /// # Errors
    /// When the table lacks one of its shapes, or the architecture has another hidden width.
    pub fn predict(&self, architecture: &Architecture) -> Result<Prediction> {
        if architecture.hidden != self.hidden {
            return Err(Error::HiddenWidth {
                table: self.hidden,
                model: architecture.hidden,
            });
        }
        let mut groups: BTreeMap<String, (Costs, f64)> = BTreeMap::new();
        for block in &architecture.blocks {
            match groups.get_mut(&block_key(&block.shape)) {
                Some((_, count)) => *count += 1.0,
                None => {
                    let costs = self.block_costs(Some(&block.shape))?;
                    groups.insert(block_key(&block.shape), (costs, 1.0));
                }
            }
        }
        let base = self.base_costs(architecture)?;
        Ok(self.total(groups.into_values().chain([(base, 1.0)])))
    }

    /// The limit as a bound on the sum of [`Costs::get`] over blocks and base.
    pub fn sum_limit(&self, limit: &AbsoluteLimit) -> f64 {
        match limit.metric {
            Metric::Throughput => self.tokens() * 1000.0 / limit.value,
            _ => limit.value,
        }
    }

    /// Output tokens of the whole workload.
    #[allow(clippy::cast_precision_loss)] // far below 2^53
    fn tokens(&self) -> f64 {
        self.workload.concurrency as f64 * self.workload.output_tokens as f64
    }

    fn total(&self, groups: impl Iterator<Item = (Costs, f64)>) -> Prediction {
        let mut sum = Costs::default();
        let mut variances = [0.0; 3];
        for (costs, count) in groups {
            sum.latency_ms += costs.latency_ms * count;
            sum.first_token_ms += costs.first_token_ms * count;
            sum.per_token_ms += costs.per_token_ms * count;
            sum.memory_bytes += costs.memory_bytes * count;
            sum.block_parameters += costs.block_parameters * count;
            for (variance, error) in variances.iter_mut().zip(costs.errors_ms) {
                *variance += (error * count).powi(2);
            }
        }
        let [latency, first_token, per_token] = variances.map(f64::sqrt);
        let throughput = self.tokens() * 1000.0 / sum.latency_ms;
        Prediction {
            figures: Figures {
                latency_ms: Some(sum.latency_ms),
                first_token_ms: Some(sum.first_token_ms),
                per_token_ms: Some(sum.per_token_ms),
                throughput_tokens_per_second: Some(throughput),
                memory_bytes: Some(sum.memory_bytes),
                block_parameters: Some(sum.block_parameters),
            },
            errors: Figures {
                latency_ms: Some(latency),
                first_token_ms: Some(first_token),
                per_token_ms: Some(per_token),
                throughput_tokens_per_second: Some(throughput * latency / sum.latency_ms),
                memory_bytes: Some(0.0),
                block_parameters: Some(0.0),
            },
        }
    }

    fn times(&self, subject: &str) -> Result<Costs> {
        let sequences = self.workload.concurrency;
        let context = self.workload.prompt_tokens;
        let prefill = self.rows.at(
            subject,
            Point::Prefill {
                tokens: context,
                sequences,
            },
        )?;
        let steps = decode_steps(&self.workload);
        let decode = match steps {
            Some(steps) => self.rows.decode(subject, context, steps, sequences)?,
            None => Time::default(),
        };
        #[allow(clippy::cast_precision_loss)] // far below 2^53
        let steps = steps.unwrap_or(1) as f64;
        let first_token_ms = prefill.median * self.corrections.first_token;
        let decode_ms = decode.median * self.corrections.decode;
        Ok(Costs {
            latency_ms: first_token_ms + decode_ms,
            first_token_ms,
            per_token_ms: decode_ms / steps,
            errors_ms: [
                prefill.error.hypot(decode.error),
                prefill.error,
                decode.error / steps,
            ],
            ..Costs::default()
        })
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
