//! What can be said of a served model's memory before anything is measured: weights as stored, keys and values as
//! an engine pages them, Mamba's state.
//!
//! Each is a sum over blocks and what is outside them, so the solver's coefficients and every estimate come from
//! here. What an engine needs beside (activations, graphs, itself) is measured, or estimated in
//! [`estimate`](mod@crate::estimate).

use espalier_arch::{Architecture, BlockShape, Storage};

use crate::{EngineMemory, Workload};

/// How an engine stores a model and the state of its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryModel {
    /// How each part is stored.
    pub storage: Storage,
    /// Tokens of one page of keys and values; 1 where nothing is rounded.
    pub block_tokens: usize,
    /// Pages that the engine keeps back for itself.
    pub spare_blocks: usize,
}

impl MemoryModel {
    /// An engine that stores keys and values token by token, as the built-in one does.
    pub fn unpaged(storage: Storage) -> Self {
        Self {
            storage,
            block_tokens: 1,
            spare_blocks: 0,
        }
    }

    /// The same with an engine's pages, where they are known.
    #[must_use]
    pub fn paged(self, engine: Option<&EngineMemory>) -> Self {
        match engine {
            Some(engine) => Self {
                block_tokens: engine.block_tokens,
                spare_blocks: engine.spare_blocks,
                ..self
            },
            None => self,
        }
    }

    /// Pages for the workload at its longest: each sequence's own, and those kept back.
    pub fn pages(&self, workload: &Workload) -> u64 {
        self.pages_of(
            workload,
            workload.prompt_tokens.saturating_add(workload.output_tokens),
        )
    }

    fn pages_of(&self, workload: &Workload, tokens: usize) -> u64 {
        let each = tokens.div_ceil(self.block_tokens.max(1)) as u64;
        each.saturating_mul(workload.concurrency as u64)
            .saturating_add(self.spare_blocks as u64)
    }

    /// Bytes of one block's keys and values under the workload, pages rounded up; a sliding window keeps no more
    /// than itself.
    pub fn kv_bytes(&self, shape: &BlockShape, workload: &Workload) -> u64 {
        let context = workload.prompt_tokens.saturating_add(workload.output_tokens);
        let kept = match shape {
            BlockShape::Attention(attention) => attention
                .sliding_window
                .map_or(context, |window| window.min(context)),
            BlockShape::Mlp(_) | BlockShape::Mamba2(_) | BlockShape::Moe(_) => 0,
        };
        self.pages_of(workload, kept)
            .saturating_mul(self.block_tokens.max(1) as u64)
            .saturating_mul(shape.kv_bytes_per_token(self.storage.kv))
    }

    /// Bytes of one block's recurrent state for every sequence.
    pub fn state_bytes(&self, shape: &BlockShape, workload: &Workload) -> u64 {
        shape
            .state_bytes(self.storage.kv)
            .saturating_mul(workload.concurrency as u64)
    }

    /// Bytes of one block: weights, keys and values, state.
    pub fn block_bytes(&self, shape: &BlockShape, hidden: usize, workload: &Workload) -> u64 {
        shape
            .stored(hidden, &self.storage)
            .saturating_add(self.kv_bytes(shape, workload))
            .saturating_add(self.state_bytes(shape, workload))
    }

    /// Bytes of the whole model: every block, embedding, head and final norm.
    pub fn counted_bytes(&self, architecture: &Architecture, workload: &Workload) -> u64 {
        architecture
            .blocks
            .iter()
            .fold(architecture.stored_outside_blocks(&self.storage), |sum, block| {
                sum.saturating_add(self.block_bytes(&block.shape, architecture.hidden, workload))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{attention, small};
    use espalier_arch::WeightFormat;

    const WORKLOAD: Workload = Workload {
        prompt_tokens: 30,
        output_tokens: 3,
        concurrency: 4,
    };

    #[test]
    fn a_sequence_takes_whole_pages_and_the_engine_keeps_one_back() {
        let plain = MemoryModel::unpaged(Storage::all(WeightFormat::Bf16));
        let paged = plain.paged(Some(&EngineMemory {
            overhead_bytes: 0,
            block_tokens: 16,
            spare_blocks: 1,
        }));
        let shape = attention(2);
        let token = shape.kv_bytes_per_token(plain.storage.kv);
        assert_eq!(plain.kv_bytes(&shape, &WORKLOAD), 4 * 33 * token);
        assert_eq!(paged.pages(&WORKLOAD), 4 * 3 + 1);
        assert_eq!(paged.kv_bytes(&shape, &WORKLOAD), 13 * 16 * token);
    }

    #[test]
    fn the_whole_is_the_sum_of_its_tensors_and_caches() {
        let memory = MemoryModel::unpaged(Storage::all(WeightFormat::F32));
        let caches = 3 * 4 * 33 * attention(2).kv_bytes_per_token(memory.storage.kv);
        let weights = small().parameters().total * 4;
        assert_eq!(memory.counted_bytes(&small(), &WORKLOAD), weights + caches);
    }
}
