//! Nemotron-H: one block a layer, of a kind that a pattern or a list names; and its puzzle form, in which
//! each block may have sizes of its own.
//!
//! The puzzle form is the plain config with a list `block_configs`, one entry a layer: null, or an object
//! whose keys stand before the config's own for that layer alone (see [`OVERRIDES`]). An entry's
//! `block_type`, where given, must agree with the pattern, or names the kind where there is no pattern.

use serde_json::{Map, Value, json};

use super::keys::{Keys, MAX_EXPERTS, MAX_LAYERS, MAX_TOKENS, MAX_VOCABULARY, MAX_WIDTH};
use crate::{
    Activation, Architecture, Attention, Block, BlockKind, BlockShape, Error, Family, Mamba2, Mlp, Moe,
    Result,
};

/// Keys that one block may have for itself. Another key in an entry is an error: dropped in silence it would
/// give a model of the wrong size.
const OVERRIDES: [&str; 16] = [
    "block_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "conv_kernel",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
];
const KIND_NAMES: &str = "mamba (or linear_attention), attention (or full_attention), mlp or moe";
/// Experts of all blocks together: each is several tensors of its own.
const MAX_EXPERTS_IN_ALL: usize = 1 << 18;

type Fields = Map<String, Value>;

pub(super) fn read(keys: &Keys<'_>) -> Result<Architecture> {
    refuse_what_is_not_implemented(keys)?;
    let entries = block_configs(keys)?;
    let kinds = kinds(keys, entries.as_deref())?;
    let mut blocks = Vec::with_capacity(kinds.len());
    let mut experts = 0;
    for (layer, kind) in kinds.iter().enumerate() {
        let entry = entries
            .as_ref()
            .and_then(|entries| entries.get(layer))
            .copied()
            .flatten();
        let own = entry.map_or(*keys, |entry| keys.overridden(entry, layer));
        let shape = shape(*kind, &own)?;
        if let BlockShape::Moe(moe) = &shape {
            experts += moe.experts;
        }
        blocks.push(Block { layer, shape });
    }
    if experts > MAX_EXPERTS_IN_ALL {
        let expected = format!("at most {MAX_EXPERTS_IN_ALL} experts in all layers together, not {experts}");
        return Err(keys.bad("n_routed_experts", expected));
    }
    Ok(Architecture {
        family: Family::NemotronH,
        vocab_size: keys.size("vocab_size", MAX_VOCABULARY)?,
        hidden: keys.size("hidden_size", MAX_WIDTH)?,
        layers: blocks.len(),
        blocks,
        tied_embedding: keys.flag("tie_word_embeddings", false)?,
        norm_epsilon: keys.epsilon(&["layer_norm_epsilon", "norm_eps", "rms_norm_eps"])?,
        max_positions: keys.size("max_position_embeddings", MAX_TOKENS)?,
    })
}

fn refuse_what_is_not_implemented(keys: &Keys<'_>) -> Result<()> {
    let only = "the only form of this family that is implemented";
    keys.only("mlp_hidden_act", &json!("relu2"), only)?;
    keys.only("mamba_hidden_act", &json!("silu"), only)?;
    keys.only("use_conv_bias", &json!(true), only)?;
    keys.only("mamba_proj_bias", &json!(false), only)?;
    keys.only("use_bias", &json!(false), only)
}

/// The entries of `block_configs`; none when the config has no such list.
fn block_configs<'config>(keys: &Keys<'config>) -> Result<Option<Vec<Option<&'config Fields>>>> {
    const KEY: &str = "block_configs";
    let Some(value) = keys.get(KEY) else {
        return Ok(None);
    };
    let list = value.as_array().filter(|list| list.len() <= MAX_LAYERS);
    let list = list.ok_or_else(|| keys.bad(KEY, format!("a list of at most {MAX_LAYERS} objects")))?;
    let mut entries = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let wrong = |key: String, expected: String| Error::BadValue {
            key,
            value: super::keys::shortened(value),
            expected,
        };
        if value.is_null() {
            entries.push(None);
            continue;
        }
        let entry = value.as_object();
        let entry = entry.ok_or_else(|| wrong(format!("{KEY}[{index}]"), "an object, or null".to_owned()))?;
        if let Some(unknown) = entry.keys().find(|key| !OVERRIDES.contains(&key.as_str())) {
            return Err(wrong(
                format!("{KEY}[{index}]"),
                format!("no key {unknown}; known are {}", OVERRIDES.join(", ")),
            ));
        }
        entries.push(Some(entry));
    }
    Ok(Some(entries))
}

