#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]
use serde_json::{Value, json};

use crate::{Architecture, Attention, BlockKind, BlockShape, Candidate, Rope, RopeScaling, Variant};

fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 96,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    })
}

fn nemotron() -> Value {
    json!({
        "model_type": "nemotron_h", "vocab_size": 100, "hidden_size": 32, "hybrid_override_pattern": "M-*E",
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
        "mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 20, "max_position_embeddings": 512, "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
    })
}

fn with(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config.as_object_mut().unwrap().insert(key.clone(), value.clone());
    }
    config
}

fn without(mut config: Value, key: &str) -> Value {
    config.as_object_mut().unwrap().remove(key);
    config
}

fn read(config: Value) -> Architecture {
    Architecture::from_config(&config).unwrap()
}

fn attention(architecture: &Architecture, layer: usize) -> Attention {
    let block = architecture
        .blocks
        .iter()
        .find(|block| block.layer == layer && block.shape.kind() == BlockKind::Attention);
    match block.map(|block| &block.shape) {
        Some(BlockShape::Attention(attention)) => attention.clone(),
        other => panic!("layer {layer} has no attention: {other:?}"),
    }
}

fn rope(changes: Value) -> Rope {
    attention(&read(with(llama(), changes)), 0).rope.unwrap()
}

#[track_caller]
fn refused(config: Value, parts: &[&str]) {
    let message = Architecture::from_config(&config).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn every_error_names_the_key_the_value_and_what_would_be_right() {
    refused(json!([1]), &["[1]", "object"]);
    refused(
        without(llama(), "model_type"),
        &["model_type", "missing", "llama", "nemotron_h"],
    );
    refused(
        with(llama(), json!({"model_type": "gpt2"})),
        &["gpt2", "llama, mistral, qwen2, qwen3"],
    );
    refused(
        without(llama(), "hidden_size"),
        &["hidden_size", "missing", "whole number"],
    );
    refused(
        with(llama(), json!({"hidden_size": -64})),
        &["hidden_size", "-64", "from 1 to"],
    );
    refused(
        with(llama(), json!({"hidden_size": 0})),
        &["hidden_size is 0", "from 1 to"],
    );
    refused(
        with(llama(), json!({"hidden_size": 1e30})),
        &["hidden_size is 1e+30"],
    );
    refused(
        with(llama(), json!({"intermediate_size": u64::MAX})),
        &["intermediate_size", "18446744073709551615"],
    );
    refused(
        with(llama(), json!({"vocab_size": "many"})),
        &["vocab_size", "\"many\""],
    );
    refused(
        with(llama(), json!({"num_hidden_layers": 1_000_000})),
        &["num_hidden_layers", "4096"],
    );
    refused(
        with(llama(), json!({"num_key_value_heads": 4})),
        &["num_key_value_heads is 4", "divides", "(6)"],
    );
    refused(with(llama(), json!({"head_dim": 7})), &["head_dim is 7", "even"]);
    refused(
        with(llama(), json!({"head_dim": 1_000_000})),
        &["num_attention_heads × head_dim", "at most"],
    );
    refused(
        without(llama(), "head_dim"),
        &["num_attention_heads is 6", "divides hidden_size (64)"],
    );
    refused(
        with(llama(), json!({"hidden_act": "gelu"})),
        &["hidden_act is \"gelu\"", "silu"],
    );
    refused(
        with(llama(), json!({"rms_norm_eps": -1.0})),
        &["rms_norm_eps is -1.0", "above 0"],
    );
    refused(
        with(llama(), json!({"rms_norm_eps": 2})),
        &["rms_norm_eps is 2", "below 1"],
    );
    refused(
        with(llama(), json!({"attention_bias": "yes"})),
        &["attention_bias", "true or false"],
    );
    refused(
        with(llama(), json!({"partial_rotary_factor": 0.5})),
        &["partial_rotary_factor is 0.5"],
    );
}

#[test]
fn quantised_weights_are_refused_where_they_are_announced() {
    let config = with(llama(), json!({"quantization_config": {"quant_method": "gptq"}}));
    refused(config, &["quantization_config", "gptq", "f32, f16 or bf16"]);
}

#[test]
fn a_wrong_rope_entry_is_named_with_its_path() {
    let scaling = |value: Value| with(llama(), json!({"rope_scaling": value}));
    refused(
        scaling(json!({"rope_type": "longrope"})),
        &["rope_scaling.rope_type", "longrope", "llama3, yarn"],
    );
    refused(
        scaling(json!({"rope_type": "linear"})),
        &["rope_scaling.factor", "missing"],
    );
    refused(
        scaling(json!({"type": "linear", "factor": 0.5})),
        &["rope_scaling.factor is 0.5", "at least 1"],
    );
    refused(
        scaling(json!({"factor": 2.0})),
        &["rope_scaling.rope_type", "missing"],
    );
    refused(scaling(json!(2.0)), &["rope_scaling is 2.0", "object"]);
    let llama3 =
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0});
    refused(
        scaling(llama3),
        &["high_freq_factor is 4.0", "above low_freq_factor"],
    );
}

