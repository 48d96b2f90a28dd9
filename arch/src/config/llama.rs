//! Llama and its kin (Mistral, Qwen2, Qwen3): each layer is an attention block and an MLP block.

use serde_json::{Value, json};

use super::keys::{Keys, MAX_LAYERS, MAX_TOKENS, MAX_VOCABULARY, MAX_WIDTH};
use super::rope;
use crate::{Activation, Architecture, Attention, Block, BlockShape, Family, Mlp, Result};

/// What transformers takes where a Qwen3 config has no `head_dim` key.
const QWEN3_HEAD_DIM: usize = 128;
/// What transformers takes where a config that slides has no `sliding_window` key.
const DEFAULT_WINDOW: usize = 4096;
/// What transformers takes where a Qwen config that slides has no `max_window_layers` key.
const DEFAULT_WINDOW_LAYERS: usize = 28;

pub(super) fn read(family: Family, keys: &Keys<'_>) -> Result<Architecture> {
    keys.only(
        "hidden_act",
        &json!("silu"),
        "the only activation of this family that is implemented",
    )?;
    let hidden = keys.size("hidden_size", MAX_WIDTH)?;
    let layers = keys.size("num_hidden_layers", MAX_LAYERS)?;
    let max_positions = keys.size("max_position_embeddings", MAX_TOKENS)?;
    let attention = attention(family, keys, hidden, max_positions)?;
    let mlp = Mlp {
        channels: keys.size("intermediate_size", MAX_WIDTH)?,
        activation: Activation::SwiGlu,
        bias: family == Family::Llama && keys.flag("mlp_bias", false)?,
    };
    let mut blocks = Vec::with_capacity(layers * 2);
    for (layer, sliding_window) in windows(family, keys, layers)?.into_iter().enumerate() {
        let attention = Attention {
            sliding_window,
            ..attention.clone()
        };
        blocks.push(Block {
            layer,
            shape: BlockShape::Attention(attention),
        });
        blocks.push(Block {
            layer,
            shape: BlockShape::Mlp(mlp.clone()),
        });
    }
    Ok(Architecture {
        family,
        vocab_size: keys.size("vocab_size", MAX_VOCABULARY)?,
        hidden,
        layers,
        blocks,
        tied_embedding: keys.flag("tie_word_embeddings", false)?,
        norm_epsilon: keys.epsilon(&["rms_norm_eps"])?,
        max_positions,
    })
}

fn attention(family: Family, keys: &Keys<'_>, hidden: usize, max_positions: usize) -> Result<Attention> {
    let heads = keys.size("num_attention_heads", MAX_WIDTH)?;
    let kv_groups = kv_groups(family, keys, heads)?;
    let head_dim = head_dim(family, keys, hidden, heads)?;
    let bias = family != Family::Mistral && keys.flag("attention_bias", false)?;
    Ok(Attention {
        kv_groups,
        queries_per_group: heads / kv_groups,
        head_dim,
        qkv_bias: bias || family == Family::Qwen2,
        output_bias: bias && family != Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        rope: Some(rope::read(keys, max_positions)?),
        sliding_window: None,
    })
}

/// Key/value heads: as many as query heads where the key is null, or where a Llama config has none.
fn kv_groups(family: Family, keys: &Keys<'_>, heads: usize) -> Result<usize> {
    const KEY: &str = "num_key_value_heads";
    if family != Family::Llama && keys.raw(KEY).is_none() {
        return Err(keys.missing(
            KEY,
            &format!("a whole number that divides num_attention_heads ({heads})"),
        ));
    }
    let groups = keys.optional_size(KEY, MAX_WIDTH)?.unwrap_or(heads);
    if !heads.is_multiple_of(groups) {
        return Err(keys.bad(
            KEY,
            format!("a number that divides num_attention_heads ({heads})"),
        ));
    }
    Ok(groups)
}

/// Head size: hidden / heads only where the config does not say otherwise.
fn head_dim(family: Family, keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize> {
    const KEY: &str = "head_dim";
    let head_dim = match keys.optional_size(KEY, MAX_WIDTH)? {
        Some(head_dim) => head_dim,
        None if family == Family::Qwen3 && keys.raw(KEY).is_none() => QWEN3_HEAD_DIM,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let expected = format!("a number that divides hidden_size ({hidden}), or a head_dim key");
            return Err(keys.bad("num_attention_heads", expected));
        }
    };
    if !head_dim.is_multiple_of(2) {
        let key = if keys.get(KEY).is_some() {
            KEY
        } else {
            "hidden_size"
        };
        return Err(keys.bad(
            key,
            format!("an even head size for rotary positions, not {head_dim}"),
        ));
    }
    keys.check_width(["num_attention_heads", KEY], [heads, head_dim])?;
    Ok(head_dim)
}

/// The sliding window of each layer's attention.
fn windows(family: Family, keys: &Keys<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    match family {
        Family::Mistral if keys.raw("sliding_window").is_none() => Ok(vec![Some(DEFAULT_WINDOW); layers]),
        Family::Mistral => Ok(vec![keys.optional_size("sliding_window", MAX_TOKENS)?; layers]),
        Family::Qwen2 | Family::Qwen3 if keys.flag("use_sliding_window", false)? => {
            qwen_windows(keys, layers)
        }
        _ => Ok(vec![None; layers]),
    }
}

fn qwen_windows(keys: &Keys<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let window = match keys.raw("sliding_window") {
        None => Some(DEFAULT_WINDOW),
        Some(_) => keys.optional_size("sliding_window", MAX_TOKENS)?,
    };
    let Some(types) = keys.get("layer_types") else {
        let full = match keys.get("max_window_layers") {
            None => DEFAULT_WINDOW_LAYERS,
            Some(_) => keys.whole("max_window_layers", 0, usize::MAX)?,
        };
        return Ok((0..layers)
            .map(|layer| window.filter(|_| layer >= full))
            .collect());
    };
    let expected = format!("a list of {layers} names, each full_attention or sliding_attention");
    let types = types.as_array().filter(|types| types.len() == layers);
    let types = types.ok_or_else(|| keys.bad("layer_types", expected.as_str()))?;
    let window_of = |name: &Value| match name.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") => Ok(window),
        _ => Err(keys.bad("layer_types", expected.as_str())),
    };
    types.iter().map(window_of).collect()
}
