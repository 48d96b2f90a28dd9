//! GGUF metadata as the config.json that the same model would have on a hub.

use serde_json::{Map, Value, json};

use super::header::{Header, Metadata};

type Parsed<T> = std::result::Result<T, String>;

/// Architectures that are read, each with its Hugging Face model type and class. Mistral's GGUF files call
/// themselves llama.
const FAMILIES: &[(&str, &str, &str)] = &[
    ("llama", "llama", "LlamaForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
];
/// RoPE's base where the file names none.
const DEFAULT_THETA: f64 = 10_000.0;

impl Header {
    /// An integer by its whole key.
    pub fn integer(&self, key: &str) -> Option<i64> {
        match self.metadata.get(key)? {
            Metadata::Integer(value) => Some(*value),
            _ => None,
        }
    }

    /// A number by its whole key.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.metadata.get(key)? {
            Metadata::Float(value) => Some(*value),
            #[allow(clippy::cast_precision_loss)] // factors and lengths are far below 2^53
            Metadata::Integer(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// A text by its whole key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key)? {
            Metadata::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// The longest sequence, where the file names it.
pub fn context_length(header: &Header) -> Option<i64> {
    header.integer(&format!(
        "{}.context_length",
        header.text("general.architecture")?
    ))
}

/// The config; `rope_factors` are those of the file's `rope_freqs.weight`.
pub fn from_header(header: &Header, rope_factors: Option<&[f32]>) -> Parsed<Value> {
    let prefix = header
        .text("general.architecture")
        .ok_or("metadata general.architecture is missing")?;
    let known: Vec<&str> = FAMILIES.iter().map(|(name, _, _)| *name).collect();
    let (_, model_type, class) = FAMILIES
        .iter()
        .find(|(name, _, _)| *name == prefix)
        .ok_or_else(|| {
            format!(
                "general.architecture is {prefix:?}, expected one of {}",
                known.join(", ")
            )
        })?;
    let size = |key: &str| size(header, prefix, key);
    let hidden = size("embedding_length")?;
    let heads = size("attention.head_count")?;
    let head_dim = match optional_size(header, prefix, "attention.key_length")? {
        Some(head_dim) => head_dim,
        None => hidden
            .checked_div(heads)
            .ok_or("attention.head_count is 0, expected at least 1")?,
    };
    check_head(header, prefix, head_dim)?;
    let vocabulary = vocabulary_size(header, prefix)?;
    let epsilon = header
        .number(&format!("{prefix}.attention.layer_norm_rms_epsilon"))
        .ok_or_else(|| format!("metadata {prefix}.attention.layer_norm_rms_epsilon is missing"))?;
    let theta = header
        .number(&format!("{prefix}.rope.freq_base"))
        .unwrap_or(DEFAULT_THETA);
    let context = size("context_length")?;
    let mut config = json!({
        "architectures": [class],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length")?,
        "num_hidden_layers": size("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": optional_size(header, prefix, "attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
        "tie_word_embeddings": !header.tensors.contains_key("output.weight"),
        "vocab_size": vocabulary,
        "dtype": "float32",
    });
    let Some(fields) = config.as_object_mut() else {
        return Ok(config);
    };
    let rope = Rope {
        theta,
        context,
        head_dim,
    };
    if let Some(scaling) = scaling(header, prefix, &rope, rope_factors)? {
        fields.insert("rope_scaling".to_owned(), scaling);
    }
    add_family_keys(header, prefix, fields);
    add_tokens(header, vocabulary, fields)?;
    Ok(config)
}

/// Keys that only some families have.
fn add_family_keys(header: &Header, prefix: &str, fields: &mut Map<String, Value>) {
    if prefix == "llama" {
        let biased = header.tensors.contains_key("blk.0.attn_q.bias");
        fields.insert("attention_bias".to_owned(), json!(biased));
        fields.insert(
            "mlp_bias".to_owned(),
            json!(header.tensors.contains_key("blk.0.ffn_up.bias")),
        );
    }
    if prefix == "qwen3" {
        fields.insert(
            "attention_bias".to_owned(),
            json!(header.tensors.contains_key("blk.0.attn_q.bias")),
        );
    }
}

fn add_tokens(header: &Header, vocabulary: usize, fields: &mut Map<String, Value>) -> Parsed<()> {
    for (key, name) in [
        ("bos", "bos_token_id"),
        ("eos", "eos_token_id"),
        ("padding", "pad_token_id"),
    ] {
        let metadata = format!("tokenizer.ggml.{key}_token_id");
        let Some(id) = header.integer(&metadata) else {
            continue;
        };
        if usize::try_from(id).is_ok_and(|id| id < vocabulary) {
            fields.insert(name.to_owned(), json!(id));
        } else {
            return Err(format!(
                "metadata {metadata} is {id}, expected an id below {vocabulary}"
            ));
        }
    }
    Ok(())
}

/// A positive size that every layer shares.
fn size(header: &Header, prefix: &str, key: &str) -> Parsed<usize> {
    optional_size(header, prefix, key)?.ok_or_else(|| format!("metadata {prefix}.{key} is missing"))
}

fn optional_size(header: &Header, prefix: &str, key: &str) -> Parsed<Option<usize>> {
    let name = format!("{prefix}.{key}");
    let positive = |value: i64| {
        usize::try_from(value)
            .ok()
            .filter(|size| *size > 0 && *size <= 1 << 32)
            .ok_or_else(|| format!("metadata {name} is {value}, expected a positive size"))
    };
    match header.metadata.get(&name) {
        None => Ok(None),
        Some(Metadata::Integer(value)) => positive(*value).map(Some),
        Some(Metadata::Numbers(layers)) => match layers.split_first() {
            #[allow(clippy::cast_possible_truncation)] // integers as stored
            Some((first, rest)) if rest.iter().all(|other| other == first) => {
                positive(*first as i64).map(Some)
            }
            _ => Err(format!(
                "metadata {name} differs from layer to layer, expected one value for all"
            )),
        },
        Some(other) => Err(format!("metadata {name} is {other:?}, expected an integer")),
    }
}

fn vocabulary_size(header: &Header, prefix: &str) -> Parsed<usize> {
    if let Some(size) = optional_size(header, prefix, "vocab_size")? {
        return Ok(size);
    }
    header
        .tensors
        .get("token_embd.weight")
        .and_then(|info| info.shape.first().copied())
        .ok_or_else(|| "tensor token_embd.weight: expected a matrix, found none".to_owned())
}

/// RoPE must cover the whole head, and values must be as wide as keys.
fn check_head(header: &Header, prefix: &str, head_dim: usize) -> Parsed<()> {
    for key in ["rope.dimension_count", "attention.value_length"] {
        if let Some(found) = optional_size(header, prefix, key)?
            && found != head_dim
        {
            return Err(format!(
                "metadata {prefix}.{key} is {found}, expected {head_dim}, the size of a head"
            ));
        }
    }
    Ok(())
}

struct Rope {
    theta: f64,
    context: usize,
    head_dim: usize,
}

fn scaling(header: &Header, prefix: &str, rope: &Rope, factors: Option<&[f32]>) -> Parsed<Option<Value>> {
    if let Some(factors) = factors {
        return llama3(rope, factors).map(Some);
    }
    let key = |name: &str| format!("{prefix}.rope.scaling.{name}");
    let kind = header.text(&key("type")).unwrap_or("none");
    let factor = header
        .number(&key("factor"))
        .or_else(|| header.number(&format!("{prefix}.rope.scale_linear")));
    match (kind, factor) {
        ("none", None) => Ok(None),
        ("none" | "linear", Some(factor)) => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
        ("yarn", Some(factor)) => {
            let original = header.integer(&key("original_context_length"));
            let mut scaling = json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original.map_or_else(|| json!(rope.context), |length| json!(length)),
            });
            if let (Some(fields), Some(attention)) =
                (scaling.as_object_mut(), header.number(&key("attn_factor")))
            {
                fields.insert("attention_factor".to_owned(), json!(attention));
            }
            Ok(Some(scaling))
        }
        (kind, None) => Err(format!(
            "metadata {} is {kind:?} without {}",
            key("type"),
            key("factor")
        )),
        (kind, Some(_)) => Err(format!(
            "metadata {} is {kind:?}, expected none, linear or yarn",
            key("type")
        )),
    }
}

/// Llama 3's scaling from the factors by which the file divides each frequency. The converter keeps only
/// the factors; every published model uses 1, 4 and 8192 for the rest, and the factors must agree.
fn llama3(rope: &Rope, factors: &[f32]) -> Parsed<Value> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    const ORIGINAL: f64 = 8192.0;
    let factor = f64::from(factors.iter().copied().fold(1.0f32, f32::max));
    let expected = |index: usize| {
        #[allow(clippy::cast_precision_loss)] // sizes of a head
        let exponent = 2.0 * index as f64 / rope.head_dim as f64;
        let wavelength = std::f64::consts::TAU * rope.theta.powf(exponent);
        if wavelength < ORIGINAL / HIGH {
            return 1.0;
        }
        if wavelength > ORIGINAL / LOW {
            return factor;
        }
        let smooth = (ORIGINAL / wavelength - LOW) / (HIGH - LOW);
        1.0 / ((1.0 - smooth) / factor + smooth)
    };
    let agrees = factors.len() == rope.head_dim / 2
        && factors
            .iter()
            .enumerate()
            .all(|(index, found)| (f64::from(*found) / expected(index) - 1.0).abs() < 1e-3);
    if !agrees {
        return Err(
            "tensor rope_freqs.weight: expected Llama 3's factors, found others, which no config expresses"
                .to_owned(),
        );
    }
    Ok(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": 8192,
    }))
}

/// Heads of a tensor whose rows the converter has interleaved: Llama's query and key.
pub fn interleaved_heads(name: &str, config: &Value) -> Option<usize> {
    if config.get("model_type").and_then(Value::as_str) != Some("llama") {
        return None;
    }
    let part = name.strip_prefix("blk.")?.split('.').nth(1)?;
    let key = match part {
        "attn_q" => "num_attention_heads",
        "attn_k" => "num_key_value_heads",
        _ => return None,
    };
    config
        .get(key)
        .and_then(Value::as_u64)
        .and_then(|heads| usize::try_from(heads).ok())
}
