//! The built-in engine: prefill and greedy decoding of a whole model under a workload, timed.
//!
//! Requests of the workload run together from start to end. Memory is counted, not sampled: weights, key and
//! value caches at the workload's longest context, and the activations that the widest block holds while the
//! prompts run through it. So parent and candidate are compared without the noise of an allocator.
//!
//! The clock is the host's, as a user's is: a time begins when the device has nothing left to do, and ends when the
//! chosen tokens are on the host.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use espalier_arch::{Architecture, Storage, WeightFormat};
use espalier_model::Model;
use espalier_model::block::saved_bytes;
use espalier_model::decode::Session;
use espalier_model::ops::Operations;
use espalier_search::{CostKey, EngineMemory, MemoryModel, Mode, Workload};

use super::quiet::Quiet;
use super::{Sample, lossless};
use crate::agent::options::processor_name;
use crate::discovery::driver_version;
use crate::{Error, Result};

/// What cost tables of this engine are true for.
pub fn cost_key(operations: &dyn Operations, hidden: usize) -> CostKey {
    let mut environment = BTreeMap::new();
    let device = match operations.accelerator() {
        Some(accelerator) => {
            environment.extend(driver_version().map(|version| ("driver".to_owned(), version)));
            accelerator.name
        }
        None => format!("{}, {} threads", processor_name(), rayon::current_num_threads()),
    };
    CostKey {
        device,
        engine: "builtin".to_owned(),
        engine_version: env!("CARGO_PKG_VERSION").to_owned(),
        precision: operations.activation_type().to_string(),
        hidden,
        parallelism: 1,
        mode: Mode::Eager,
        environment,
    }
}

/// Refuses a workload that asks for nothing.
///
/// # Errors
/// The field that is 0.
pub fn check_workload(workload: &Workload) -> Result<()> {
    let fields = [
        ("prompt_tokens", workload.prompt_tokens),
        ("output_tokens", workload.output_tokens),
        ("concurrency", workload.concurrency),
    ];
    match fields.iter().find(|(_, value)| *value == 0) {
        Some((field, _)) => Err(Error::Invalid {
            reason: format!("workload.{field} is 0, expected at least 1"),
        }),
        None => Ok(()),
    }
}

/// A model under a workload, ready to be run again and again.
#[derive(Debug)]
pub struct Bench {
    operations: Arc<dyn Operations>,
    session: Session,
    prompt: Vec<u32>,
    workload: Workload,
    memory_bytes: u64,
}

impl Bench {
    /// Prepares a model; allocates its caches.
    ///
    /// # Errors
    /// When the workload asks for nothing or does not fit the model's positions.
    pub fn new(operations: &Arc<dyn Operations>, model: &Arc<Model>, workload: &Workload) -> Result<Self> {
        check_workload(workload)?;
        let context = workload.prompt_tokens.saturating_add(workload.output_tokens);
        let architecture = &model.architecture;
        if context > architecture.max_positions {
            return Err(Error::Invalid {
                reason: format!(
                    "workload.prompt_tokens + workload.output_tokens is {context}, expected at most {}, the \
                     positions the parent was made for",
                    architecture.max_positions
                ),
            });
        }
        let session = Session::new(
            Arc::clone(operations),
            Arc::clone(model),
            workload.concurrency,
            context,
        )?;
        let tokens = workload.prompt_tokens.saturating_mul(workload.concurrency);
        let entry_bytes = operations.activation_bytes();
        let memory_bytes = memory_bytes(model, session.cache_bytes(), workload, entry_bytes);
        let prompt = prompt(tokens, architecture.vocab_size);
        Ok(Self {
            operations: Arc::clone(operations),
            session,
            prompt,
            workload: *workload,
            memory_bytes,
        })
    }

    /// Runs the workload once, untimed.
    ///
    /// # Errors
    /// When the model fails.
    pub fn warm_up(&mut self) -> Result<()> {
        self.once().map(|_| ())
    }

