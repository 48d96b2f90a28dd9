//! What serving a model will need, from its shape alone: nothing is measured, and every assumption is in the answer.
//!
//! - Weights: every tensor as stored, the vocabulary padded to a multiple of 64 as serving engines do.
//! - Keys and values: whole pages for every sequence at its longest.
//! - Mamba's state: recurrent state in f32, the convolution's inputs beside it.
//! - Activations: the widest block while one step's tokens pass through it (residual stream, its norm, what the block's
//!   matrices give before they are multiplied on), or the logits of every sequence, whichever is more. Two bytes a
//!   number (four in f32), logits once more in f32, as samplers want them.
//! - The engine itself (context, graphs, allocator): what it is said to be; it cannot be counted.

use espalier_arch::{Activation, Architecture, BlockShape, ComponentWeights, Precision, Storage};
use serde::{Deserialize, Serialize};

use crate::memory::{MemoryModel, Windows};
use crate::{Result, Workload};

/// What is assumed of the engine and the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assumptions {
    /// How each part is stored.
    pub storage: Storage,
    /// Prompt, output and concurrency; only their sum counts for keys and values.
    pub workload: Workload,
    /// Tokens of one page of keys and values.
    pub block_tokens: usize,
    /// Pages that the engine keeps back.
    pub spare_blocks: usize,
    /// Tensor-parallel ranks.
    pub ranks: usize,
    /// Tokens that one step computes at the most.
    pub step_tokens: usize,
    /// What the engine itself needs on each rank, bytes.
    pub overhead_bytes: u64,
}

/// Keys and values of one attention block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockCache {
    /// Index into the list of blocks.
    pub block: usize,
    /// Its layer in the checkpoint.
    pub layer: usize,
    /// Key/value heads on one rank.
    pub kv_groups: usize,
    /// Bytes of one token on one rank.
    pub bytes_per_token: u64,
    /// Bytes under the load on one rank.
    pub bytes: u64,
}

/// What serving a model will need; bytes are of one rank unless they say otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// What was assumed.
    pub assumptions: Assumptions,
    /// Parameters of the whole model, without padding.
    pub parameters: u64,
    /// Those that one token uses, both embedding tables included.
    pub active_parameters: u64,
    /// Weights by component.
    pub weights: Vec<ComponentWeights>,
    /// All of them.
    pub weight_bytes: u64,
    /// Each attention block's cache.
    pub caches: Vec<BlockCache>,
    /// Bytes of keys and values that one token adds.
    pub kv_bytes_per_token: u64,
    /// Pages of keys and values under the load.
    pub kv_blocks: u64,
    /// All keys and values.
    pub kv_bytes: u64,
    /// Recurrent state of one sequence.
    pub state_bytes_per_sequence: u64,
    /// Of all sequences.
    pub state_bytes: u64,
    /// Peak of what one step holds beside.
    pub activation_bytes: u64,
    /// The engine itself, as assumed.
    pub overhead_bytes: u64,
    /// All of the above on one rank.
    pub total_bytes: u64,
    /// All ranks together.
    pub all_ranks_bytes: u64,
}

/// What serving `architecture` will need.
///
/// # Errors
/// When the ranks cannot share the model out evenly.
pub fn estimate(architecture: &Architecture, assumptions: &Assumptions) -> Result<Estimate> {
    let share = architecture.rank_share(assumptions.ranks)?;
    let workload = &assumptions.workload;
    let memory = MemoryModel {
        storage: assumptions.storage,
        block_tokens: assumptions.block_tokens,
        spare_blocks: assumptions.spare_blocks,
        windows: Windows::Tokens(assumptions.step_tokens),
    };
    let parameters = architecture.parameters();
    let weights = share.stored(&assumptions.storage);
    let weight_bytes = total(weights.iter().map(|component| component.bytes));
    let caches = caches(&share, &memory, workload);
    let kv_bytes = total(caches.iter().map(|cache| cache.bytes));
    let state_bytes_per_sequence = share.state_bytes(assumptions.storage.kv);
    let state_bytes = state_bytes_per_sequence.saturating_mul(workload.concurrency as u64);
    let activation_bytes = activation_bytes(&share, assumptions);
    let overhead_bytes = assumptions.overhead_bytes;
    let total_bytes = total(
        [
            weight_bytes,
            kv_bytes,
            state_bytes,
            activation_bytes,
            overhead_bytes,
        ]
        .into_iter(),
    );
    Ok(Estimate {
        assumptions: *assumptions,
        parameters: parameters.total,
        active_parameters: parameters.active,
        weights,
        weight_bytes,
        kv_bytes_per_token: total(caches.iter().map(|cache| cache.bytes_per_token)),
        kv_blocks: pages(&share, &memory, workload),
        caches,
        kv_bytes,
        state_bytes_per_sequence,
        state_bytes,
        activation_bytes,
        overhead_bytes,
        total_bytes,
        all_ranks_bytes: total_bytes.saturating_mul(assumptions.ranks as u64),
    })
}

