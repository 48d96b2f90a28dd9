//! The flat form: a config in which every layer entry is one block with sizes of its own.
//!
//! transformers and vLLM load it through the two Python files that travel with it. Tensor names stay the
//! family's, numbered by block: `model.layers.7.mlp.up_proj.weight` is block 7's. `num_hidden_layers` counts the
//! attention blocks alone, since caches and vLLM's Transformers backend give every layer keys and values.
//! Everything that is not a size (RoPE, epsilon, token ids) keeps the key and value of the parent's config,
//! and is read back by the family's own reader.

use espalier_arch::{Activation, Architecture, Attention, Block, BlockShape, Mlp, Rope};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{dtype, expect_same};
use crate::checkpoint::Precision;
use crate::{Error, Result};

/// The `model_type` of the flat form.
pub const MODEL_TYPE: &str = "espalier";

/// The Python files that load it, by name.
pub const MODELLING_FILES: &[(&str, &str)] = &[
    (
        "configuration_espalier.py",
        include_str!("../../../serving/espalier_hf/configuration_espalier.py"),
    ),
    (
        "modeling_espalier.py",
        include_str!("../../../serving/espalier_hf/modeling_espalier.py"),
    ),
];

/// Keys that only the flat form has.
pub const OWN_KEYS: &[&str] = &["auto_map", "blocks", "family", "per_layer_config"];
/// Keys of families' configs that speak of layers one by one; blocks say the same.
const LAYER_KEYS: &[&str] = &[
    "layer_types",
    "max_window_layers",
    "sliding_window",
    "use_sliding_window",
];

/// One entry of `blocks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Entry {
    Attention {
        num_attention_heads: usize,
        num_key_value_heads: usize,
        head_dim: usize,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: bool,
        sliding_window: Option<usize>,
    },
    Mlp {
        intermediate_size: usize,
        bias: bool,
    },
}

/// Whether a config is of the flat form.
pub fn is_flat(config: &Value) -> bool {
    config.get("model_type").and_then(Value::as_str) == Some(MODEL_TYPE)
}

/// The same blocks, numbered by their place in the list.
pub fn renumbered(architecture: &Architecture) -> Architecture {
    let mut flattened = architecture.clone();
    for (index, block) in flattened.blocks.iter_mut().enumerate() {
        block.layer = index;
    }
    flattened.layers = flattened.blocks.len();
    flattened
}

/// The config of a flat checkpoint, from its parent's.
///
/// # Errors
/// When blocks differ in what the form has only once (RoPE, head size, sliding window), or are of a kind
/// that the modelling file does not have.
pub fn to_config(architecture: &Architecture, parent: &Value, precision: Precision) -> Result<Value> {
    let wrong = |reason: &str| Error::NotExportable {
        reason: reason.to_owned(),
    };
    let mut fields = parent
        .as_object()
        .cloned()
        .ok_or_else(|| wrong("the parent's config is not an object"))?;
    let family = match fields.get("family") {
        Some(family) if is_flat(parent) => family.clone(),
        _ => fields
            .get("model_type")
            .cloned()
            .ok_or_else(|| wrong("the parent's config has no model_type"))?,
    };
    for stale in OWN_KEYS.iter().chain(LAYER_KEYS).chain(&["torch_dtype"]) {
        fields.remove(*stale);
    }
    let entries = entries(architecture)?;
    add_bounds(&entries, &mut fields);
    let module = |file: &str, class: &str| format!("{file}_{MODEL_TYPE}.{class}");
    let own = [
        ("model_type", json!(MODEL_TYPE)),
        ("architectures", json!(["EspalierForCausalLM"])),
        (
            "auto_map",
            json!({
                "AutoConfig": module("configuration", "EspalierConfig"),
                "AutoModel": module("modeling", "EspalierModel"),
                "AutoModelForCausalLM": module("modeling", "EspalierForCausalLM"),
            }),
        ),
        ("family", family),
        ("dtype", json!(dtype(precision))),
        ("tie_word_embeddings", json!(architecture.tied_embedding)),
        ("rms_norm_eps", json!(architecture.norm_epsilon)),
        ("vocab_size", json!(architecture.vocab_size)),
        ("hidden_size", json!(architecture.hidden)),
        ("max_position_embeddings", json!(architecture.max_positions)),
        ("blocks", json!(entries)),
    ];
    fields.extend(own.map(|(key, value)| (key.to_owned(), value)));
    let config = Value::Object(fields);
    expect_same(architecture, &from_config(&config)?)?;
    Ok(config)
}

/// The list `blocks` of a flat config.
///
/// # Errors
/// When a block is of a kind that the form does not have.
pub fn blocks(architecture: &Architecture) -> Result<Value> {
    Ok(json!(entries(architecture)?))
}

fn entries(architecture: &Architecture) -> Result<Vec<Entry>> {
    let blocks = architecture.blocks.iter();
    blocks.map(|block| entry(&block.shape)).collect()
}

