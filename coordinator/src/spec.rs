//! What a user asks for: the job spec, its defaults, and how it is read and refused.
//!
//! Here live the types and their defaults. [`parse`] turns text into them and names unknown keys and
//! wrong types by their path; [`check`] refuses values that no job can be run with. Nothing here reads
//! the parent: what depends on its shape is refused by the stage that first knows it.

mod check;
mod cost_table;
mod parse;
mod schema;
#[cfg(test)]
mod tests;

use std::fmt;

use espalier_proto::task;
use espalier_search::{Limits, Workload};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use cost_table::{COST_TABLE_SCHEMA, CostTableFile, CostTableSource, OLDEST_SCHEMA};

/// A parent, data, a workload and at least one limit: everything else has a default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// The model to compress: a Hugging Face directory, a GGUF file, or `hf://org/name`.
    pub parent: String,
    /// The text to learn from and to be judged on.
    pub data: Data,
    /// What the result is fitted to.
    pub target: Target,
    /// Which smaller forms are considered.
    #[serde(default)]
    pub search: Search,
    /// How many tokens each stage may use.
    #[serde(default)]
    pub budget: Budget,
    /// How the chosen model is distilled from the parent.
    #[serde(default)]
    pub recovery: Recovery,
    /// What else the result is judged by.
    #[serde(default)]
    pub evaluate: Evaluation,
    /// The directory to write the outcome to; it must not exist yet. `--output-dir` overrides it.
    #[serde(default)]
    pub output: Option<String>,
    /// Ends once the target is measured, with `cost-table.json` as its outcome.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub profile_only: bool,
    /// Seeds the order of documents and sequences: the same seed and inputs give the same result.
    #[serde(default)]
    pub seed: u64,
}

/// Files of text: `.txt`, or `.jsonl` with `text` or chat `messages`; each also `.gz`, `.xz` or `.zst`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Text for importance, scores and recovery.
    pub train: Vec<String>,
    /// Held-out text, never trained or scored on. Default: documents held back from `train`.
    #[serde(default)]
    pub validation: Vec<String>,
}

/// What the result is fitted to: a device and engine, a precision, a workload and limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Where the result will run.
    #[serde(default)]
    pub device: Device,
    /// What will run it.
    #[serde(default)]
    pub engine: Engine,
    /// The precision of its weights and arithmetic; of the built-in engine that of the device. Default: `f32` on
    /// `cpu`, `bf16` on `cuda`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// What is asked of it.
    pub workload: Workload,
    /// What it must stay inside; at least one.
    pub limits: Limits,
    /// The `cost-table.json` of a finished job, to choose by in place of a profile of this machine: what is
    /// chosen then depends on no clock. It is still checked and verified here, and misses are reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::CostTable>")]
    pub cost_table: Option<CostTableSource>,
    /// Measure what blocks cost anew, whatever earlier jobs measured of such a target; what is kept of it is replaced.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub measure_anew: bool,
}

/// Where the result will run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The processor of the worker's machine.
    #[default]
    Cpu,
    /// An NVIDIA GPU of the worker's machine.
    Cuda,
}

impl Device {
    /// In what the built-in engine computes there.
    pub fn precision(self) -> Precision {
        match self {
            Self::Cpu => Precision::F32,
            Self::Cuda => Precision::Bf16,
        }
    }
}

/// The word that a spec uses for one of its choices.
pub(crate) fn word(choice: &impl Serialize) -> String {
    let value = serde_json::to_value(choice).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

impl Target {
    /// The precision asked for, or that of the device.
    pub fn precision(&self) -> Precision {
        self.precision.unwrap_or_else(|| self.device.precision())
    }

    /// What tasks that measure are told to measure in.
    pub fn task_engine(&self) -> task::Engine {
        match self.engine {
            Engine::Builtin => task::Engine::Builtin,
            Engine::Vllm => task::Engine::Vllm {
                precision: self.precision().into(),
            },
        }
    }
}

/// What will run the result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// Espalier's own decoding.
    #[default]
    Builtin,
    /// vLLM, in the Python environment that the worker was started with (`--vllm-python`).
    Vllm,
}

/// The precisions of weights and arithmetic that a target may have: those of [`espalier_arch::WeightFormat`] that
/// an engine here computes in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit floating point.
    #[default]
    F32,
    /// The upper half of it.
    Bf16,
}

impl From<Precision> for espalier_arch::Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

impl From<Precision> for espalier_arch::WeightFormat {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

/// Which smaller forms of each block are considered, and how they are chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Search {
    /// How many key/value groups an attention block may keep.
    pub kv_groups: KvGroups,
    /// MLP widths are multiples of this many channels. Default: an eighth of the whole width, rounded up to a
    /// multiple of 32.
    #[schemars(range(min = 1))]
    pub mlp_grid: Option<usize>,
    /// Whether a block may be left out altogether, or a layer by the uniform strategy.
    pub skip: bool,
    /// Which searches run: each is recovered with the same tokens and reported beside the other.
    pub strategies: Vec<Strategy>,
}

