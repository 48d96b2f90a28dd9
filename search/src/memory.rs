//! What can be said of a served model's memory before anything is measured: weights as stored, keys and values as
//! an engine pages them, Mamba's state.
//!
//! Each is a sum over blocks and what is outside them, so the solver's coefficients and every estimate come from
//! here. What an engine needs beside (activations, graphs, itself) is measured, or estimated in
//! [`estimate`](mod@crate::estimate).

use espalier_arch::{Architecture, BlockShape, Storage};

use crate::{EngineMemory, Workload};

/// Tokens that one step computes at the least.
const LEAST_STEP_TOKENS: usize = 256;

/// What an engine keeps of a sequence whose attention looks back no farther than a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// All of it, as the built-in engine does.
    Whole,
    /// The pages that [`sequence_pages`] says, with the [`step_tokens`] of the workload and so many steps under way.
    Prompts {
        /// As [`EngineMemory::steps_under_way`].
        steps_under_way: usize,
    },
    /// The same with so many tokens under way.
    Tokens(usize),
}

/// Pages of keys and values that one sequence of `context` tokens needs at its longest, in an engine that pages like vLLM:
/// what lies behind the window is given up before each step, and the tokens of the steps that are under way come on top.
/// The window may begin in the middle of a page, which is one more.
pub fn sequence_pages(context: usize, window: Option<usize>, tokens_under_way: usize, page: usize) -> usize {
    let page = page.max(1);
    let whole = context.div_ceil(page);
    window.map_or(whole, |window| {
        let held = window.saturating_sub(1).saturating_add(tokens_under_way);
        whole.min(held.div_ceil(page).saturating_add(1))
    })
}

/// Tokens that one step of an engine has to be allowed to compute for the prompts of so many sequences to take one, and for
/// those that come later to find room beside those that run.
pub fn step_tokens(prompt_tokens: usize, sequences: usize) -> usize {
    let together = prompt_tokens.saturating_mul(sequences);
    together.max(LEAST_STEP_TOKENS).max(sequences.saturating_add(1))
}

/// How an engine stores a model and the state of its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryModel {
    /// How each part is stored.
    pub storage: Storage,
    /// Tokens of one page of keys and values; 1 where nothing is rounded.
    pub block_tokens: usize,
    /// Pages that the engine keeps back for itself.
    pub spare_blocks: usize,
    /// What is kept where attention has a window.
    pub windows: Windows,
}

impl MemoryModel {
    /// An engine that stores keys and values token by token, and all of them, as the built-in one does.
    pub fn unpaged(storage: Storage) -> Self {
        Self {
            storage,
            block_tokens: 1,
            spare_blocks: 0,
            windows: Windows::Whole,
        }
    }

    /// The same with an engine's pages, where they are known.
    #[must_use]
    pub fn paged(self, engine: Option<&EngineMemory>) -> Self {
        match engine {
            Some(engine) => Self {
                block_tokens: engine.block_tokens,
                spare_blocks: engine.spare_blocks,
                windows: Windows::Prompts {
                    steps_under_way: engine.steps_under_way,
                },
                ..self
            },
            None => self,
        }
    }

    /// Pages for the workload at its longest: each sequence's own where its attention looks back as far as `window`, and
    /// those kept back.
    pub fn pages(&self, window: Option<usize>, workload: &Workload) -> u64 {
        let context = workload.prompt_tokens.saturating_add(workload.output_tokens);
        let (window, under_way) = match self.windows {
            Windows::Whole => (None, 0),
            Windows::Prompts { steps_under_way } => {
                let tokens = step_tokens(workload.prompt_tokens, workload.concurrency);
                (window, tokens.saturating_mul(steps_under_way))
            }
            Windows::Tokens(tokens) => (window, tokens),
        };
        let each = sequence_pages(context, window, under_way, self.block_tokens) as u64;
        each.saturating_mul(workload.concurrency as u64)
            .saturating_add(self.spare_blocks as u64)
    }

    /// Bytes of one block's keys and values under the workload, pages rounded up.
    pub fn kv_bytes(&self, shape: &BlockShape, workload: &Workload) -> u64 {
        let BlockShape::Attention(attention) = shape else {
            return 0;
        };
        self.pages(attention.sliding_window, workload)
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
    const PAGES: EngineMemory = EngineMemory {
        overhead_bytes: 0,
        block_tokens: 16,
        spare_blocks: 1,
        steps_under_way: 1,
    };

    #[test]
    fn a_sequence_takes_whole_pages_and_the_engine_keeps_one_back() {
        let plain = MemoryModel::unpaged(Storage::all(WeightFormat::Bf16));
        let paged = plain.paged(Some(&PAGES));
        let shape = attention(2);
        let token = shape.kv_bytes_per_token(plain.storage.kv);
        assert_eq!(plain.kv_bytes(&shape, &WORKLOAD), 4 * 33 * token);
        assert_eq!(paged.pages(None, &WORKLOAD), 4 * 3 + 1);
        assert_eq!(paged.kv_bytes(&shape, &WORKLOAD), 13 * 16 * token);
    }

    #[test]
    fn a_window_keeps_itself_a_step_and_the_page_in_which_it_begins_and_never_more_than_all() {
        // vLLM 0.32, `SlidingWindowSpec.max_admission_blocks_per_request`: ceil((4095 + 8192) / 16) + 1.
        assert_eq!(sequence_pages(32_768, Some(4096), 8192, 16), 769);
        assert_eq!(sequence_pages(8448, Some(4096), 8192, 16), 528);
        assert_eq!(sequence_pages(32_768, None, 8192, 16), 2048);
        assert_eq!(sequence_pages(33, Some(1), 0, 16), 1);
    }

    #[test]
    fn a_paging_engine_gives_up_what_a_window_has_left_behind_and_the_built_in_one_keeps_it() {
        let plain = MemoryModel::unpaged(Storage::all(WeightFormat::Bf16));
        let paged = plain.paged(Some(&PAGES));
        let long = Workload {
            prompt_tokens: 100,
            output_tokens: 1000,
            concurrency: 2,
        };
        let mut shape = attention(2);
        if let BlockShape::Attention(attention) = &mut shape {
            attention.sliding_window = Some(65);
        }
        let token = shape.kv_bytes_per_token(plain.storage.kv);
        assert_eq!(plain.kv_bytes(&shape, &long), 2 * 1100 * token);
        // Of 64 tokens and a step of 256, 20 pages and one: of 69.
        assert_eq!(paged.kv_bytes(&shape, &long), (2 * 21 + 1) * 16 * token);
        assert_eq!(paged.kv_bytes(&attention(2), &long), (2 * 69 + 1) * 16 * token);
    }

    #[test]
    fn the_whole_is_the_sum_of_its_tensors_and_caches() {
        let memory = MemoryModel::unpaged(Storage::all(WeightFormat::F32));
        let caches = 3 * 4 * 33 * attention(2).kv_bytes_per_token(memory.storage.kv);
        let weights = small().parameters().total * 4;
        assert_eq!(memory.counted_bytes(&small(), &WORKLOAD), weights + caches);
    }
}
