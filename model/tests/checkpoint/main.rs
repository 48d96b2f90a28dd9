//! Parents and exports as a user meets them: directories and GGUF files that are right, and ones that are not.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fixture;
mod sorted;

use std::fs;
use std::path::Path;

use espalier_arch::{Architecture, Candidate, Variant};
use espalier_model::checkpoint::{Parent, Precision};
use espalier_model::export::export;
use espalier_model::ops::Operations;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::{Model, Tensor};
use fixture::{Fixture, write_gguf};
use serde_json::{Value, json};

fn open(path: &Path) -> Result<Parent, String> {
    Parent::open(path.to_str().unwrap()).map_err(|error| error.to_string())
}

/// The one error of a fixture after `damage`, which must name each of `words`.
fn refused(damage: impl FnOnce(&Fixture), words: &[&str]) {
    let fixture = Fixture::new("llama");
    damage(&fixture);
    let error = open(fixture.path()).expect_err("expected the damage to be noticed");
    for word in words {
        assert!(error.contains(word), "{error:?} does not name {word:?}");
    }
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    CpuOperations::new().download(tensor).unwrap()
}

fn assert_same_weights(left: &Model, right: &Model) {
    assert_eq!(left.tensors().len(), right.tensors().len());
    for ((left_role, left), (right_role, right)) in left.tensors().into_iter().zip(right.tensors()) {
        assert_eq!(left_role, right_role);
        assert_eq!(elements(left), elements(right), "{left_role:?}");
    }
}

#[test]
fn a_directory_loads_with_the_weights_it_was_written_with() {
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let fixture = Fixture::new(family);
        let parent = open(fixture.path()).unwrap();
        let model = parent.load(&CpuOperations::new()).unwrap();
        for (spec, tensor) in model.named_tensors() {
            assert_eq!(
                elements(tensor),
                fixture.tensor(&spec.name),
                "{family} {}",
                spec.name
            );
        }
    }
}

#[test]
fn sixteen_and_sixty_four_bit_weights_become_f32() {
    for dtype in ["F16", "BF16", "F64"] {
        let fixture = Fixture::new("llama");
        fixture.write_weights(dtype, |_| true);
        let model = open(fixture.path()).unwrap().load(&CpuOperations::new()).unwrap();
        for (spec, tensor) in model.named_tensors() {
            for (found, exact) in elements(tensor).into_iter().zip(fixture.tensor(&spec.name)) {
                assert!(
                    (found - exact).abs() <= exact.abs() / 128.0 + 1e-6,
                    "{dtype} {found} {exact}"
                );
            }
        }
    }
}

#[test]
fn shards_with_an_index_are_one_model() {
    let fixture = Fixture::new("qwen3");
    fixture.write_shards();
    let model = open(fixture.path()).unwrap().load(&CpuOperations::new()).unwrap();
    for (spec, tensor) in model.named_tensors() {
        assert_eq!(elements(tensor), fixture.tensor(&spec.name), "{}", spec.name);
    }
}

#[test]
fn an_index_that_names_a_tensor_its_shard_lacks_is_refused() {
    refused(
        |fixture| {
            fixture.write_shards();
            let path = fixture.path().join("model.safetensors.index.json");
            let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            index["weight_map"]["model.norm.weight"] = json!("model-00001-of-00002.safetensors");
            fs::write(&path, index.to_string()).unwrap();
        },
        &["model-00001-of-00002.safetensors", "model.norm.weight"],
    );
}

