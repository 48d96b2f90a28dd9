//! What vLLM is asked to open: configs of the flat form, which the plugin's model class serves, and how much of keys
//! and values a load needs.

use espalier_arch::{Architecture, BlockShape, Precision};
use espalier_model::export::flat;
use espalier_search::{Workload, sequence_pages, step_tokens};
use serde_json::{Value, json};

use super::Error;

/// Tokens that one step may compute: a workload's prompts are computed in one, as the cost model has it.
pub(super) const MOST_TOKENS: usize = 1 << 15;

/// Blocks of keys and values that vLLM never gives to a sequence.
pub(super) const SPARE_BLOCKS: usize = 1;

/// The config of a model of this shape whose sequences have up to `max_context` tokens. RoPE is plain: how its
/// wavelengths are stretched changes the values of a table, not the time of looking them up.
///
/// # Errors
/// When a block is of a kind that the form does not have.
pub(super) fn config(
    architecture: &Architecture,
    precision: Precision,
    max_context: usize,
) -> crate::Result<Value> {
    let theta = architecture.blocks.iter().find_map(|block| match &block.shape {
        BlockShape::Attention(attention) => attention.rope.as_ref().map(|rope| rope.theta),
        _ => None,
    });
    Ok(json!({
        "model_type": flat::MODEL_TYPE,
        "architectures": ["EspalierForCausalLM"],
        "family": architecture.family,
        "dtype": if precision == Precision::F32 { "float32" } else { "bfloat16" },
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden,
        "hidden_act": "silu",
        "max_position_embeddings": architecture.max_positions.max(max_context),
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_theta": theta.unwrap_or(10_000.0),
        "tie_word_embeddings": architecture.tied_embedding,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "blocks": flat::blocks(architecture)?,
    }))
}

/// As the protocol has it.
///
/// # Errors
/// When vLLM is not asked for it here.
pub(super) fn precision_name(precision: Precision) -> Result<String, Error> {
    match precision {
        Precision::F32 => Ok("f32".to_owned()),
        Precision::Bf16 => Ok("bf16".to_owned()),
        other => Err(Error::Refused {
            reason: format!("its precision is {other:?}, expected f32 or bf16"),
        }),
    }
}

/// How large an engine has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    /// Of one sequence.
    pub context: usize,
    /// At a time.
    pub sequences: usize,
    /// Of one prompt.
    pub prompt: usize,
    /// Steps at a time, as [`steps_under_way`](super::protocol::Hello::steps_under_way) says.
    pub steps: usize,
}

impl Load {
    /// A workload's, of which `running` requests run together, in an engine with so many steps under way.
    pub fn of(workload: &Workload, running: usize, steps: usize) -> Self {
        Self {
            context: workload.prompt_tokens.saturating_add(workload.output_tokens),
            sequences: running.clamp(1, workload.concurrency),
            prompt: workload.prompt_tokens,
            steps,
        }
    }

    /// Tokens of one step at the most.
    ///
    /// # Errors
    /// When the prompts have more than one step may compute.
    pub fn max_tokens(self) -> Result<usize, Error> {
        let tokens = self.prompt.saturating_mul(self.sequences);
        if tokens > MOST_TOKENS {
            return Err(Error::Refused {
                reason: format!(
                    "{} prompts of {} tokens are {tokens} tokens, expected at most {MOST_TOKENS} in one step",
                    self.sequences, self.prompt
                ),
            });
        }
        Ok(step_tokens(self.prompt, self.sequences))
    }

    /// Blocks of keys and values that its sequences fill in such a model, and what vLLM keeps back. Where windows differ,
    /// which nothing that is planned has, as many as the widest needs.
    pub fn blocks(self, architecture: &Architecture, block_tokens: usize) -> u64 {
        let under_way = step_tokens(self.prompt, self.sequences).saturating_mul(self.steps);
        let each = architecture.blocks.iter().filter_map(|block| match &block.shape {
            BlockShape::Attention(attention) => {
                let window = attention.sliding_window;
                Some(sequence_pages(self.context, window, under_way, block_tokens))
            }
            _ => None,
        });
        let each = each.max().unwrap_or(0);
        each.saturating_mul(self.sequences).saturating_add(SPARE_BLOCKS) as u64
    }

    /// Bytes of them.
    pub fn kv_bytes(self, architecture: &Architecture, precision: Precision, block_tokens: usize) -> u64 {
        let widths = architecture.blocks.iter().map(|block| match &block.shape {
            BlockShape::Attention(attention) => attention.kv_width() as u64,
            _ => 0,
        });
        let of_token = widths.sum::<u64>().saturating_mul(2 * precision.bytes());
        self.blocks(architecture, block_tokens)
            .saturating_mul(block_tokens as u64)
            .saturating_mul(of_token)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use espalier_arch::{Attention, Block, Family, Storage, WeightFormat};
    use espalier_search::{EngineMemory, MemoryModel, Workload};

    use super::*;

    /// One block of attention, which looks back as far as `window`.
    fn model(window: Option<usize>) -> Architecture {
        let attention = Attention {
            kv_groups: 2,
            queries_per_group: 2,
            head_dim: 32,
            qkv_bias: false,
            output_bias: false,
            qk_norm: false,
            rope: None,
            sliding_window: window,
        };
        Architecture {
            family: Family::Llama,
            vocab_size: 100,
            hidden: 128,
            layers: 1,
            blocks: vec![Block {
                layer: 0,
                shape: BlockShape::Attention(attention),
            }],
            tied_embedding: true,
            norm_epsilon: 1e-5,
            max_positions: 8192,
        }
    }

    #[test]
    fn keys_and_values_are_counted_by_whole_blocks_and_the_null_block() {
        let load = Load {
            context: 65,
            sequences: 3,
            prompt: 33,
            steps: 1,
        };
        assert_eq!(load.blocks(&model(None), 32), 3 * 3 + 1);
        assert_eq!(load.max_tokens(), Ok(256));
        let large = Load {
            prompt: MOST_TOKENS,
            ..load
        };
        assert!(
            large
                .max_tokens()
                .unwrap_err()
                .to_string()
                .contains("3 prompts of 32768 tokens")
        );
    }

    #[test]
    fn what_is_opened_is_what_is_predicted_with_a_window_and_without() {
        let workload = Workload {
            prompt_tokens: 100,
            output_tokens: 4000,
            concurrency: 2,
        };
        let memory = MemoryModel::unpaged(Storage::all(WeightFormat::Bf16));
        for (window, steps, pages) in [
            (None, 1, 129),
            (Some(1024), 1, 41),
            (Some(1024), 2, 49),
            (Some(1 << 20), 2, 129),
        ] {
            let load = Load {
                context: 4100,
                sequences: 2,
                prompt: 100,
                steps,
            };
            let paged = memory.paged(Some(&EngineMemory {
                overhead_bytes: 0,
                block_tokens: 32,
                spare_blocks: SPARE_BLOCKS,
                steps_under_way: steps,
            }));
            let model = model(window);
            assert_eq!(load.blocks(&model, 32), 2 * pages + 1, "{window:?}");
            let predicted: u64 = model
                .blocks
                .iter()
                .map(|block| paged.kv_bytes(&block.shape, &workload))
                .sum();
            assert_eq!(
                load.kv_bytes(&model, Precision::Bf16, 32),
                predicted,
                "{window:?}"
            );
        }
    }
}