/// Pages of all blocks of attention, which lie beside each other; of windows of several widths those of the widest.
fn pages(share: &Architecture, memory: &MemoryModel, workload: &Workload) -> u64 {
    let each = share.blocks.iter().filter_map(|block| match &block.shape {
        BlockShape::Attention(attention) => Some(memory.pages(attention.sliding_window, workload)),
        _ => None,
    });
    each.max().unwrap_or(0)
}

fn caches(share: &Architecture, memory: &MemoryModel, workload: &Workload) -> Vec<BlockCache> {
    let blocks = share.blocks.iter().enumerate();
    blocks
        .filter_map(|(index, block)| match &block.shape {
            BlockShape::Attention(attention) => Some(BlockCache {
                block: index,
                layer: block.layer,
                kv_groups: attention.kv_groups,
                bytes_per_token: block.shape.kv_bytes_per_token(memory.storage.kv),
                bytes: memory.kv_bytes(&block.shape, workload),
            }),
            BlockShape::Mlp(_) | BlockShape::Mamba2(_) | BlockShape::Moe(_) => None,
        })
        .collect()
}

/// The widest block's activations for one step's tokens, or every sequence's logits.
fn activation_bytes(share: &Architecture, assumptions: &Assumptions) -> u64 {
    let workload = &assumptions.workload;
    let number = assumptions.storage.plain.bytes();
    let waiting = workload.prompt_tokens.saturating_mul(workload.concurrency);
    let tokens = assumptions.step_tokens.min(waiting.max(workload.concurrency)) as u64;
    let widest = share.blocks.iter().map(|block| width(&block.shape, share.hidden));
    let widest = widest.max().unwrap_or(0);
    // The residual stream and its norm.
    let stream = (share.hidden as u64).saturating_mul(2);
    let block = tokens
        .saturating_mul(stream.saturating_add(widest))
        .saturating_mul(number);
    let logit = number.saturating_add(Precision::F32.bytes());
    let logits = (workload.concurrency as u64)
        .saturating_mul(share.vocab_size as u64)
        .saturating_mul(logit);
    block.max(logits)
}

/// Numbers that a block holds for one token between its matrices; `hidden` is the residual stream's width.
fn width(shape: &BlockShape, hidden: usize) -> u64 {
    let width = match shape {
        // Queries, keys and values, and what attention gives.
        BlockShape::Attention(attention) => attention
            .query_width()
            .saturating_add(attention.kv_width())
            .saturating_mul(2),
        BlockShape::Mlp(mlp) => between(mlp.activation, mlp.channels),
        // z, x, B, C and dt; x, B and C after the convolution; y.
        BlockShape::Mamba2(mamba) => mamba
            .inner_width()
            .saturating_mul(2)
            .saturating_add(mamba.convolved_width().saturating_mul(2))
            .saturating_add(mamba.heads),
        // Its experts' channels and outputs for every choice, the shared ones, the router's logits in f32.
        BlockShape::Moe(moe) => between(moe.activation, moe.expert_channels)
            .saturating_add(moe.latent.unwrap_or(hidden))
            .saturating_mul(moe.experts_per_token)
            .saturating_add(between(moe.activation, moe.shared_channels))
            .saturating_add(moe.experts.saturating_mul(2)),
    };
    width as u64
}

/// What goes into the activation and what comes out.
fn between(activation: Activation, channels: usize) -> usize {
    channels.saturating_mul(activation.matrices())
}

fn total(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::cast_precision_loss)]
    use super::*;
    use crate::fixtures::small;
    use espalier_arch::WeightFormat;

    fn assumptions(ranks: usize) -> Assumptions {
        Assumptions {
            storage: Storage::all(WeightFormat::Bf16),
            workload: Workload {
                prompt_tokens: 60,
                output_tokens: 5,
                concurrency: 3,
            },
            block_tokens: 16,
            spare_blocks: 1,
            ranks,
            step_tokens: 128,
            overhead_bytes: 7,
        }
    }

    #[test]
    fn the_total_is_the_sum_of_its_components() {
        let found = estimate(&small(), &assumptions(1)).unwrap();
        // 100 entries are padded to 128.
        let padded = small().parameters().total + 28 * 32;
        assert_eq!(found.weight_bytes, 2 * padded);
        assert_eq!(found.parameters, small().parameters().total);
        // Three blocks of two heads of 8, keys and values; five pages of 16 a sequence, one kept back.
        assert_eq!(found.kv_bytes_per_token, 3 * 2 * 16 * 2);
        assert_eq!(found.kv_blocks, 16);
        assert_eq!(found.kv_bytes, 16 * 16 * found.kv_bytes_per_token);
        // 128 tokens through an MLP of 64 gated channels are more than three sequences' logits.
        assert_eq!(found.activation_bytes, 128 * (2 * 32 + 3 * 64) * 2);
        let parts = found.weight_bytes + found.kv_bytes + found.activation_bytes + 7;
        assert_eq!((found.total_bytes, found.state_bytes), (parts, 0));
    }

    #[test]
    fn ranks_share_caches_until_there_are_more_of_them_than_heads() {
        let cache = |ranks| estimate(&small(), &assumptions(ranks)).unwrap().kv_bytes;
        assert_eq!(cache(2) * 2, cache(1));
        assert_eq!(cache(4), cache(2), "each of four ranks holds a whole head");
    }
}