#[test]
fn a_missing_tensor_is_named_with_the_shape_it_should_have() {
    refused(
        |fixture| fixture.write_weights("F32", |name| name != "model.layers.1.mlp.up_proj.weight"),
        &[
            "model.safetensors",
            "model.layers.1.mlp.up_proj.weight",
            "[40, 24]",
            "none",
        ],
    );
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both_shapes() {
    refused(
        |fixture| fixture.edit_config(|config| config["intermediate_size"] = json!(48)),
        &[
            "model.safetensors",
            "mlp.gate_proj.weight",
            "[48, 24]",
            "[40, 24]",
        ],
    );
}

#[test]
fn a_file_cut_short_is_refused_before_any_weight_is_read() {
    refused(
        |fixture| {
            let path = fixture.path().join("model.safetensors");
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        },
        &["model.safetensors", "cut short", "tensor "],
    );
    refused(
        |fixture| fs::write(fixture.path().join("model.safetensors"), b"12").unwrap(),
        &["2 bytes long"],
    );
    refused(
        |fixture| fs::write(fixture.path().join("model.safetensors"), [0xff; 64]).unwrap(),
        &["model.safetensors", "header claims"],
    );
}

#[test]
fn surplus_tensors_are_refused_by_name_unless_they_are_known_to_be_harmless() {
    let fixture = Fixture::new("llama");
    fixture.add_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", &[4]);
    fixture.add_tensor("lm_head.weight", &[fixture.vocab_size(), 24]);
    fixture.write_weights("F32", |_| true);
    open(fixture.path()).unwrap();
    fixture.add_tensor("model.layers.0.self_attn.sinks", &[4]);
    fixture.write_weights("F32", |_| true);
    let error = open(fixture.path()).unwrap_err();
    assert!(error.contains("model.layers.0.self_attn.sinks"), "{error}");
}

#[test]
fn a_directory_without_config_weights_or_a_known_family_says_so() {
    refused(
        |fixture| fs::remove_file(fixture.path().join("config.json")).unwrap(),
        &["config.json"],
    );
    refused(
        |fixture| fs::remove_file(fixture.path().join("model.safetensors")).unwrap(),
        &["no weights", "model.safetensors"],
    );
    refused(
        |fixture| fixture.edit_config(|config| config["model_type"] = json!("bloom")),
        &["config.json", "bloom"],
    );
    refused(
        |fixture| fixture.edit_config(|config| config["hidden_size"] = json!(-24)),
        &["config.json", "hidden_size", "-24"],
    );
    let nowhere = Parent::open("/nowhere/at/all").unwrap_err().to_string();
    assert!(nowhere.contains("/nowhere/at/all"), "{nowhere}");
}

#[test]
fn a_tokenizer_that_does_not_fit_the_vocabulary_is_refused() {
    refused(
        |fixture| fixture.write_tokenizer(100),
        &["tokenizer.json", "100 entries", "128"],
    );
    refused(
        |fixture| fixture.write_tokenizer(130),
        &["tokenizer.json", "129", "below 128"],
    );
    refused(
        |fixture| fs::write(fixture.path().join("tokenizer.json"), "{}").unwrap(),
        &["tokenizer.json", "not a tokenizer"],
    );
    let padded = Fixture::new("llama");
    padded.write_tokenizer(127);
    open(padded.path()).expect("one row of padding in 128 is legal");
}

#[test]
fn the_fingerprint_follows_weights_and_config() {
    let fixture = Fixture::new("llama");
    let first = open(fixture.path()).unwrap().fingerprint().unwrap();
    assert_eq!(first, open(fixture.path()).unwrap().fingerprint().unwrap());
    let path = fixture.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_ne!(first, open(fixture.path()).unwrap().fingerprint().unwrap());
}

fn candidate(parent: &Parent, variants: &[(usize, Variant)]) -> Candidate {
    let mut candidate = parent.architecture.whole();
    for (block, variant) in variants {
        candidate.variants[*block] = variant.clone();
    }
    candidate
}

/// Slices, exports and opens again.
fn round_trip(family: &str, variants: &[(usize, Variant)]) -> (Value, Architecture, tempfile::TempDir) {
    let fixture = Fixture::new(family);
    let parent = open(fixture.path()).unwrap();
    let model = parent.load(&CpuOperations::new()).unwrap();
    let smaller = model.slice(&candidate(&parent, variants)).unwrap();
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("export");
    let exported = export(
        &smaller,
        &parent,
        &directory,
        Precision::F32,
        &CpuOperations::new(),
    )
    .unwrap();
    let again = open(&directory).unwrap();
    let loaded = again.load(&CpuOperations::new()).unwrap();
    assert_same_weights(&smaller, &loaded);
    assert_eq!(exported.parameters as usize, smaller.parameters());
    assert_eq!(again.tokenizer().unwrap().get_vocab_size(true), 128);
    assert_eq!(
        again.side_files().chat_template().as_deref(),
        Some("{{ messages }}")
    );
    (again.config, again.architecture, home)
}

#[test]
fn a_uniform_export_is_a_plain_checkpoint_of_its_family() {
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let narrower = Variant::Mlp { channels: 24 };
        let (config, architecture, home) = round_trip(
            family,
            &[
                (1, narrower.clone()),
                (3, narrower),
                (4, Variant::Skip),
                (5, Variant::Skip),
            ],
        );
        assert_eq!(config["model_type"], family);
        assert_eq!(config["num_hidden_layers"], 2);
        assert_eq!(config["intermediate_size"], 24);
        assert_eq!(architecture.layers, 2);
        assert!(config.get("auto_map").is_none());
        assert!(!home.path().join("export/modeling_espalier.py").exists());
    }
}

