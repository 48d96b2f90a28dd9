//! The cost model: what each block and the base add to every metric.

use std::collections::BTreeMap;

use espalier_arch::{Architecture, BlockShape};
use serde::{Deserialize, Serialize};

use super::rows::{Rows, Time, block_key, key};
use super::{check, decode_steps};
use crate::{
    AbsoluteLimit, CostTable, Error, Figures, Measurement, Metric, Point, Result, Subject, Workload,
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
    weight_bytes: f64,
    other_memory_bytes: f64,
    corrections: Corrections,
}

impl CostModel {
    /// `weight_bytes` is the size of one weight and of one key or value (4 for f32). `measured` is the parent
    /// under the workload: what it needs beyond weights and state is taken to stay. Without it, only weights
    /// and state are counted.
    ///
    /// # Errors
    /// When the workload is empty, the table was measured at another hidden width, or a row is no time.
    pub fn new(
        table: &CostTable,
        workload: &Workload,
        parent: &Architecture,
        weight_bytes: f64,
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
            weight_bytes,
            other_memory_bytes: 0.0,
            corrections: Corrections::default(),
        };
        if let Some(measured) = measured {
            #[allow(clippy::cast_precision_loss)] // bytes are far below 2^53
            let measured = measured.memory_bytes as f64;
            model.other_memory_bytes = (measured - model.counted_bytes(parent)).max(0.0);
        }
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
        costs.memory_bytes = memory_bytes(shape, self.hidden, &self.workload, self.weight_bytes);
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
        costs.memory_bytes = base_bytes(architecture, self.weight_bytes)
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

    fn counted_bytes(&self, architecture: &Architecture) -> f64 {
        counted_bytes(architecture, &self.workload, self.weight_bytes)
    }
}

/// Bytes of weights and of state at the workload's last context: what can be said of an architecture
/// before anything is measured.
pub fn counted_bytes(architecture: &Architecture, workload: &Workload, weight_bytes: f64) -> f64 {
    let blocks: f64 = architecture
        .blocks
        .iter()
        .map(|block| memory_bytes(&block.shape, architecture.hidden, workload, weight_bytes))
        .sum();
    base_bytes(architecture, weight_bytes) + blocks
}

/// Parameters of one block, its norm included.
#[allow(clippy::cast_precision_loss)] // far below 2^53
pub fn parameters(shape: &BlockShape, hidden: usize) -> f64 {
    shape
        .parts(hidden)
        .iter()
        .map(|part| part.elements() as f64)
        .sum()
}

/// Embedding, head and final norm.
#[allow(clippy::cast_precision_loss)] // far below 2^53
fn base_bytes(architecture: &Architecture, weight_bytes: f64) -> f64 {
    let tables = if architecture.tied_embedding { 1.0 } else { 2.0 };
    (tables * architecture.vocab_size as f64 + 1.0) * architecture.hidden as f64 * weight_bytes
}

/// Weights of one block and its state for every request at the workload's last context.
#[allow(clippy::cast_precision_loss)] // far below 2^53
fn memory_bytes(shape: &BlockShape, hidden: usize, workload: &Workload, weight_bytes: f64) -> f64 {
    let requests = workload.concurrency as f64;
    let context = workload.prompt_tokens.saturating_add(workload.output_tokens);
    let state = match shape {
        BlockShape::Attention(attention) => {
            let kept = attention
                .sliding_window
                .map_or(context, |window| window.min(context));
            2.0 * attention.kv_width() as f64 * kept as f64 * weight_bytes
        }
        // The state is kept in f32, the convolution's window in the weights' precision.
        BlockShape::Mamba2(mamba) => {
            let inner = (mamba.heads * mamba.head_dim) as f64;
            let convolved = inner + 2.0 * (mamba.groups * mamba.state) as f64;
            let window = mamba.conv_kernel.saturating_sub(1) as f64;
            inner * mamba.state as f64 * 4.0 + convolved * window * weight_bytes
        }
        BlockShape::Mlp(_) | BlockShape::Moe(_) => 0.0,
    };
    parameters(shape, hidden) * weight_bytes + requests * state
}
