//! What there is room for, as far as it can be counted before vLLM is asked.

use espalier_arch::Architecture;
use espalier_search::Shortage;

use super::InVllm;
use super::models::Load;
use crate::agent::memory::{DeviceMemory, HostMemory};

impl InVllm<'_> {
    /// What a model of this shape needs under a load, as far as it can be counted, and what it can have.
    pub(super) fn shortage_of(&self, architecture: &Architecture, load: Load) -> Shortage {
        let block_tokens = self.helper.hello.block_tokens.multiple;
        let state = load.kv_bytes(architecture, self.precision, block_tokens);
        let open = self.open.iter().flatten().map(|whole| whole.memory_bytes);
        // A processor's memory is told with what is taken of it.
        let taken = if self.helper.hello.platform == "cpu" {
            0
        } else {
            open.fold(0, u64::saturating_add)
        };
        Shortage {
            needed_bytes: architecture.weight_bytes(self.precision).saturating_add(state),
            free_bytes: self.room_bytes().saturating_sub(taken),
        }
    }

    /// Memory of the device; of a processor what the system can give.
    pub(super) fn room_bytes(&self) -> u64 {
        let hello = &self.helper.hello;
        let free = match hello.platform.as_str() {
            "cpu" => HostMemory.free_bytes().unwrap_or(hello.memory_bytes),
            _ => hello.memory_bytes,
        };
        free.min(hello.memory_bytes)
    }
}