#[test]
fn a_heterogeneous_export_carries_its_modelling_file_and_can_be_a_parent_again() {
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let (config, architecture, home) = round_trip(
            family,
            &[
                (0, Variant::Skip),
                (1, Variant::Mlp { channels: 8 }),
                (2, Variant::Attention { kv_groups: 1 }),
                (5, Variant::Skip),
            ],
        );
        assert_eq!(config["model_type"], "espalier");
        assert_eq!(config["family"], family);
        assert_eq!(config["num_hidden_layers"], 2, "the attention blocks alone");
        assert_eq!(
            config["blocks"][0],
            json!({"type": "mlp", "intermediate_size": 8, "bias": false})
        );
        assert_eq!(config["blocks"][1]["num_key_value_heads"], 1);
        assert_eq!(architecture.blocks.len(), 4);
        for file in ["configuration_espalier.py", "modeling_espalier.py"] {
            assert!(home.path().join("export").join(file).exists(), "{file}");
        }

        let again = open(&home.path().join("export")).unwrap();
        let model = again.load(&CpuOperations::new()).unwrap();
        let smaller = model.slice(&candidate(&again, &[(3, Variant::Skip)])).unwrap();
        let second = home.path().join("second");
        export(&smaller, &again, &second, Precision::Bf16, &CpuOperations::new()).unwrap();
        let reopened = open(&second).unwrap();
        assert_eq!(reopened.architecture.blocks.len(), 3);
        assert_eq!(reopened.config["family"], family);
        assert_eq!(reopened.stored_precision(), Precision::Bf16);
    }
}

#[test]
fn llamas_heads_that_do_not_divide_the_width_are_exported_flat_since_transformers_refuses_them_plain() {
    let fixture = Fixture::new("llama");
    fixture.resize(|config| {
        config["num_attention_heads"] = json!(6);
        config["num_key_value_heads"] = json!(6);
    });
    let parent = open(fixture.path()).unwrap();
    let five = Variant::Attention { kv_groups: 5 };
    let variants = [(0, five.clone()), (2, five.clone()), (4, five)];
    let model = parent
        .load(&CpuOperations::new())
        .unwrap()
        .slice(&candidate(&parent, &variants))
        .unwrap();
    let home = tempfile::tempdir().unwrap();
    let exported = export(
        &model,
        &parent,
        &home.path().join("export"),
        Precision::F32,
        &CpuOperations::new(),
    )
    .unwrap();
    assert!(!exported.uniform);
}

#[test]
fn qwen2_with_fewer_heads_is_exported_flat_since_vllm_takes_its_head_size_from_their_number() {
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let half = Variant::Attention { kv_groups: 1 };
        let variants = [(0, half.clone()), (2, half.clone()), (4, half)];
        let (config, _, _home) = round_trip(family, &variants);
        let expected = if family == "qwen2" { "espalier" } else { family };
        assert_eq!(config["model_type"], expected);
    }
}

#[test]
fn a_parent_in_f16_is_exported_in_f16_bit_for_bit_while_its_weights_are_no_larger() {
    let fixture = Fixture::new("llama");
    fixture.write_weights("F16", |_| true);
    let parent = open(fixture.path()).unwrap();
    assert_eq!(parent.stored_precision(), Precision::F16);
    let host = CpuOperations::new();
    let model = parent.load(&host).unwrap();
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("export");
    export(&model, &parent, &directory, Precision::F16, &host).unwrap();
    let again = open(&directory).unwrap();
    assert_eq!(again.config["dtype"], "float16");
    assert_eq!(again.stored_precision(), Precision::F16);
    assert_same_weights(&model, &again.load(&host).unwrap());
    let weight = elements(model.tensors()[0].1)[1];
    assert_ne!(
        half::bf16::from_f32(weight).to_f32(),
        weight,
        "bf16 has less of it"
    );

    fixture.scale("model.norm.weight", 1e6);
    fixture.write_weights("F32", |_| true);
    let wide = open(fixture.path()).unwrap();
    let directory = home.path().join("wide");
    let model = wide.load(&host).unwrap();
    let error = export(&model, &wide, &directory, Precision::F16, &host).unwrap_err();
    assert!(
        matches!(error, espalier_model::Error::BeyondF16 { .. }),
        "{error}"
    );
    assert!(error.to_string().starts_with("model.norm.weight"), "{error}");
    assert!(!directory.exists());
}

