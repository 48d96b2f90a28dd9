//! Our side of `make check-parity`: runs a parent as a request asks and writes what came out.
//!
//! `parity PARENT REQUEST.json OUTPUT`: OUTPUT is a directory that exists. The other side, and what the request
//! says, is `tests/parity/compare.py`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use espalier_arch::Variant;
use espalier_model::checkpoint::{Parent, Precision};
use espalier_model::decode::Session;
use espalier_model::export::export;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::{Layout, Operations};
use espalier_model::runner::Runner;
use espalier_model::{Model, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::Deserialize;
use serde_json::json;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What is asked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Encoded with the parent's tokenizer, and cut to fill the sequences.
    #[serde(default)]
    text: Option<String>,
    /// Instead of a text.
    #[serde(default)]
    tokens: Vec<u32>,
    /// Sequences whose perplexity is taken together.
    sequences: usize,
    /// Tokens of each.
    sequence_tokens: usize,
    /// Texts to go on with greedily.
    #[serde(default)]
    prompts: Vec<String>,
    /// New tokens of each.
    #[serde(default)]
    new_tokens: usize,
    /// New tokens after the first of the sequences, of the parent and of each export, with a cache and without.
    export_tokens: usize,
    /// Smaller models by name.
    #[serde(default)]
    exports: BTreeMap<String, Export>,
}

/// A smaller model to be exported.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Export {
    /// By block; the other blocks stay whole.
    variants: BTreeMap<usize, Variant>,
    /// 16-bit weights: the logits are those of the export, opened again.
    bf16: bool,
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, request, output] = arguments.as_slice() else {
        return Err("usage: parity PARENT REQUEST.json OUTPUT".into());
    };
    let request: Request = serde_json::from_slice(&std::fs::read(request)?)?;
    let output = Path::new(output);
    let operations: Arc<dyn Operations> = Arc::new(CpuOperations::new());
    let parent = Parent::open(source)?;
    let model = Arc::new(parent.load(operations.as_ref())?);

    let layout = Layout {
        sequences: request.sequences,
        tokens: request.sequence_tokens,
    };
    let mut tokens = match &request.text {
        Some(text) => encode(&parent, text)?,
        None => request.tokens.clone(),
    };
    if tokens.len() < layout.rows() {
        return Err(format!("{} tokens, expected at least {}", tokens.len(), layout.rows()).into());
    }
    tokens.truncate(layout.rows());
    let first = tokens.get(..layout.tokens).ok_or("no sequence")?;

    let runner = Runner::new(Arc::clone(&operations), Arc::clone(&model));
    let perplexity = runner.perplexity(&tokens, layout, 2)?;
    let mut generated = Vec::new();
    for prompt in &request.prompts {
        let prompt = encode(&parent, prompt)?;
        let capacity = prompt.len() + request.new_tokens;
        let mut session = Session::new(Arc::clone(&operations), Arc::clone(&model), 1, capacity)?;
        let new = session
            .generate_greedy(&prompt, request.new_tokens, &[])?
            .concat();
        generated.push(json!({ "prompt": prompt, "new": new }));
    }
    write_expected(
        &operations,
        &model,
        first,
        request.export_tokens,
        &output.join("whole.safetensors"),
    )?;
    for (name, asked) in &request.exports {
        let smaller = write_export(&operations, &parent, &model, asked, &output.join(name))?;
        let path = output.join(format!("{name}.safetensors"));
        write_expected(&operations, &smaller, first, request.export_tokens, &path)?;
    }
    let result = json!({ "tokens": tokens, "perplexity": perplexity, "generated": generated });
    std::fs::write(output.join("result.json"), result.to_string())?;
    Ok(())
}

fn encode(parent: &Parent, text: &str) -> Outcome<Vec<u32>> {
    let encoding = parent
        .tokenizer()?
        .encode(text, false)
        .map_err(|error| error.to_string())?;
    Ok(encoding.get_ids().to_vec())
}

/// Slices and exports; gives the model whose logits the export must have.
fn write_export(
    operations: &Arc<dyn Operations>,
    parent: &Parent,
    model: &Model,
    asked: &Export,
    directory: &Path,
) -> Outcome<Arc<Model>> {
    let mut candidate = parent.architecture.whole();
    for (block, variant) in &asked.variants {
        *candidate.variants.get_mut(*block).ok_or("no such block")? = variant.clone();
    }
    let smaller = model.slice(&candidate)?;
    let precision = if asked.bf16 {
        Precision::Bf16
    } else {
        Precision::F32
    };
    export(&smaller, parent, directory, precision, operations.as_ref())?;
    if !asked.bf16 {
        return Ok(Arc::new(smaller));
    }
    let again = Parent::open(directory.to_str().ok_or("a path that is not text")?)?;
    Ok(Arc::new(again.load(operations.as_ref())?))
}

/// One sequence, its logits, and the likeliest tokens after its first half.
fn write_expected(
    operations: &Arc<dyn Operations>,
    model: &Arc<Model>,
    tokens: &[u32],
    new_tokens: usize,
    path: &Path,
) -> Outcome<()> {
    let layout = Layout {
        sequences: 1,
        tokens: tokens.len(),
    };
    let logits = Runner::new(Arc::clone(operations), Arc::clone(model)).logits(tokens, layout)?;
    let prompt = tokens.get(..tokens.len().min(16)).ok_or("no tokens")?;
    let generated = greedy(operations, model, prompt, new_tokens)?;
    let vocabulary = logits.columns();
    let logits = bytes(operations.download(&logits)?.into_iter().map(f32::to_le_bytes));
    let all = bytes(tokens.iter().map(|token| u64::from(*token).to_le_bytes()));
    let new = bytes(generated.iter().map(|token| u64::from(*token).to_le_bytes()));
    let rows = tokens.len();
    let tensors = [
        ("tokens", TensorView::new(Dtype::I64, vec![1, rows], &all)?),
        (
            "logits",
            TensorView::new(Dtype::F32, vec![rows, vocabulary], &logits)?,
        ),
        (
            "generated",
            TensorView::new(Dtype::I64, vec![generated.len()], &new)?,
        ),
    ];
    Ok(safetensors::serialize_to_file(tensors, None, path)?)
}

fn bytes<const SIZE: usize>(values: impl Iterator<Item = [u8; SIZE]>) -> Vec<u8> {
    values.flatten().collect()
}

/// The likeliest tokens after `prompt`, with a cache; an error where they differ without.
fn greedy(
    operations: &Arc<dyn Operations>,
    model: &Arc<Model>,
    prompt: &[u32],
    count: usize,
) -> Outcome<Vec<u32>> {
    let capacity = prompt.len() + count;
    let mut session = Session::new(Arc::clone(operations), Arc::clone(model), 1, capacity)?;
    let generated = session.generate_greedy(prompt, count, &[])?.concat();
    let runner = Runner::new(Arc::clone(operations), Arc::clone(model));
    let mut tokens = prompt.to_vec();
    for expected in &generated {
        let layout = Layout {
            sequences: 1,
            tokens: tokens.len(),
        };
        let hidden = runner.hidden_states(&tokens, layout)?;
        let last: Tensor = hidden.narrow_rows(tokens.len() - 1, 1)?;
        let logits = operations.logits(runner.head(&last))?;
        let found = session.likeliest(&logits)?;
        if found != [*expected] {
            let step = tokens.len() - prompt.len();
            return Err(format!("step {step}: {expected} with a cache, {found:?} without").into());
        }
        tokens.push(*expected);
    }
    Ok(generated)
}