impl Default for Search {
    fn default() -> Self {
        Self {
            kv_groups: KvGroups::default(),
            mlp_grid: None,
            skip: true,
            strategies: vec![Strategy::Heterogeneous, Strategy::Uniform],
        }
    }
}

/// How many key/value groups an attention block may keep: `auto` for every count (at most eight of
/// them, evenly spread), or a list such as `[3, 2, 1]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum KvGroups {
    /// Every count, at most eight of them.
    #[default]
    #[serde(with = "auto")]
    #[schemars(with = "schema::Auto")]
    Auto,
    /// These counts.
    Counts(Vec<usize>),
}

/// `auto` as text.
mod auto {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("auto")
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "auto" => Ok(()),
            other => Err(D::Error::custom(format!(
                "`{other}` is neither `auto` nor a list of counts"
            ))),
        }
    }
}

/// How a candidate is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Every block has its own size, by an exact knapsack over measured costs and scores.
    Heterogeneous,
    /// Every layer has the same size, whole layers are dropped: the best of a grid by KL, as Minitron does.
    Uniform,
}

impl fmt::Display for Strategy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Heterogeneous => "heterogeneous",
            Self::Uniform => "uniform",
        })
    }
}

/// How many tokens each stage may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Budget {
    /// Tokens of each packed sequence.
    #[schemars(range(min = 2))]
    pub sequence_tokens: usize,
    /// Tokens for importance.
    #[schemars(range(min = 1))]
    pub calibration_tokens: u64,
    /// Tokens on which every variant of every block is scored.
    #[schemars(range(min = 1))]
    pub scoring_tokens: u64,
    /// Tokens on which the uniform strategy orders layers for removal.
    #[schemars(range(min = 1))]
    pub depth_tokens: u64,
    /// Tokens of recovery, for each strategy; 0 leaves the chosen models untrained.
    pub recovery_tokens: u64,
    /// Held-out tokens for quality.
    #[schemars(range(min = 1))]
    pub validation_tokens: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            sequence_tokens: 512,
            calibration_tokens: 32_768,
            scoring_tokens: 4_096,
            depth_tokens: 2_048,
            recovery_tokens: 1_000_000,
            validation_tokens: 16_384,
        }
    }
}

/// How a student is distilled: forward KL to the parent's logits at temperature 1, by AdamW with a linear
/// warm-up and a cosine decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Recovery {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Sequences in a step.
    #[schemars(range(min = 1))]
    pub batch_sequences: usize,
    /// Share of the steps in which the learning rate rises from zero.
    pub warmup: f64,
    /// Share of the peak at which the cosine ends.
    pub final_share: f64,
    /// The gradient's global norm is clipped to this.
    pub clip: f64,
    /// AdamW's decay of first and second moments.
    pub betas: (f64, f64),
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// A checkpoint is written every so many steps.
    #[schemars(range(min = 1))]
    pub checkpoint_steps: u64,
    /// Devices that train one model together; fewer where the cluster has not so many.
    #[schemars(range(min = 1))]
    pub ranks: u32,
    /// Parts into which the model is cut, each on a rank of its own: for models that one device cannot hold. Ranks
    /// beyond that are replicas, which share out the batch.
    #[schemars(range(min = 1))]
    pub pipeline_stages: u32,
}

impl Default for Recovery {
    fn default() -> Self {
        Self {
            learning_rate: 4e-4,
            batch_sequences: 8,
            warmup: 0.05,
            final_share: 0.1,
            clip: 1.0,
            betas: (0.9, 0.95),
            weight_decay: 0.0,
            checkpoint_steps: 50,
            ranks: 1,
            pipeline_stages: 1,
        }
    }
}

/// What else the result is judged by, beside KL and perplexity on held-out text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Evaluation {
    /// Files of multiple-choice (`query`, `choices`, `gold`) or last-word (`context`, `continuation`) examples.
    pub benchmarks: Vec<String>,
    /// Examples of each benchmark at the most.
    #[schemars(range(min = 1))]
    pub examples: usize,
}

impl Default for Evaluation {
    fn default() -> Self {
        Self {
            benchmarks: Vec::new(),
            examples: 200,
        }
    }
}

/// Why a spec was refused: which field, what stands there, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", if .path.is_empty() { String::new() } else { format!("{}: ", .path) })]
pub struct SpecError {
    /// The field, as `target.limits.latency`; empty when the text as a whole is at fault.
    pub path: String,
    /// What stands there and what would be right, in lower case.
    pub message: String,
}

impl SpecError {
    pub(crate) fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            message: message.into(),
        }
    }
}

/// The JSON schema of [`JobSpec`], as `espalier schema` prints it.
pub fn json_schema() -> serde_json::Value {
    schemars::schema_for!(JobSpec).to_value()
}