/// The kind of each layer's block.
fn kinds(keys: &Keys<'_>, entries: Option<&[Option<&Fields>]>) -> Result<Vec<BlockKind>> {
    let (source, kinds) = match listed_kinds(keys)? {
        Some(found) => found,
        None => ("block_configs", entry_kinds(keys, entries)?),
    };
    if kinds.is_empty() || kinds.len() > MAX_LAYERS {
        return Err(keys.bad(source, format!("1 to {MAX_LAYERS} layers")));
    }
    // Newer configs derive the count from the list; an old one that disagrees is a damaged one.
    if keys
        .get("num_hidden_layers")
        .is_some_and(|_| keys.whole("num_hidden_layers", kinds.len(), kinds.len()).is_err())
    {
        return Err(keys.bad(
            "num_hidden_layers",
            format!("{}, as many as {source} names", kinds.len()),
        ));
    }
    let Some(entries) = entries else { return Ok(kinds) };
    if entries.len() != kinds.len() {
        return Err(Error::BadValue {
            key: "block_configs".to_owned(),
            value: format!("a list of {}", entries.len()),
            expected: format!("{} entries, as many as {source} names", kinds.len()),
        });
    }
    for (index, (entry, kind)) in entries.iter().zip(&kinds).enumerate() {
        let Some(named) = entry.and_then(|entry| entry.get("block_type")) else {
            continue;
        };
        if kind_named(named) != Some(*kind) {
            return Err(Error::BadValue {
                key: format!("block_configs[{index}].block_type"),
                value: super::keys::shortened(named),
                expected: format!("{kind:?} in some spelling of {KIND_NAMES}, as {source} says"),
            });
        }
    }
    Ok(kinds)
}

/// The kinds by `layers_block_type`, its newest name `layer_types`, or `hybrid_override_pattern`.
fn listed_kinds(keys: &Keys<'_>) -> Result<Option<(&'static str, Vec<BlockKind>)>> {
    for key in ["layers_block_type", "layer_types"] {
        let Some(value) = keys.get(key) else { continue };
        let expected = format!("a list of names, each {KIND_NAMES}");
        let names = value.as_array().ok_or_else(|| keys.bad(key, expected.as_str()))?;
        let mut kinds = Vec::with_capacity(names.len().min(MAX_LAYERS));
        for (index, name) in names.iter().enumerate() {
            kinds.push(kind_named(name).ok_or_else(|| Error::BadValue {
                key: format!("{key}[{index}]"),
                value: super::keys::shortened(name),
                expected: KIND_NAMES.to_owned(),
            })?);
        }
        return Ok(Some((key, kinds)));
    }
    const PATTERN: &str = "hybrid_override_pattern";
    let Some(pattern) = keys.get(PATTERN) else {
        return Ok(None);
    };
    let kinds = pattern
        .as_str()
        .and_then(|pattern| pattern.chars().map(kind_of_letter).collect());
    let kinds = kinds.ok_or_else(|| {
        keys.bad(
            PATTERN,
            "letters M (Mamba-2), * (attention), - (MLP) and E (mixture of experts)",
        )
    })?;
    Ok(Some((PATTERN, kinds)))
}

fn entry_kinds(keys: &Keys<'_>, entries: Option<&[Option<&Fields>]>) -> Result<Vec<BlockKind>> {
    let missing = || {
        let expected = format!("a list of names, each {KIND_NAMES} (or the older hybrid_override_pattern)");
        keys.missing("layers_block_type", &expected)
    };
    let entries = entries.ok_or_else(missing)?;
    let kind_of = |(index, entry): (usize, &Option<&Fields>)| {
        let named = entry.and_then(|entry| entry.get("block_type"));
        named.and_then(kind_named).ok_or_else(|| Error::BadValue {
            key: format!("block_configs[{index}].block_type"),
            value: named.map_or_else(|| "absent".to_owned(), super::keys::shortened),
            expected: format!("{KIND_NAMES}, where the config has no layers_block_type"),
        })
    };
    entries.iter().enumerate().map(kind_of).collect()
}

fn kind_named(name: &Value) -> Option<BlockKind> {
    match name.as_str()? {
        "mamba" | "mamba2" | "linear_attention" => Some(BlockKind::Mamba2),
        "attention" | "full_attention" => Some(BlockKind::Attention),
        "mlp" => Some(BlockKind::Mlp),
        "moe" => Some(BlockKind::Moe),
        _ => None,
    }
}

