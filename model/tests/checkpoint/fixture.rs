//! Tiny checkpoints of every family, with ways to damage them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use espalier_arch::Architecture;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

pub const VOCABULARY: usize = 128;

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A directory with a model of three layers.
pub struct Fixture {
    directory: TempDir,
    config: RefCell<Value>,
    tensors: RefCell<Tensors>,
}

impl Fixture {
    pub fn new(family: &str) -> Self {
        let mut config = json!({
            "model_type": family,
            "hidden_act": "silu",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": family != "qwen2",
            "bos_token_id": 1,
            "eos_token_id": 2,
        });
        match family {
            "mistral" => config["sliding_window"] = json!(16),
            "qwen3" => config["head_dim"] = json!(8),
            _ => {}
        }
        let fixture = Self {
            directory: tempfile::tempdir().unwrap(),
            config: RefCell::new(config),
            tensors: RefCell::default(),
        };
        fixture.resize(|_| {});
        fixture.write_tokenizer(VOCABULARY);
        fs::write(fixture.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
        fixture
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn vocab_size(&self) -> usize {
        VOCABULARY
    }

    pub fn config(&self) -> Value {
        self.config.borrow().clone()
    }

    pub fn tensor(&self, name: &str) -> Vec<f32> {
        self.tensors.borrow()[name].1.clone()
    }

    pub fn tensors(&self) -> Tensors {
        self.tensors.borrow().clone()
    }

    /// Changes the config alone: the weights no longer fit it.
    pub fn edit_config(&self, change: impl FnOnce(&mut Value)) {
        change(&mut self.config.borrow_mut());
        fs::write(self.path().join("config.json"), self.config.borrow().to_string()).unwrap();
    }

    /// Changes the config and makes weights that fit it.
    pub fn resize(&self, change: impl FnOnce(&mut Value)) {
        self.edit_config(change);
        let architecture = Architecture::from_config(&self.config.borrow()).unwrap();
        self.tensors.borrow_mut().clear();
        for spec in architecture.tensors() {
            self.add_tensor(&spec.name, &spec.shape);
        }
        self.write_weights("F32", |_| true);
    }

    /// Adds a tensor of numbers that differ; it is written by the next `write_weights`.
    pub fn add_tensor(&self, name: &str, shape: &[usize]) {
        let seed =
            u64::from_le_bytes(blake3::hash(name.as_bytes()).as_bytes()[..8].try_into().unwrap()) >> 16;
        let count = shape.iter().product::<usize>();
        let data = (0..count)
            .map(|index| ((seed + index as u64 * 7919) % 2003) as f32 / 1001.5 - 1.0)
            .collect();
        self.tensors
            .borrow_mut()
            .insert(name.to_owned(), (shape.to_vec(), data));
    }

    /// Makes the numbers of a tensor so many times as large; they are written by the next `write_weights`.
    pub fn scale(&self, name: &str, times: f32) {
        let mut tensors = self.tensors.borrow_mut();
        let (_, data) = tensors.get_mut(name).unwrap();
        data.iter_mut().for_each(|number| *number *= times);
    }

    pub fn write_weights(&self, dtype: &str, keep: impl Fn(&str) -> bool) {
        let tensors = self.tensors();
        let kept: Tensors = tensors.into_iter().filter(|(name, _)| keep(name)).collect();
        fs::write(self.path().join("model.safetensors"), safetensors(&kept, dtype)).unwrap();
    }

    pub fn write_shards(&self) {
        fs::remove_file(self.path().join("model.safetensors")).unwrap();
        let mut map = Map::new();
        for number in 1..=2 {
            let file = format!("model-0000{number}-of-00002.safetensors");
            let all = self.tensors();
            let half = all.len() / 2;
            let part: Tensors = if number == 1 {
                all.into_iter().take(half).collect()
            } else {
                all.into_iter().skip(half).collect()
            };
            map.extend(part.keys().map(|name| (name.clone(), json!(file))));
            fs::write(self.path().join(&file), safetensors(&part, "F32")).unwrap();
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        fs::write(
            self.path().join("model.safetensors.index.json"),
            index.to_string(),
        )
        .unwrap();
    }

    /// A tokenizer of `entries` whole words.
    pub fn write_tokenizer(&self, entries: usize) {
        let vocabulary: Map<String, Value> = (0..entries).map(|id| (format!("w{id}"), json!(id))).collect();
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": null,
            "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        });
        fs::write(self.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }
}

fn safetensors(tensors: &Tensors, dtype: &str) -> Vec<u8> {
    let mut header = Map::new();
    let mut data = Vec::new();
    for (name, (shape, values)) in tensors {
        let begin = data.len();
        for value in values {
            match dtype {
                "F32" => data.extend_from_slice(&value.to_le_bytes()),
                "F64" => data.extend_from_slice(&f64::from(*value).to_le_bytes()),
                "F16" => data.extend_from_slice(&half::f16::from_f32(*value).to_le_bytes()),
                "BF16" => data.extend_from_slice(&half::bf16::from_f32(*value).to_le_bytes()),
                other => panic!("{other}"),
            }
        }
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(name.clone(), info);
    }
    let header = Value::Object(header).to_string().into_bytes();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

/// The fixture as a GGUF file (version 3, f32), as its converter writes it: dimensions reversed, Llama's query
/// and key rows interleaved. `extra` is metadata of unsigned 32-bit type.
pub fn write_gguf(fixture: &Fixture, extra: &[(&str, u32)]) -> Vec<u8> {
    let config = fixture.config();
    let family = config["model_type"].as_str().unwrap().to_owned();
    let number = |key: &str| u32::try_from(config[key].as_u64().unwrap()).unwrap();
    let mut entries: Vec<(String, u32, Vec<u8>)> = vec![(
        "general.architecture".to_owned(),
        8,
        [
            (family.len() as u64).to_le_bytes().to_vec(),
            family.clone().into_bytes(),
        ]
        .concat(),
    )];
    for (key, value) in [
        ("block_count", number("num_hidden_layers")),
        ("context_length", number("max_position_embeddings")),
        ("embedding_length", number("hidden_size")),
        ("feed_forward_length", number("intermediate_size")),
        ("attention.head_count", number("num_attention_heads")),
        ("attention.head_count_kv", number("num_key_value_heads")),
        ("attention.key_length", number("head_dim")),
    ] {
        entries.push((format!("{family}.{key}"), 4, value.to_le_bytes().to_vec()));
    }
    for (key, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-5f32),
        ("rope.freq_base", 10000.0),
    ] {
        entries.push((format!("{family}.{key}"), 6, value.to_le_bytes().to_vec()));
    }
    for (key, value) in extra {
        entries.push(((*key).to_owned(), 4, value.to_le_bytes().to_vec()));
    }

    let tensors = fixture.tensors();
    let text = |text: &str| [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes()].concat();
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((entries.len() as u64).to_le_bytes());
    for (key, kind, value) in entries {
        file.extend(text(&key));
        file.extend(kind.to_le_bytes());
        file.extend(value);
    }
    let mut data: Vec<u8> = Vec::new();
    for (name, (shape, values)) in &tensors {
        file.extend(text(&gguf_name(name)));
        file.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
        for size in shape.iter().rev() {
            file.extend((*size as u64).to_le_bytes());
        }
        file.extend(0u32.to_le_bytes());
        file.extend((data.len() as u64).to_le_bytes());
        let heads = match name {
            name if family == "llama" && name.contains("q_proj") => number("num_attention_heads"),
            name if family == "llama" && name.contains("k_proj") => number("num_key_value_heads"),
            _ => 0,
        };
        let values = if heads > 0 {
            interleave(values, heads as usize, shape[1])
        } else {
            values.clone()
        };
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        data.resize(data.len().next_multiple_of(32), 0);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}

/// Row `half * s + j` of each head goes to row `2 j + s`.
fn interleave(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let head_rows = values.len() / columns / heads;
    let half = head_rows / 2;
    let mut out = vec![0.0; values.len()];
    for row in 0..values.len() / columns {
        let (head, within) = (row / head_rows, row % head_rows);
        let target = head * head_rows + 2 * (within % half) + within / half;
        out[target * columns..(target + 1) * columns]
            .copy_from_slice(&values[row * columns..(row + 1) * columns]);
    }
    out
}

fn gguf_name(name: &str) -> String {
    let mut renamed = name.replace("model.layers.", "blk.");
    for (from, to) in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ] {
        renamed = renamed.replace(from, to);
    }
    renamed
}
