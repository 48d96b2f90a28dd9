//! What a worker and vLLM's process say to each other: `docs/dev/vllm-protocol.md`, version 1.
//!
//! Numbers that only people read are left out; keys that are not known are passed over.

use std::collections::BTreeMap;

use espalier_search::Workload;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version spoken.
pub(super) const VERSION: u32 = 1;
/// Of one line.
pub(super) const LINE_BYTES: u64 = 16 << 20;

/// A line of the helper's.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Answer {
    pub id: Option<u64>,
    #[serde(default)]
    pub progress: Option<Progress>,
    #[serde(default)]
    pub done: Option<Value>,
    #[serde(default)]
    pub error: Option<Refusal>,
}

/// How far a request has come.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Progress {
    pub stage: String,
    pub done: u64,
    /// Processor time since the helper began.
    pub cpu_seconds: f64,
}

/// Why a request came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Refusal {
    pub kind: String,
    pub says: String,
    /// Whether the process ends.
    #[serde(default)]
    pub fatal: bool,
}

/// What is asked.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Hello {
        protocol: u32,
        trusted_versions: Vec<String>,
    },
    Open(Open),
    Steps {
        engine: String,
        point: espalier_search::Point,
        repeats: usize,
        warm_ups: usize,
    },
    Serve {
        engine: String,
        workload: Workload,
        requests: usize,
    },
    Memory {},
    Close {
        engine: String,
    },
}

impl Request {
    /// For messages.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "start",
            Self::Open(_) => "open an engine",
            Self::Steps { .. } => "time steps",
            Self::Serve { .. } => "serve a workload",
            Self::Memory {} => "tell its memory",
            Self::Close { .. } => "close an engine",
        }
    }
}

/// Which model to open, and how.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Open {
    /// A name for what follows.
    pub engine: String,
    #[serde(flatten)]
    pub model: Model,
    /// `bf16` or `f32`.
    pub precision: String,
    /// Tokens of one step at the most.
    pub max_tokens: usize,
    /// Sequences at a time at the most.
    pub max_sequences: usize,
    /// Tokens of one sequence at the most.
    pub max_context: usize,
    /// Space of keys and values.
    pub kv_bytes: u64,
    /// Tokens of a block of them.
    pub block_tokens: usize,
    /// Whether vLLM compiles the model and, on a GPU, captures graphs.
    pub compiled: bool,
}

/// A model to serve.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Model {
    /// With random weights.
    Config(Value),
    /// With its own.
    Directory(String),
}

/// What the helper found itself in.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(super) struct Hello {
    pub protocol: u32,
    pub vllm: String,
    #[serde(default)]
    pub torch: String,
    #[serde(default)]
    pub plugin: String,
    /// `cpu` or `cuda`.
    pub platform: String,
    pub device: String,
    /// Of a CPU's engines.
    #[serde(default)]
    pub threads: usize,
    /// `LD_PRELOAD` as the process was started.
    #[serde(default)]
    pub preload: String,
    /// Of a GPU.
    #[serde(default)]
    pub driver: Option<String>,
    /// Of a GPU: fewer than the whole has where it is a part of one.
    #[serde(default)]
    pub multiprocessors: Option<u64>,
    /// Variables of vLLM's own that were set and may change how long something takes.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    #[serde(default)]
    pub graphs: bool,
    pub block_tokens: BlockTokens,
    /// Of the device, in all.
    pub memory_bytes: u64,
    /// A GPU's cache before its memory.
    #[serde(default)]
    pub cache_bytes: Option<usize>,
}

impl Hello {
    /// Steps that may be under way at a time: vLLM prepares a GPU's next one while it computes, and a CPU's does not.
    pub fn steps_under_way(&self) -> usize {
        if self.platform == "cuda" { 2 } else { 1 }
    }

    /// What times depend on beside the engine's version and the device's name, for the key of cost tables.
    pub fn environment(&self) -> BTreeMap<String, String> {
        // Where a library lies says nothing of it.
        let names = self
            .preload
            .split([':', ' '])
            .filter_map(|path| path.rsplit('/').next());
        let preload: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
        let told = [
            ("torch", self.torch.clone()),
            ("plugin", self.plugin.clone()),
            ("preload", preload.join(" ")),
            ("driver", self.driver.clone().unwrap_or_default()),
            (
                "multiprocessors",
                self.multiprocessors
                    .map(|count| count.to_string())
                    .unwrap_or_default(),
            ),
        ];
        let mut environment = self.settings.clone();
        let told = told.into_iter().filter(|(_, value)| !value.is_empty());
        environment.extend(told.map(|(name, value)| (name.to_owned(), value)));
        environment
    }
}

/// Tokens of a block of keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(super) struct BlockTokens {
    /// What they are a multiple of: the smallest block, of which a sequence wastes the least.
    pub multiple: usize,
}

/// An engine as it was opened.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Opened {
    /// Parameters and buffers.
    pub weight_bytes: u64,
    /// The null block among them.
    pub kv_blocks: u64,
    /// Of all layers.
    pub kv_bytes: u64,
    /// Bytes of a token by place in the list of blocks.
    #[serde(default)]
    pub kv_bytes_per_token: BTreeMap<String, u64>,
    /// Threads it computes with.
    #[serde(default)]
    pub threads: usize,
    /// What follows `vllm serve DIRECTORY` where a server is to run as this engine does.
    #[serde(default)]
    pub serve_arguments: Vec<String>,
    /// Variables that decide the same.
    #[serde(default)]
    pub serve_environment: BTreeMap<String, String>,
    pub seconds: f64,
}

/// Single steps, timed.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Steps {
    pub wall_ms: Vec<f64>,
    /// Share of all processors that others used.
    #[serde(default)]
    pub busy: Option<f64>,
    /// A GPU's own time.
    #[serde(default)]
    pub device_ms: Option<Vec<f64>>,
    /// What that is the time of.
    #[serde(default)]
    pub device_source: Option<DeviceSource>,
}

/// How a GPU's own time of a step was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DeviceSource {
    /// Its graph replayed back to back, and the kernels that it runs beside.
    Graph,
    /// The sum of its kernels.
    Kernels,
}

/// A workload, served.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Served {
    pub first_token_ms: Vec<f64>,
    pub end_to_end_ms: Vec<f64>,
    pub output_tokens_per_second: f64,
    #[serde(default)]
    pub busy: Option<f64>,
    pub preemptions: u64,
}

/// What the process holds on the host beside pages of files, and on the device.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Memory {
    pub held_bytes: u64,
    /// Since the last time it was asked.
    pub peak_held_bytes: u64,
    #[serde(default)]
    pub device: Option<DeviceMemory>,
}

/// What the process holds of a device: its allocator, now and at most since the last time it was asked, and beside it
/// where that is known.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct DeviceMemory {
    pub reserved_bytes: u64,
    pub peak_reserved_bytes: u64,
    #[serde(default)]
    pub outside_bytes: Option<u64>,
}

/// A request as it is written: its number and what is asked.
#[derive(Debug, Serialize)]
pub(super) struct Numbered<'a> {
    pub id: u64,
    #[serde(flatten)]
    pub request: &'a Request,
}
