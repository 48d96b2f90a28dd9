//! A tokenizer.json rebuilt from what a GGUF file says: byte-level BPE with its kinds of pre-tokenizer, and
//! SentencePiece BPE with scores and byte fallback.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

/// What GGUF metadata says about the tokenizer.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary {
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// How byte-level text is split before merging.
    pub pre_tokenizer: Option<String>,
    /// By id.
    pub tokens: Vec<String>,
    /// By id; SentencePiece's log-probabilities, from which the order of merges follows.
    pub scores: Vec<f64>,
    /// By id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub kinds: Vec<f64>,
    /// Pairs, first merged first, a space between the two.
    pub merges: Vec<String>,
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Fills short sequences.
    pub pad: Option<u32>,
    /// Stands for what cannot be encoded.
    pub unknown: Option<u32>,
    /// Whether encoding puts `bos` first; by default SentencePiece and Llama 3 do.
    pub add_bos: Option<bool>,
    /// Whether encoding puts `eos` last.
    pub add_eos: Option<bool>,
    /// Whether SentencePiece puts a space before the text; it does by default.
    pub add_space_prefix: Option<bool>,
    /// Jinja.
    pub chat_template: Option<String>,
    /// The longest sequence in tokens.
    pub context: Option<i64>,
}

type Built<T> = std::result::Result<T, String>;

/// Splits into words after GPT-4's manner, digits by threes.
const LLAMA3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same, digits one by one.
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's: words split where lower case turns to upper.
const TEKKEN_SPLIT: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const KIND_UNKNOWN: f64 = 2.0;
const KIND_CONTROL: f64 = 3.0;
const KIND_USER: f64 = 4.0;

/// How a kind of byte-level BPE splits text, and what it does beside.
struct PreTokenizer {
    pre_tokenizer: Value,
    normalizer: Value,
    /// Words that are tokens are taken whole, before any merge.
    ignore_merges: bool,
    add_bos: bool,
}

impl Vocabulary {
    /// `tokenizer.json`, `tokenizer_config.json` and, where there is a template, `chat_template.jinja`.
    ///
    /// # Errors
    /// When the kind of tokenizer is not known, or what it needs is missing.
    pub fn files(&self) -> Built<Vec<(&'static str, Vec<u8>)>> {
        self.check()?;
        let tokenizer = match self.model.as_str() {
            "gpt2" => self.byte_level()?,
            "llama" => self.sentence_piece()?,
            other => {
                return Err(format!(
                    "metadata tokenizer.ggml.model is {other:?}, expected gpt2 or llama"
                ));
            }
        };
        let bytes = |value: &Value| serde_json::to_vec_pretty(value).map_err(|error| error.to_string());
        let mut files = vec![
            ("tokenizer.json", bytes(&tokenizer)?),
            ("tokenizer_config.json", bytes(&self.config())?),
        ];
        if let Some(template) = &self.chat_template {
            files.push(("chat_template.jinja", template.clone().into_bytes()));
        }
        Ok(files)
    }

    fn check(&self) -> Built<()> {
        let count = self.tokens.len();
        for (what, length) in [("scores", self.scores.len()), ("token_type", self.kinds.len())] {
            if length != 0 && length != count {
                return Err(format!(
                    "metadata tokenizer.ggml.{what} has {length} entries, expected {count}, as there are tokens"
                ));
            }
        }
        for (what, id) in [
            ("bos", self.bos),
            ("eos", self.eos),
            ("padding", self.pad),
            ("unknown", self.unknown),
        ] {
            if id.is_some_and(|id| id as usize >= count) {
                return Err(format!(
                    "metadata tokenizer.ggml.{what}_token_id is {}, expected an id below {count}",
                    id.unwrap_or_default()
                ));
            }
        }
        Ok(())
    }

    fn token(&self, id: Option<u32>) -> Option<&str> {
        self.tokens.get(id? as usize).map(String::as_str)
    }