/// What readers that know no blocks are told: the largest of each size.
fn add_bounds(entries: &[Entry], fields: &mut Map<String, Value>) {
    let mut attention_blocks = 0usize;
    let (mut heads, mut kv_heads, mut head_size) = (0, 0, 0);
    let mut channels = 0;
    for entry in entries {
        match entry {
            Entry::Attention {
                num_attention_heads,
                num_key_value_heads,
                head_dim,
                ..
            } => {
                attention_blocks += 1;
                heads = heads.max(*num_attention_heads);
                kv_heads = kv_heads.max(*num_key_value_heads);
                head_size = head_size.max(*head_dim);
            }
            Entry::Mlp {
                intermediate_size, ..
            } => channels = channels.max(*intermediate_size),
        }
    }
    fields.insert("num_hidden_layers".to_owned(), json!(attention_blocks));
    if attention_blocks > 0 {
        fields.insert("num_attention_heads".to_owned(), json!(heads));
        fields.insert("num_key_value_heads".to_owned(), json!(kv_heads));
        fields.insert("head_dim".to_owned(), json!(head_size));
    }
    if channels > 0 {
        fields.insert("intermediate_size".to_owned(), json!(channels));
    }
}

/// The shape that a flat config describes.
///
/// # Errors
/// When a key is missing or wrong, by name.
pub fn from_config(config: &Value) -> Result<Architecture> {
    let wrong = |reason: String| Error::NotExportable { reason };
    let fields = config
        .as_object()
        .ok_or_else(|| wrong("the config is not an object".to_owned()))?;
    let family = fields
        .get("family")
        .and_then(Value::as_str)
        .ok_or_else(|| wrong("config family is missing, expected the model_type of the parent".to_owned()))?;
    let blocks = fields.get("blocks").cloned().unwrap_or(Value::Null);
    let entries: Vec<Entry> = serde_json::from_value(blocks).map_err(|error| {
        wrong(format!(
            "config blocks: {error}, expected a list of attention and mlp blocks"
        ))
    })?;
    let mut plain = fields.clone();
    for key in OWN_KEYS.iter().chain(LAYER_KEYS) {
        plain.remove(*key);
    }
    plain.insert("model_type".to_owned(), json!(family));
    plain.insert("num_hidden_layers".to_owned(), json!(1));
    let mut architecture = Architecture::from_config(&Value::Object(plain))?;
    let rope = architecture.blocks.iter().find_map(|block| match &block.shape {
        BlockShape::Attention(attention) => attention.rope.clone(),
        _ => None,
    });
    let shapes = entries
        .into_iter()
        .map(|entry| shape(entry, rope.as_ref()))
        .collect::<Result<Vec<_>>>()?;
    architecture.layers = shapes.len();
    architecture.blocks = shapes
        .into_iter()
        .enumerate()
        .map(|(layer, shape)| Block { layer, shape })
        .collect();
    Ok(architecture)
}

fn entry(shape: &BlockShape) -> Result<Entry> {
    match shape {
        BlockShape::Attention(attention) => Ok(Entry::Attention {
            num_attention_heads: attention.query_heads(),
            num_key_value_heads: attention.kv_groups,
            head_dim: attention.head_dim,
            qkv_bias: attention.qkv_bias,
            output_bias: attention.output_bias,
            qk_norm: attention.qk_norm,
            sliding_window: attention.sliding_window,
        }),
        BlockShape::Mlp(Mlp {
            channels,
            activation: Activation::SwiGlu,
            bias,
        }) => Ok(Entry::Mlp {
            intermediate_size: *channels,
            bias: *bias,
        }),
        other => Err(Error::NotExportable {
            reason: format!(
                "the flat form has no {:?} block of this kind, expected attention or a gated MLP",
                other.kind()
            ),
        }),
    }
}

fn shape(entry: Entry, rope: Option<&Rope>) -> Result<BlockShape> {
    match entry {
        Entry::Attention {
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            qkv_bias,
            output_bias,
            qk_norm,
            sliding_window,
        } => {
            let whole = num_key_value_heads > 0
                && num_attention_heads > 0
                && num_attention_heads.is_multiple_of(num_key_value_heads);
            if !whole || head_dim == 0 || !head_dim.is_multiple_of(2) || sliding_window == Some(0) {
                return Err(Error::NotExportable {
                    reason: format!(
                        "config blocks: attention with {num_attention_heads} query heads, {num_key_value_heads} KV heads of \
                         {head_dim} and a window of {sliding_window:?}, expected positive sizes, query heads a multiple of \
                         KV heads and an even head size"
                    ),
                });
            }
            Ok(BlockShape::Attention(Attention {
                kv_groups: num_key_value_heads,
                queries_per_group: num_attention_heads / num_key_value_heads,
                head_dim,
                qkv_bias,
                output_bias,
                qk_norm,
                rope: rope.cloned(),
                sliding_window,
            }))
        }
        Entry::Mlp {
            intermediate_size: 0, ..
        } => Err(Error::NotExportable {
            reason: "config blocks: an mlp with intermediate_size 0, expected at least 1".to_owned(),
        }),
        Entry::Mlp {
            intermediate_size,
            bias,
        } => Ok(BlockShape::Mlp(Mlp {
            channels: intermediate_size,
            activation: Activation::SwiGlu,
            bias,
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_that_know_no_blocks_are_told_the_largest_of_each_size() {
        let attention = |num_attention_heads, num_key_value_heads| Entry::Attention {
            num_attention_heads,
            num_key_value_heads,
            head_dim: 64,
            qkv_bias: false,
            output_bias: false,
            qk_norm: false,
            sliding_window: None,
        };
        let mut fields = Map::new();
        add_bounds(&[attention(6, 2), attention(4, 4)], &mut fields);
        assert_eq!(fields.get("num_attention_heads"), Some(&json!(6)));
        assert_eq!(fields.get("num_key_value_heads"), Some(&json!(4)));
    }
}
