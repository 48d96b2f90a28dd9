//! What an engine cannot serve, refused once the parent's shape is known and before anything is measured.

use espalier_arch::{Activation, Architecture, BlockShape, Mlp};

use super::PlanError;
use super::context::Context;
use crate::spec::{Device, Engine};

/// Head sizes that vLLM's attention takes on a processor (0.26 and 0.32: `CPUAttentionBackend`).
const CPU_HEAD_SIZES: [usize; 11] = [32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512];
/// On a GPU, FlashAttention's: multiples of 8 up to this.
const LARGEST_GPU_HEAD: usize = 256;

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
    let longest = target
        .workload
        .prompt_tokens
        .saturating_add(target.workload.output_tokens);
    if longest > parent.max_positions {
        return Err(PlanError::Invalid(format!(
            "target.workload: prompt_tokens + output_tokens is {longest}, expected at most {}, the positions the \
             parent was made for",
            parent.max_positions
        )));
    }
    let mut windows = None;
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