    /// Runs the workload once, undisturbed.
    ///
    /// # Errors
    /// When the model fails, or is disturbed again and again.
    pub fn run(&mut self, quiet: &Quiet) -> Result<Sample> {
        quiet.measure(|| self.once())
    }

    /// Counted, not sampled: see [`self`](crate::engine::builtin).
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    fn once(&mut self) -> Result<Sample> {
        self.session.clear();
        self.operations.wait()?;
        let start = Instant::now();
        let mut logits = self.session.prefill(&self.prompt)?;
        let mut next = self.session.likeliest(&logits)?;
        let first_token = milliseconds(start);
        for _ in 1..self.workload.output_tokens {
            logits = self.session.decode(&next)?;
            next = self.session.likeliest(&logits)?;
        }
        let latency = milliseconds(start);
        let Workload {
            output_tokens,
            concurrency,
            ..
        } = self.workload;
        let tokens = lossless(output_tokens.saturating_mul(concurrency));
        Ok(Sample {
            first_token,
            latency,
            throughput: tokens / (latency / 1000.0),
            disturbed: false,
        })
    }
}

pub(super) fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1000.0
}

/// Tokens spread over the vocabulary, the same each time.
pub(super) fn prompt(tokens: usize, vocab_size: usize) -> Vec<u32> {
    let vocabulary = u32::try_from(vocab_size).unwrap_or(u32::MAX).max(1);
    (0..tokens)
        .map(|index| {
            (u32::try_from(index % 65_521)
                .unwrap_or(0)
                .wrapping_mul(2_654_435_761))
                % vocabulary
        })
        .collect()
}

fn memory_bytes(model: &Model, cache_bytes: usize, workload: &Workload, entry_bytes: usize) -> u64 {
    let total = model
        .bytes()
        .saturating_add(cache_bytes)
        .saturating_add(activation_bytes(&model.architecture, workload, entry_bytes));
    total as u64
}

/// What a model of this shape is counted to take under a workload without being opened.
pub fn counted_bytes(operations: &dyn Operations, architecture: &Architecture, workload: &Workload) -> u64 {
    let entry_bytes = operations.activation_bytes();
    let format = match entry_bytes {
        4 => WeightFormat::F32,
        _ => WeightFormat::Bf16,
    };
    MemoryModel::unpaged(Storage::all(format))
        .counted_bytes(architecture, workload)
        .saturating_add(activation_bytes(architecture, workload, entry_bytes) as u64)
}

/// What a model of this shape takes beside weights, keys and values, as a cost table has it for engines whose parent could
/// not be measured.
pub fn overhead(
    operations: &dyn Operations,
    architecture: &Architecture,
    workload: &Workload,
) -> EngineMemory {
    EngineMemory {
        overhead_bytes: activation_bytes(architecture, workload, operations.activation_bytes()) as u64,
        block_tokens: 1,
        spare_blocks: 0,
        steps_under_way: 1,
    }
}

/// What the widest block holds while all prompts run through it: its input, its output and everything
/// between; and the logits.
fn activation_bytes(architecture: &Architecture, workload: &Workload, entry_bytes: usize) -> usize {
    let rows = workload.prompt_tokens.saturating_mul(workload.concurrency);
    let stream = rows
        .saturating_mul(architecture.hidden)
        .saturating_mul(entry_bytes);
    let blocks = architecture
        .blocks
        .iter()
        .map(|block| saved_bytes(&block.shape, architecture.hidden, rows, entry_bytes));
    let logits = workload
        .concurrency
        .saturating_mul(architecture.vocab_size)
        .saturating_mul(entry_bytes);
    blocks
        .max()
        .unwrap_or(0)
        .saturating_add(stream.saturating_mul(2))
        .max(logits)
}

/// A model of this shape with random weights: timings do not depend on their values.
///
/// # Errors
/// When a block's kind cannot be run yet.
pub fn dummy(operations: &Arc<dyn Operations>, architecture: &Architecture, seed: u64) -> Result<Arc<Model>> {
    Ok(Arc::new(Model::random(architecture, seed, &**operations)?))
}
