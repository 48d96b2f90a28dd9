//! GGUF files: metadata to a config, GGUF names to Hugging Face's, quantised blocks to f32.
//!
//! candle decodes the quantised blocks; the header is read by [`header`].

mod config;
mod header;

use std::path::Path;

use espalier_arch::Architecture;

use super::Opened;
use super::side_files::{GENERATION_CONFIG, SideFiles};
use super::stored::{Stored, TensorIndex, WeightFile};
use crate::tokenizer::gguf::Vocabulary;
use crate::{Error, Result};

use header::{Header, Metadata};

/// The tensor that carries Llama 3's stretched RoPE frequencies; the config says the same.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Opens a GGUF file.
pub fn open(path: &Path) -> Result<Opened> {
    let file = WeightFile::open(path)?;
    let mut header = header::read(path, &file.handle, file.bytes)?;
    let wrong = |reason: String| Error::Damaged {
        path: path.to_owned(),
        reason,
    };
    if header.integer("split.count").is_some_and(|count| count > 1) {
        return Err(wrong(
            "one part of a split GGUF file, expected a whole one (gguf-split --merge)".to_owned(),
        ));
    }
    let rope_factors = match header.tensors.remove(ROPE_FACTORS) {
        Some(info) => Some(read_vector(&file, &info)?),
        None => None,
    };
    let config = config::from_header(&header, rope_factors.as_deref()).map_err(wrong)?;
    let architecture = Architecture::from_config(&config).map_err(|error| wrong(error.to_string()))?;
    let side_files = side_files(&header, &config).map_err(wrong)?;
    let mut index = TensorIndex {
        listing: path.to_owned(),
        ..TensorIndex::default()
    };
    for (name, info) in &header.tensors {
        let stored = Stored {
            file: 0,
            offset: info.offset,
            shape: info.shape.clone(),
            encoding: info.encoding,
            interleaved_heads: config::interleaved_heads(name, &config),
        };
        index.tensors.insert(hugging_face_name(name), stored);
    }
    index.files.push(file);
    Ok(Opened {
        architecture,
        config,
        tensors: index,
        side_files,
    })
}

fn read_vector(file: &WeightFile, info: &header::TensorInfo) -> Result<Vec<f32>> {
    let stored = Stored {
        file: 0,
        offset: info.offset,
        shape: info.shape.clone(),
        encoding: info.encoding,
        interleaved_heads: None,
    };
    super::reading::read_vec(file, ROPE_FACTORS, &stored, None)
}

fn side_files(header: &Header, config: &serde_json::Value) -> std::result::Result<SideFiles, String> {
    let mut files = SideFiles::default();
    let Some(vocabulary) = vocabulary(header) else {
        return Ok(files);
    };
    for (name, bytes) in vocabulary.files()? {
        files.insert(name, bytes);
    }
    let mut generation = serde_json::Map::new();
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        if let Some(id) = config.get(key) {
            generation.insert(key.to_owned(), id.clone());
        }
    }
    let text = serde_json::to_vec_pretty(&generation).map_err(|error| error.to_string())?;
    files.insert(GENERATION_CONFIG, text);
    Ok(files)
}

/// What the metadata says about the tokenizer; none when it has no tokens.
fn vocabulary(header: &Header) -> Option<Vocabulary> {
    let texts = |key: &str| match header.metadata.get(key) {
        Some(Metadata::Texts(texts)) => texts.clone(),
        _ => Vec::new(),
    };
    let numbers = |key: &str| match header.metadata.get(key) {
        Some(Metadata::Numbers(numbers)) => numbers.clone(),
        _ => Vec::new(),
    };
    let truth = |key: &str| match header.metadata.get(key) {
        Some(Metadata::Bool(value)) => Some(*value),
        _ => None,
    };
    let id = |key: &str| header.integer(key).and_then(|id| u32::try_from(id).ok());
    let tokens = texts("tokenizer.ggml.tokens");
    if tokens.is_empty() {
        return None;
    }
    Some(Vocabulary {
        model: header.text("tokenizer.ggml.model").unwrap_or_default().to_owned(),
        pre_tokenizer: header.text("tokenizer.ggml.pre").map(str::to_owned),
        tokens,
        scores: numbers("tokenizer.ggml.scores"),
        kinds: numbers("tokenizer.ggml.token_type"),
        merges: texts("tokenizer.ggml.merges"),
        bos: id("tokenizer.ggml.bos_token_id"),
        eos: id("tokenizer.ggml.eos_token_id"),
        pad: id("tokenizer.ggml.padding_token_id"),
        unknown: id("tokenizer.ggml.unknown_token_id"),
        add_bos: truth("tokenizer.ggml.add_bos_token"),
        add_eos: truth("tokenizer.ggml.add_eos_token"),
        add_space_prefix: truth("tokenizer.ggml.add_space_prefix"),
        chat_template: header.text("tokenizer.chat_template").map(str::to_owned),
        context: config::context_length(header),
    })
}

/// The Hugging Face name of a GGUF tensor; one that is not known keeps its own, and is refused as surplus.
fn hugging_face_name(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => return "model.norm.weight".to_owned(),
        "output.weight" => return "lm_head.weight".to_owned(),
        _ => {}
    }
    let mut parts = name.splitn(4, '.');
    let (Some("blk"), Some(layer), Some(part), Some(kind)) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return name.to_owned();
    };
    let part = match part {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return name.to_owned(),
    };
    format!("model.layers.{layer}.{part}.{kind}")
}
