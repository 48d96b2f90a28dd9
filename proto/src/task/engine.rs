//! What runs the models of a task that measures.

use espalier_arch::Precision;
use serde::{Deserialize, Serialize};

/// What runs the models of a task that measures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// Our own decoding, in the precision of the device.
    #[default]
    Builtin,
    /// vLLM, in a process of the user's own Python beside the worker.
    Vllm {
        /// Of weights, arithmetic, keys and values.
        precision: Precision,
    },
}

impl Engine {
    /// Whether every worker has it.
    #[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
    pub fn is_builtin(&self) -> bool {
        *self == Self::Builtin
    }

    /// As workers announce it and cost tables name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::Vllm { .. } => VLLM,
        }
    }
}

/// The name under which workers announce vLLM.
pub const VLLM: &str = "vllm";