fn kind_of_letter(letter: char) -> Option<BlockKind> {
    match letter {
        'M' => Some(BlockKind::Mamba2),
        '*' => Some(BlockKind::Attention),
        '-' => Some(BlockKind::Mlp),
        'E' => Some(BlockKind::Moe),
        _ => None,
    }
}

fn shape(kind: BlockKind, keys: &Keys<'_>) -> Result<BlockShape> {
    match kind {
        BlockKind::Attention => attention(keys).map(BlockShape::Attention),
        BlockKind::Mlp => mlp(keys).map(BlockShape::Mlp),
        BlockKind::Mamba2 => mamba(keys).map(BlockShape::Mamba2),
        BlockKind::Moe => moe(keys).map(BlockShape::Moe),
    }
}

fn attention(keys: &Keys<'_>) -> Result<Attention> {
    let heads = keys.size("num_attention_heads", MAX_WIDTH)?;
    let kv_groups = keys
        .optional_size("num_key_value_heads", MAX_WIDTH)?
        .unwrap_or(heads);
    if !heads.is_multiple_of(kv_groups) {
        return Err(keys.bad(
            "num_key_value_heads",
            format!("a number that divides num_attention_heads ({heads})"),
        ));
    }
    // Early configs call it attention_head_dim. Hidden / heads would be wrong for most of the family.
    let key = if keys.get("head_dim").is_none() && keys.get("attention_head_dim").is_some() {
        "attention_head_dim"
    } else {
        "head_dim"
    };
    let head_dim = keys.size(key, MAX_WIDTH)?;
    keys.check_width(["num_attention_heads", key], [heads, head_dim])?;
    let bias = keys.flag("attention_bias", false)?;
    Ok(Attention {
        kv_groups,
        queries_per_group: heads / kv_groups,
        head_dim,
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: false,
        rope: None,
        sliding_window: keys.optional_size("sliding_window", MAX_TOKENS)?,
    })
}

fn mlp(keys: &Keys<'_>) -> Result<Mlp> {
    Ok(Mlp {
        channels: keys.size("intermediate_size", MAX_WIDTH)?,
        activation: Activation::ReluSquared,
        bias: keys.flag("mlp_bias", false)?,
    })
}

fn mamba(keys: &Keys<'_>) -> Result<Mamba2> {
    let mamba = Mamba2 {
        heads: keys.size("mamba_num_heads", MAX_WIDTH)?,
        head_dim: keys.size("mamba_head_dim", MAX_WIDTH)?,
        state: keys.size("ssm_state_size", MAX_WIDTH)?,
        groups: keys.size("n_groups", MAX_WIDTH)?,
        conv_kernel: keys.size("conv_kernel", 64)?,
    };
    keys.check_width(
        ["mamba_num_heads", "mamba_head_dim"],
        [mamba.heads, mamba.head_dim],
    )?;
    keys.check_width(["n_groups", "ssm_state_size"], [mamba.groups, mamba.state])?;
    if !mamba.heads.is_multiple_of(mamba.groups) {
        return Err(keys.bad(
            "n_groups",
            format!("a number that divides mamba_num_heads ({})", mamba.heads),
        ));
    }
    Ok(mamba)
}

fn moe(keys: &Keys<'_>) -> Result<Moe> {
    let experts = keys.size("n_routed_experts", MAX_EXPERTS)?;
    let shared_experts = match keys.get("n_shared_experts") {
        None => 1,
        Some(_) => keys.whole("n_shared_experts", 0, MAX_EXPERTS)?,
    };
    const SHARED: &str = "moe_shared_expert_intermediate_size";
    let shared_width = if shared_experts == 0 {
        0
    } else {
        keys.size(SHARED, MAX_WIDTH)?
    };
    keys.check_width(["n_shared_experts", SHARED], [shared_experts, shared_width])?;
    if keys.flag("mlp_bias", false)? {
        return Err(keys.bad("mlp_bias", "false (experts with biases are not implemented)"));
    }
    Ok(Moe {
        experts,
        experts_per_token: keys.size("num_experts_per_tok", experts)?,
        expert_channels: keys.size("moe_intermediate_size", MAX_WIDTH)?,
        shared_channels: shared_experts * shared_width,
        latent: keys.optional_size("moe_latent_size", MAX_WIDTH)?,
        activation: Activation::ReluSquared,
    })
}
