//! What is asked of a config alone.

use std::path::PathBuf;

use clap::Args;
use espalier_arch::{Precision, Storage};

use super::remote::How;
use super::values::{bytes, cache_precision};

#[derive(Debug, Args)]
pub(crate) struct Estimate {
    /// A Hugging Face `config.json`, or the directory that it lies in; weights are not needed.
    pub config: PathBuf,
    /// Tokens of each sequence at its longest, as one figure; otherwise prompt and output tokens are added.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["prompt_tokens", "output_tokens"])]
    pub context: Option<usize>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 1024, value_name = "TOKENS")]
    pub prompt_tokens: usize,
    /// Tokens generated for each request.
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub output_tokens: usize,
    /// Sequences that run together.
    #[arg(long, default_value_t = 1, value_name = "SEQUENCES")]
    pub concurrency: usize,
    /// How weights are stored: f32, bf16, fp8 or nvfp4; with exceptions for tables (embedding and head), attention, mamba,
    /// mlp, experts and shared, as in `nvfp4,attention=bf16,mamba=fp8`. Norms, routers and the like are never quantised,
    /// tables only where they are named.
    #[arg(long, default_value = "bf16")]
    pub precision: Storage,
    /// How keys and values are stored: f32, bf16, f16 or fp8. Default: f32 beside f32, bf16 otherwise.
    #[arg(long, value_parser = cache_precision)]
    pub kv_precision: Option<Precision>,
    /// Tokens of one page of keys and values: 16 in vLLM on a GPU, 32 on a processor; 1 rounds nothing.
    #[arg(long, default_value_t = 16, value_name = "TOKENS")]
    pub block_tokens: usize,
    /// Tensor-parallel ranks. Key/value heads that are fewer are held several times.
    #[arg(long, default_value_t = 1, value_name = "RANKS")]
    pub tensor_parallel: usize,
    /// Tokens that one step computes at the most (vLLM's max_num_batched_tokens), for the peak of activations and what is
    /// kept beside a sliding window.
    #[arg(long, default_value_t = 2048, value_name = "TOKENS")]
    pub step_tokens: usize,
    /// What the engine itself takes on each rank, as measured; a config does not say.
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub overhead: Option<u64>,
    #[command(flatten)]
    pub how: How,
}
