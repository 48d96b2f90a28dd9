//! What must hold for every shape and every candidate, not only for the models we know.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_arch::{Architecture, BlockShape, Candidate, Role, Variant};
use proptest::prelude::*;
use serde_json::{Value, json};

fn config(family: &str, kv_groups: usize, per_group: usize, layers: usize, tied: bool, bias: bool) -> Value {
    json!({
        "model_type": family, "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": kv_groups * per_group, "num_key_value_heads": kv_groups, "head_dim": 6,
        "intermediate_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied, "attention_bias": bias, "sliding_window": 8, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    })
}

fn any_config() -> impl Strategy<Value = Value> {
    let family = prop::sample::select(vec!["llama", "mistral", "qwen2", "qwen3"]);
    (
        family,
        1_usize..5,
        1_usize..4,
        1_usize..5,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(family, kv_groups, per_group, layers, tied, bias)| {
            config(family, kv_groups, per_group, layers, tied, bias)
        })
}

/// A parent and one of its candidates, from a number for each block.
fn pruned(config: &Value, choices: &[usize]) -> (Architecture, Candidate) {
    let parent = Architecture::from_config(config).unwrap();
    let choose = |(shape, choice): (&BlockShape, &usize)| match (choice % 3, shape) {
        (0, _) => Variant::Whole,
        (1, _) => Variant::Skip,
        (_, BlockShape::Attention(whole)) => Variant::Attention {
            kv_groups: 1 + choice % whole.kv_groups,
        },
        (_, _) => Variant::Mlp {
            channels: 1 + choice % 40,
        },
    };
    let shapes = parent.blocks.iter().map(|block| &block.shape);
    let variants = shapes.zip(choices.iter().cycle()).map(choose).collect();
    (parent, Candidate { variants })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_pruned_architecture_keeps_layer_numbers_and_order(
        config in any_config(), choices in prop::collection::vec(0_usize..1000, 8)
    ) {
        let (parent, candidate) = pruned(&config, &choices);
        let smaller = parent.with_candidate(&candidate).unwrap();
        let kept = parent.blocks.iter().zip(&candidate.variants);
        let kept: Vec<_> = kept.filter(|(_, variant)| **variant != Variant::Skip).collect();
        prop_assert_eq!(kept.len(), smaller.blocks.len());
        prop_assert_eq!(parent.layers, smaller.layers);
        for ((before, _), after) in kept.iter().zip(&smaller.blocks) {
            prop_assert_eq!(before.layer, after.layer);
            prop_assert_eq!(before.shape.kind(), after.shape.kind());
        }
        let names: Vec<_> = parent.tensors().into_iter().map(|tensor| tensor.name).collect();
        for tensor in smaller.tensors() {
            prop_assert!(names.contains(&tensor.name), "{} is not the parent's", tensor.name);
        }
    }

    #[test]
    fn counts_are_sums_over_tensors_and_over_blocks(
        config in any_config(), choices in prop::collection::vec(0_usize..1000, 8)
    ) {
        let (parent, candidate) = pruned(&config, &choices);
        let smaller = parent.with_candidate(&candidate).unwrap();
        let counted = smaller.parameters();
        let tensors = smaller.tensors();
        prop_assert_eq!(counted.total, tensors.iter().map(espalier_arch::TensorSpec::elements).sum::<u64>());
        for (block, shape) in smaller.blocks.iter().map(|block| &block.shape).enumerate() {
            prop_assert_eq!(counted.blocks[block], shape.parameters(smaller.hidden));
        }
        let parts = counted.embedding + counted.head + counted.final_norm + counted.in_blocks();
        prop_assert_eq!(counted.total, parts);
        prop_assert_eq!(counted.head == 0, smaller.tied_embedding);
        prop_assert_eq!(counted.active, counted.total);
        prop_assert!(counted.total <= parent.parameters().total);
        prop_assert_eq!(tensors.iter().filter(|tensor| tensor.role == Role::Norm).count(), smaller.blocks.len());
    }

    #[test]
    fn a_uniform_config_is_read_back_as_it_was_written(
        config in any_config(), kv_groups in 0_usize..4, channels in 1_usize..41, dropped in 0_usize..4
    ) {
        let parent = Architecture::from_config(&config).unwrap();
        let variants = parent.blocks.iter().map(|block| match &block.shape {
            _ if block.layer == dropped && parent.layers > 1 => Variant::Skip,
            BlockShape::Attention(whole) => Variant::Attention { kv_groups: 1 + kv_groups % whole.kv_groups },
            _ => Variant::Mlp { channels },
        });
        let smaller = parent.with_candidate(&Candidate { variants: variants.collect() }).unwrap();
        prop_assert!(smaller.is_uniform());
        let written = smaller.to_config(&config).unwrap();
        prop_assert_eq!(Architecture::from_config(&written).unwrap(), smaller.renumbered());
        prop_assert_eq!(written.get("eos_token_id"), config.get("eos_token_id"));
    }

    #[test]
    fn a_config_with_any_one_value_spoilt_is_read_or_refused_by_name(
        config in any_config(), place in any::<prop::sample::Index>(), spoilt in prop::sample::select(vec![
            Value::Null, json!(-1), json!(0), json!(1.5), json!(u64::MAX), json!(1e300), json!("x"), json!([]),
            json!({}), json!(true), json!({"rope_type": "yarn", "factor": -1}), json!(1048576), json!(3),
        ])
    ) {
        let mut config = config;
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        let key = place.get(&keys);
        config[key] = spoilt;
        match Architecture::from_config(&config) {
            Ok(read) => prop_assert!(read.parameters().total > 0),
            Err(error) => prop_assert!(error.to_string().contains("expected"), "{error}"),
        }
    }
}
