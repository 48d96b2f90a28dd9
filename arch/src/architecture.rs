//! The whole model: an embedding, a flat list of blocks, a final norm and a head.

use serde::{Deserialize, Serialize};

use crate::{Block, Candidate, Error, Result, Variant};

/// A family of checkpoints that share tensor names and config keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// `LlamaForCausalLM`.
    Llama,
    /// `MistralForCausalLM`: Llama's tensors, with an optional sliding window.
    Mistral,
    /// `Qwen2ForCausalLM`: biases on query, key and value.
    Qwen2,
    /// `Qwen3ForCausalLM`: norms on each query and key head, a head size of its own.
    Qwen3,
    /// `NemotronHForCausalLM` and its puzzle forms: one block a layer.
    NemotronH,
}

/// A model's shape. Everything that follows from shapes alone is computed from this.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Architecture {
    /// The family whose tensor names and config keys the model uses.
    pub family: Family,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// How many layer numbers the checkpoint's tensor names span; kept when blocks are removed.
    pub layers: usize,
    /// The residual steps, in order. Blocks that were skipped are absent.
    pub blocks: Vec<Block>,
    /// Whether the head is the embedding itself.
    pub tied_embedding: bool,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f64,
    /// The longest sequence, in tokens, that the parent was made for.
    pub max_positions: usize,
}

impl Architecture {
    /// The smaller architecture in which each block has the candidate's variant; skipped blocks are absent
    /// and the others keep their layer numbers.
    ///
    /// # Errors
    /// When the candidate has another number of blocks or a variant does not fit its block.
    pub fn with_candidate(&self, candidate: &Candidate) -> Result<Self> {
        if candidate.variants.len() != self.blocks.len() {
            return Err(Error::CandidateLength {
                expected: self.blocks.len(),
                found: candidate.variants.len(),
            });
        }
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (index, (block, variant)) in self.blocks.iter().zip(&candidate.variants).enumerate() {
            let shape = block
                .shape
                .with_variant(variant)
                .map_err(|reason| Error::VariantDoesNotFit { block: index, reason })?;
            if let Some(shape) = shape {
                blocks.push(Block {
                    layer: block.layer,
                    shape,
                });
            }
        }
        Ok(Self {
            blocks,
            ..self.clone()
        })
    }

    /// The candidate that keeps every block whole.
    pub fn whole(&self) -> Candidate {
        Candidate {
            variants: vec![Variant::Whole; self.blocks.len()],
        }
    }
}
