//! Parameters and memory of a model from its config alone.

use std::path::Path;

use espalier_arch::Architecture;
use espalier_search::Workload;
use espalier_search::estimate::{Assumptions, estimate};
use serde_json::Value;

use crate::args::Estimate;
use crate::{failure, output};

/// A config is a few kilobytes; a larger file is something else.
const LARGEST_CONFIG: u64 = 4 << 20;
/// No model, engine or cluster has more of anything.
const MOST: usize = 1 << 40;

pub(crate) fn run(asked: &Estimate) -> anyhow::Result<()> {
    let architecture = read(&asked.config)?;
    let assumptions = assumptions(asked)?;
    let found = estimate(&architecture, &assumptions).map_err(|error| failure::usage(error.to_string()))?;
    output::estimate(&found).print_one(asked.how)
}

/// The model of a config.json, or of the directory that it lies in.
pub(super) fn read(path: &Path) -> anyhow::Result<Architecture> {
    let file = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_owned()
    };
    let shown = file.display();
    let wrong = |reason: String| failure::usage(format!("{shown} {reason}"));
    let length = std::fs::metadata(&file).map_or(0, |metadata| metadata.len());
    if length > LARGEST_CONFIG {
        return Err(wrong(format!(
            "has {length} bytes, expected a config of at most {LARGEST_CONFIG}"
        )));
    }
    let text = std::fs::read_to_string(&file).map_err(|error| {
        wrong(format!(
            "cannot be read: {error}; give a Hugging Face config.json or its directory"
        ))
    })?;
    let mut config: Value =
        serde_json::from_str(&text).map_err(|error| wrong(format!("is no JSON: {error}")))?;
    // How a checkpoint was quantised does not change its shape, and each tool writes it in its own way.
    if let Some(fields) = config.as_object_mut()
        && fields.remove("quantization_config").is_some()
    {
        output::say("the config's quantization_config is not read: --precision says how weights are stored");
    }
    Architecture::from_config(&config).map_err(|error| wrong(format!("cannot be counted: {error}")))
}

fn assumptions(asked: &Estimate) -> anyhow::Result<Assumptions> {
    let (prompt_tokens, output_tokens) = match asked.context {
        Some(context) => (context, 0),
        None => (asked.prompt_tokens, asked.output_tokens),
    };
    let given = [
        ("--context or --prompt-tokens", prompt_tokens, 1),
        ("--output-tokens", output_tokens, 0),
        ("--concurrency", asked.concurrency, 1),
        ("--block-tokens", asked.block_tokens, 1),
        ("--tensor-parallel", asked.tensor_parallel, 1),
        ("--step-tokens", asked.step_tokens, 1),
    ];
    if let Some((flag, value, least)) = given
        .into_iter()
        .find(|(_, value, least)| value < least || *value > MOST)
    {
        return Err(failure::usage(format!(
            "{flag} is {value}, expected {least} to {MOST}"
        )));
    }
    let mut storage = asked.precision;
    storage.kv = asked.kv_precision.unwrap_or(storage.kv);
    Ok(Assumptions {
        storage,
        workload: Workload {
            prompt_tokens,
            output_tokens,
            concurrency: asked.concurrency,
        },
        block_tokens: asked.block_tokens,
        // Engines that page keep one page back for what is no token; without pages there is none.
        spare_blocks: usize::from(asked.block_tokens > 1),
        ranks: asked.tensor_parallel,
        step_tokens: asked.step_tokens,
        overhead_bytes: asked.overhead.unwrap_or(0),
    })
}