    fn byte_level(&self) -> Built<Value> {
        if self.merges.is_empty() {
            return Err(
                "metadata tokenizer.ggml.merges is missing, expected the merges of a gpt2 tokenizer"
                    .to_owned(),
            );
        }
        let kind = pre_tokenizer(self.pre_tokenizer.as_deref().unwrap_or("default"))?;
        let mut merges = Vec::with_capacity(self.merges.len());
        for merge in &self.merges {
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| format!("merge {merge:?} in tokenizer.ggml.merges is not a pair"))?;
            merges.push(json!([left, right]));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
            "normalizer": kind.normalizer,
            "pre_tokenizer": kind.pre_tokenizer,
            "post_processor": self.post_processor(kind.add_bos),
            "decoder": byte_level_step(false),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": kind.ignore_merges,
                "vocab": self.vocabulary(),
                "merges": merges,
            },
        }))
    }

    fn sentence_piece(&self) -> Built<Value> {
        if self.scores.is_empty() {
            return Err(
                "metadata tokenizer.ggml.scores is missing, expected the scores of a llama tokenizer"
                    .to_owned(),
            );
        }
        let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let prefixed = self.add_space_prefix.unwrap_or(true);
        let normalizer = if prefixed {
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]})
        } else {
            space
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefixed {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
            "normalizer": normalizer,
            "pre_tokenizer": null,
            "post_processor": self.post_processor(true),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": self.token(self.unknown),
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": true,
                "ignore_merges": false,
                "vocab": self.vocabulary(),
                "merges": self.merges_from_scores(),
            },
        }))
    }

    fn vocabulary(&self) -> Value {
        let mut vocabulary = Map::new();
        for (id, token) in self.tokens.iter().enumerate() {
            vocabulary.entry(token.clone()).or_insert_with(|| json!(id));
        }
        Value::Object(vocabulary)
    }

    /// Every way of making a token of two others, the likeliest token first: SentencePiece merges, at each
    /// step, the pair whose result has the highest score.
    fn merges_from_scores(&self) -> Vec<Value> {
        let ids: HashMap<&str, usize> = self
            .tokens
            .iter()
            .enumerate()
            .map(|(id, token)| (token.as_str(), id))
            .collect();
        let mut merges: Vec<(f64, usize, usize, &str, &str)> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if self.kinds.get(id).is_some_and(|kind| *kind != 1.0) {
                continue;
            }
            let score = self.scores.get(id).copied().unwrap_or_default();
            for (split, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(split);
                if let (Some(left_id), Some(right_id)) = (ids.get(left), ids.get(right)) {
                    merges.push((score, *left_id, *right_id, left, right));
                }
            }
        }
        // Stable: tokens of one score keep the order of their ids.
        merges.sort_by(|a, b| b.0.total_cmp(&a.0));
        merges
            .into_iter()
            .map(|(_, _, _, left, right)| json!([left, right]))
            .collect()
    }

    /// Control tokens are special; user-defined ones are matched whole but kept on decoding.
    fn added_tokens(&self) -> Vec<Value> {
        let mut added = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            let kind = self.kinds.get(id).copied().unwrap_or(1.0);
            let named = [self.bos, self.eos, self.pad]
                .iter()
                .flatten()
                .any(|named| *named as usize == id);
            let special = kind == KIND_CONTROL || kind == KIND_UNKNOWN || named;
            if !special && kind != KIND_USER {
                continue;
            }
            added.push(json!({
                "id": id,
                "content": token,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": special,
            }));
        }
        added
    }

    fn post_processor(&self, add_bos_by_default: bool) -> Value {
        let bos = self
            .token(self.bos)
            .filter(|_| self.add_bos.unwrap_or(add_bos_by_default));
        let eos = self.token(self.eos).filter(|_| self.add_eos.unwrap_or(false));
        if bos.is_none() && eos.is_none() {
            return if self.model == "gpt2" {
                byte_level_step(false)
            } else {
                Value::Null
            };
        }
        let special = |token: &str, kind: u8| json!({"SpecialToken": {"id": token, "type_id": kind}});
        let sequence = |name: &str, kind: u8| {
            let mut steps: Vec<Value> = Vec::new();
            steps.extend(bos.map(|token| special(token, kind)));
            steps.push(json!({"Sequence": {"id": name, "type_id": kind}}));
            steps.extend(eos.map(|token| special(token, kind)));
            steps
        };
        let mut pair = sequence("A", 0);
        pair.extend(sequence("B", 1));
        let mut tokens = Map::new();
        for (token, id) in [(bos, self.bos), (eos, self.eos)] {
            if let (Some(token), Some(id)) = (token, id) {
                tokens.insert(
                    token.to_owned(),
                    json!({"id": token, "ids": [id], "tokens": [token]}),
                );
            }
        }
        let template = json!({
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": pair,
            "special_tokens": tokens,
        });
        if self.model == "gpt2" {
            return json!({"type": "Sequence", "processors": [byte_level_step(false), template]});
        }
        template
    }

    fn config(&self) -> Value {
        let mut config = Map::new();
        config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
        config.insert("clean_up_tokenization_spaces".to_owned(), json!(false));
        if let Some(context) = self.context {
            config.insert("model_max_length".to_owned(), json!(context));
        }
        let named = [
            ("bos_token", self.bos),
            ("eos_token", self.eos),
            ("pad_token", self.pad),
            ("unk_token", self.unknown),
        ];
        for (key, id) in named {
            if let Some(token) = self.token(id) {
                config.insert(key.to_owned(), json!(token));
            }
        }
        Value::Object(config)
    }
}

fn byte_level_step(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// What each kind of byte-level tokenizer does before merging.
fn pre_tokenizer(kind: &str) -> Built<PreTokenizer> {
    let split = |pattern: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            byte_level_step(false),
        ]})
    };
    let plain = |pre_tokenizer: Value| PreTokenizer {
        pre_tokenizer,
        normalizer: Value::Null,
        ignore_merges: false,
        add_bos: false,
    };
    match kind {
        "default" | "gpt-2" => Ok(plain(byte_level_step(true))),
        "smollm" => Ok(plain(json!({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            byte_level_step(true),
        ]}))),
        "llama-bpe" | "llama3" | "llama-v3" => Ok(PreTokenizer {
            ignore_merges: true,
            add_bos: true,
            ..plain(split(LLAMA3_SPLIT))
        }),
        "qwen2" => Ok(PreTokenizer {
            normalizer: json!({"type": "NFC"}),
            ..plain(split(QWEN2_SPLIT))
        }),
        "tekken" => Ok(PreTokenizer {
            ignore_merges: true,
            add_bos: true,
            ..plain(split(TEKKEN_SPLIT))
        }),
        other => Err(format!(
            "metadata tokenizer.ggml.pre is {other:?}, expected default, gpt-2, smollm, llama-bpe, qwen2 or tekken"
        )),
    }
}