#[test]
fn head_size_is_hidden_over_heads_only_where_nothing_says_otherwise() {
    assert_eq!(attention(&read(llama()), 0).head_dim, 8);
    let plain = with(
        without(llama(), "head_dim"),
        json!({"num_attention_heads": 4, "num_key_value_heads": null}),
    );
    assert_eq!(attention(&read(plain.clone()), 0).head_dim, 16);
    assert_eq!(attention(&read(plain.clone()), 0).kv_groups, 4);
    assert_eq!(
        attention(&read(with(plain.clone(), json!({"head_dim": null}))), 0).head_dim,
        16
    );
    assert_eq!(
        attention(&read(with(plain, json!({"model_type": "qwen3"}))), 0).head_dim,
        128
    );
}

#[test]
fn each_family_has_its_own_biases_and_norms() {
    let shape = |family: &str, bias: bool| {
        let read = attention(
            &read(with(
                llama(),
                json!({"model_type": family, "attention_bias": bias}),
            )),
            0,
        );
        (read.qkv_bias, read.output_bias, read.qk_norm)
    };
    assert_eq!(shape("llama", false), (false, false, false));
    assert_eq!(shape("llama", true), (true, true, false));
    assert_eq!(shape("mistral", true), (false, false, false));
    assert_eq!(shape("qwen2", false), (true, false, false));
    assert_eq!(shape("qwen3", false), (false, false, true));
    assert_eq!(shape("qwen3", true), (true, true, true));
}

#[test]
fn sliding_windows_go_by_layer_in_qwen_and_everywhere_in_mistral() {
    let windows = |changes: Value| {
        let architecture = read(with(llama(), changes));
        (0..4)
            .map(|layer| attention(&architecture, layer).sliding_window)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        windows(json!({"model_type": "mistral", "sliding_window": 64})),
        [Some(64); 4]
    );
    assert_eq!(
        windows(json!({"model_type": "mistral", "sliding_window": null})),
        [None; 4]
    );
    assert_eq!(
        windows(json!({"model_type": "llama", "sliding_window": 64})),
        [None; 4]
    );
    let qwen = json!({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3});
    assert_eq!(windows(qwen.clone()), [None; 4]);
    let slides = with(qwen, json!({"use_sliding_window": true}));
    assert_eq!(windows(slides.clone()), [None, None, None, Some(64)]);
    let (full, sliding) = ("full_attention", "sliding_attention");
    let typed = with(slides, json!({"layer_types": [sliding, full, sliding, full]}));
    assert_eq!(windows(typed.clone()), [Some(64), None, Some(64), None]);
    refused(
        with(llama(), with(typed, json!({"layer_types": [full]}))),
        &["layer_types", "a list of 4"],
    );
}

#[test]
fn rope_is_read_alike_in_both_spellings() {
    let old = json!({"rope_theta": 5e5, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256}});
    let new = json!({"rope_parameters": {
        "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256}});
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 256,
    };
    assert_eq!(rope(old.clone()), Rope { theta: 5e5, scaling });
    assert_eq!(rope(old), rope(new));
    assert_eq!(
        rope(json!({})),
        Rope {
            theta: 1e4,
            scaling: RopeScaling::None
        }
    );
    let default = json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}});
    assert_eq!(
        rope(default),
        Rope {
            theta: 1e6,
            scaling: RopeScaling::None
        }
    );
}

#[test]
fn yarn_infers_what_its_entry_leaves_out() {
    let read = rope(json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}));
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        attention_factor: 0.1 * 4.0_f64.ln() + 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_positions: 512,
        truncate: true,
    };
    assert_eq!(read.scaling, expected);
}