#[test]
fn an_export_never_touches_a_directory_that_exists_and_leaves_nothing_half_written() {
    let fixture = Fixture::new("llama");
    let parent = open(fixture.path()).unwrap();
    let model = parent.load(&CpuOperations::new()).unwrap();
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("export");
    fs::create_dir(&directory).unwrap();
    let error = export(&model, &parent, &directory, Precision::F32, &CpuOperations::new())
        .unwrap_err()
        .to_string();
    assert!(error.contains("exists already"), "{error}");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    assert_eq!(
        fs::read_dir(home.path()).unwrap().count(),
        1,
        "no partial directory beside it"
    );
}

#[test]
fn a_real_gguf_file_gives_its_tokenizer_and_can_be_exported() {
    // ESPALIER_GGUF: SmolLM2-135M-Instruct's file; ESPALIER_EXPORTS: where to leave the exports for inspection.
    let Ok(file) = std::env::var("ESPALIER_GGUF") else {
        eprintln!("skipped: ESPALIER_GGUF names no file");
        return;
    };
    let parent = open(Path::new(&file)).unwrap();
    let tokenizer = parent.tokenizer().unwrap();
    let special = parent.special_tokens();
    assert_eq!(
        (special.bos, special.eos, special.pad),
        (Some(1), vec![2], Some(2))
    );
    let text = "<|im_start|>user\nHello 2024, naïve café!<|im_end|>";
    let ids = tokenizer.encode(text, false).unwrap();
    assert_eq!(ids.get_ids()[0], 1);
    assert_eq!(tokenizer.decode(ids.get_ids(), false).unwrap(), text);
    let model = parent.load(&CpuOperations::new()).unwrap();
    assert_eq!(model.parameters(), 134_515_008);
    let Ok(exports) = std::env::var("ESPALIER_EXPORTS") else {
        return;
    };
    export(
        &model,
        &parent,
        &Path::new(&exports).join("whole"),
        Precision::F32,
        &CpuOperations::new(),
    )
    .unwrap();
    let variants = [
        (0, Variant::Attention { kv_groups: 2 }),
        (7, Variant::Skip),
        (8, Variant::Skip),
        (11, Variant::Mlp { channels: 512 }),
    ];
    let smaller = model.slice(&candidate(&parent, &variants)).unwrap();
    export(
        &smaller,
        &parent,
        &Path::new(&exports).join("mixed"),
        Precision::F32,
        &CpuOperations::new(),
    )
    .unwrap();
}

#[test]
fn a_gguf_file_gives_the_model_that_it_was_made_of() {
    for family in ["llama", "qwen2", "qwen3"] {
        let fixture = Fixture::new(family);
        let file = fixture.path().join("model.gguf");
        fs::write(&file, write_gguf(&fixture, &[])).unwrap();
        let parent = open(&file).unwrap();
        let directory = open(fixture.path()).unwrap();
        assert_eq!(parent.architecture, directory.architecture, "{family}");
        let ops = CpuOperations::new();
        assert_same_weights(&parent.load(&ops).unwrap(), &directory.load(&ops).unwrap());
    }
}

#[test]
fn a_gguf_file_cut_anywhere_gives_an_error_and_never_a_panic() {
    let fixture = Fixture::new("llama");
    let whole = write_gguf(&fixture, &[]);
    let file = fixture.path().join("model.gguf");
    for length in (0..whole.len()).step_by(whole.len() / 97) {
        fs::write(&file, &whole[..length]).unwrap();
        let error = open(&file).expect_err("a cut file");
        assert!(error.contains("model.gguf"), "{error}");
    }
}

#[test]
fn absurd_numbers_in_a_gguf_header_cost_an_error_and_no_memory() {
    let fixture = Fixture::new("llama");
    let whole = write_gguf(&fixture, &[]);
    let file = fixture.path().join("model.gguf");
    // Tensor count, metadata count, length of the first key.
    for position in [8, 16, 24] {
        let mut damaged = whole.clone();
        damaged[position..position + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        fs::write(&file, damaged).unwrap();
        let error = open(&file).unwrap_err();
        assert!(error.contains("header claims"), "{error}");
    }
    // Every byte of the header in turn.
    for position in 0..whole.len().min(1500) {
        let mut damaged = whole.clone();
        damaged[position] ^= 0xff;
        fs::write(&file, damaged).unwrap();
        let _either = open(&file);
    }
    for alignment in [0u32, u32::MAX] {
        fs::write(&file, write_gguf(&fixture, &[("general.alignment", alignment)])).unwrap();
        let error = open(&file).unwrap_err();
        assert!(error.contains("general.alignment"), "{error}");
    }
}
