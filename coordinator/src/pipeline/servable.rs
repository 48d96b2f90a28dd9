//! What an engine cannot serve, refused once the parent's shape is known and before anything is measured.

use espalier_arch::{Activation, Architecture, BlockShape, Mlp};
use espalier_search::Workload;

use super::PlanError;
use super::context::Context;
use crate::spec::{Device, Engine};

/// Head sizes that vLLM's attention takes on a processor (0.26 and 0.32: `CPUAttentionBackend`).
const CPU_HEAD_SIZES: [usize; 11] = [32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512];
/// On a GPU, FlashAttention's: multiples of 8 up to this.
const LARGEST_GPU_HEAD: usize = 256;
/// Tokens of all prompts that run together: the worker has them computed in one step.
const MOST_PROMPT_TOKENS: usize = 1 << 15;

/// Refuses a parent that the target's engine cannot serve. Blocks keep their kind, head size and window, so what holds
/// for the parent holds for every candidate.
pub(super) fn refuse_unservable(context: &Context<'_>, parent: &Architecture) -> Result<(), PlanError> {
    let target = &context.spec.target;
    match target.engine {
        Engine::Builtin => return Ok(()),
        Engine::Vllm => {}
    }
    let refused = |what: String| {
        Err(PlanError::Invalid(format!(
            "target.engine: vllm cannot serve {what}"
        )))
    };
    refuse_load(&target.workload, parent)?;
    let mut windows = None;
    let mut sizes = None;
    for (index, block) in parent.blocks.iter().enumerate() {
        match &block.shape {
            BlockShape::Attention(attention) => {
                if !takes_head(target.device, attention.head_dim) {
                    return refused(format!(
                        "block {index}: its head size is {}, expected {}; use target.engine: builtin",
                        attention.head_dim,
                        head_sizes(target.device)
                    ));
                }
                let (first, size) = sizes.get_or_insert((index, attention.head_dim));
                if *size != attention.head_dim {
                    return refused(format!(
                        "block {index}: its head size is {} and block {first}'s is {size}, expected the same in all; use \
                         target.engine: builtin",
                        attention.head_dim
                    ));
                }
                let (first, window) = windows.get_or_insert((index, attention.sliding_window));
                if *window != attention.sliding_window {
                    return refused(format!(
                        "block {index} at its true cost: its window of attention is {} and block {first}'s is {}, \
                         expected the same in all, or vLLM pads the smaller's pages; use target.engine: builtin",
                        words(attention.sliding_window),
                        words(*window)
                    ));
                }
            }
            BlockShape::Mlp(Mlp {
                activation: Activation::SwiGlu,
                ..
            }) => {}
            BlockShape::Mlp(_) | BlockShape::Mamba2(_) | BlockShape::Moe(_) => {
                return refused(format!(
                    "block {index}: its kind is {:?}, expected attention or an MLP gated by SiLU",
                    block.shape.kind()
                ));
            }
        }
    }
    if sizes.is_none() {
        return refused("a parent without attention, expected at least one block of it".to_owned());
    }
    Ok(())
}

fn takes_head(device: Device, size: usize) -> bool {
    match device {
        Device::Cpu => CPU_HEAD_SIZES.contains(&size),
        Device::Cuda => size.is_multiple_of(8) && size <= LARGEST_GPU_HEAD,
    }
}

fn head_sizes(device: Device) -> String {
    match device {
        Device::Cpu => {
            let sizes: Vec<String> = CPU_HEAD_SIZES.iter().map(usize::to_string).collect();
            format!("one of {}", sizes.join(", "))
        }
        Device::Cuda => format!("a multiple of 8 up to {LARGEST_GPU_HEAD}"),
    }
}

fn words(window: Option<usize>) -> String {
    window.map_or_else(|| "unlimited".to_owned(), |tokens| format!("{tokens} tokens"))
}

/// Refuses a workload that the parent has no positions for, or whose prompts are too many for one step.
fn refuse_load(workload: &Workload, parent: &Architecture) -> Result<(), PlanError> {
    workload
        .has_positions(parent)
        .map_err(|error| PlanError::Invalid(format!("target.{error}")))?;
    let together = workload.prompt_tokens.saturating_mul(workload.concurrency);
    if together > MOST_PROMPT_TOKENS {
        return Err(PlanError::Invalid(format!(
            "target.workload: prompt_tokens × concurrency is {together}, expected at most {MOST_PROMPT_TOKENS} in \
             vllm, which is timed computing them in one step"
        )));
    }
    Ok(())
}