#[test]
fn nemotron_layers_are_read_alike_from_pattern_and_lists() {
    let pattern = read(nemotron());
    let kinds: Vec<_> = pattern.blocks.iter().map(|block| block.shape.kind()).collect();
    assert_eq!(
        kinds,
        [
            BlockKind::Mamba2,
            BlockKind::Mlp,
            BlockKind::Attention,
            BlockKind::Moe
        ]
    );
    for names in [
        json!({"layers_block_type": ["mamba", "mlp", "attention", "moe"]}),
        json!({"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}),
        json!({"layer_types": ["linear_attention", "mlp", "full_attention", "moe"]}),
    ] {
        assert_eq!(
            read(with(without(nemotron(), "hybrid_override_pattern"), names)),
            pattern
        );
    }
    refused(
        without(nemotron(), "hybrid_override_pattern"),
        &["layers_block_type is missing", "mamba"],
    );
    refused(
        with(nemotron(), json!({"hybrid_override_pattern": "MX"})),
        &["\"MX\"", "letters M"],
    );
    refused(
        with(nemotron(), json!({"layers_block_type": ["rnn"]})),
        &["layers_block_type[0]", "rnn", "mamba"],
    );
    refused(
        with(nemotron(), json!({"mlp_hidden_act": "silu"})),
        &["mlp_hidden_act is \"silu\"", "relu2"],
    );
    refused(
        with(nemotron(), json!({"num_experts_per_tok": 7})),
        &["num_experts_per_tok is 7", "from 1 to 6"],
    );
    refused(
        with(nemotron(), json!({"num_hidden_layers": 3})),
        &["num_hidden_layers is 3", "4, as many as"],
    );
    refused(without(nemotron(), "head_dim"), &["head_dim is missing"]);
}

#[test]
fn a_puzzle_block_takes_its_own_sizes_before_the_models() {
    let own = json!([null, {"block_type": "mlp", "intermediate_size": 40}, {}, {"moe_intermediate_size": 8, "num_experts_per_tok": 1}]);
    let puzzle = with(
        nemotron(),
        json!({"model_type": "nemotron_h_puzzle", "block_configs": own}),
    );
    let architecture = read(puzzle.clone());
    let BlockShape::Mlp(mlp) = &architecture.blocks[1].shape else {
        panic!("block 1 is no MLP")
    };
    assert_eq!(mlp.channels, 40);
    let BlockShape::Moe(moe) = &architecture.blocks[3].shape else {
        panic!("block 3 is no mixture")
    };
    assert_eq!(
        (moe.expert_channels, moe.experts_per_token, moe.experts),
        (8, 1, 6)
    );
    let changed = |entries: Value| with(puzzle.clone(), json!({"block_configs": entries}));
    refused(
        changed(json!([{}])),
        &["block_configs is a list of 1", "4 entries"],
    );
    refused(
        changed(json!([{}, {}, {}, {"top_k": 1}])),
        &["block_configs[3]", "no key top_k"],
    );
    refused(
        changed(json!([{}, {"intermediate_size": 0}, {}, {}])),
        &["block_configs[1].intermediate_size is 0"],
    );
    refused(
        changed(json!([{"block_type": "moe"}, {}, {}, {}])),
        &["block_configs[0].block_type", "Mamba2"],
    );
}

#[test]
fn a_uniform_architecture_is_written_as_its_plain_family_and_read_back_the_same() {
    let parent = with(
        llama(),
        json!({
            "eos_token_id": 2, "auto_map": {}, "model_type": "qwen3", "use_sliding_window": true, "sliding_window": 64,
            "max_window_layers": 2, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        }),
    );
    let whole = read(parent.clone());
    let attention = Variant::Attention { kv_groups: 2 };
    let mlp = Variant::Mlp { channels: 32 };
    let mut variants: Vec<_> = [attention, mlp].into_iter().cycle().take(8).collect();
    // The MLP of one layer and the attention of the next: what is left is still pairs.
    variants[3] = Variant::Skip;
    variants[4] = Variant::Skip;
    let smaller = whole.with_candidate(&Candidate { variants }).unwrap();
    assert!(smaller.is_uniform());
    let config = smaller.to_config(&parent).unwrap();
    assert_eq!(config["num_hidden_layers"], 3);
    assert_eq!(
        (&config["num_attention_heads"], &config["num_key_value_heads"]),
        (&json!(4), &json!(2))
    );
    assert_eq!(
        (&config["head_dim"], &config["intermediate_size"]),
        (&json!(8), &json!(32))
    );
    assert_eq!(
        config["layer_types"],
        json!(["full_attention", "full_attention", "sliding_attention"])
    );
    assert_eq!(
        (&config["eos_token_id"], config.get("auto_map")),
        (&json!(2), None)
    );
    assert_eq!(config["architectures"], json!(["Qwen3ForCausalLM"]));
    assert_eq!(read(config), smaller.renumbered());
    assert_eq!(smaller.renumbered().layers, 3);
}

#[test]
fn an_architecture_that_its_family_cannot_express_is_not_uniform() {
    let whole = read(llama());
    let mut one_skipped = whole.whole();
    one_skipped.variants[2] = Variant::Skip;
    let mut one_narrow = whole.whole();
    one_narrow.variants[3] = Variant::Mlp { channels: 32 };
    for candidate in [one_skipped, one_narrow] {
        let smaller = whole.with_candidate(&candidate).unwrap();
        assert!(!smaller.is_uniform());
        assert!(
            smaller
                .to_config(&llama())
                .unwrap_err()
                .to_string()
                .contains("not uniform")
        );
    }
    assert!(whole.is_uniform() && !read(nemotron()).is_uniform());
}
