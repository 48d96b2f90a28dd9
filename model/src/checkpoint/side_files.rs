//! What a checkpoint carries beside its weights: tokenizer, chat template, generation config.
//!
//! Files are kept as bytes, so that an export carries what its parent had; a GGUF file's are rebuilt.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::read_file;
use crate::{Error, Result};

/// The tokenizer itself.
pub const TOKENIZER: &str = "tokenizer.json";
/// Its class, special tokens and, in older checkpoints, the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Sampling defaults and the tokens that end an answer.
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// The chat template as a file of its own.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

const CARRIED: &[&str] = &[
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION_CONFIG,
    CHAT_TEMPLATE,
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
];

/// Files beside the weights, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SideFiles {
    files: BTreeMap<String, Vec<u8>>,
}

/// Ids of the tokens with a meaning of their own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<u32>,
    /// End an answer or a text; the first is the usual one.
    pub eos: Vec<u32>,
    /// Fills short sequences.
    pub pad: Option<u32>,
}

impl SideFiles {
    /// Those of a directory.
    ///
    /// # Errors
    /// When one is there and cannot be read, or is not the JSON it claims to be.
    pub fn from_directory(directory: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in CARRIED {
            let path = directory.join(name);
            if !path.is_file() {
                continue;
            }
            let bytes = read_file(&path)?;
            if Path::new(name)
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                serde_json::from_slice::<serde::de::IgnoredAny>(&bytes).map_err(|error| Error::Damaged {
                    path,
                    reason: format!("not valid JSON: {error}"),
                })?;
            }
            files.insert((*name).to_owned(), bytes);
        }
        Ok(Self { files })
    }

    /// Adds a file, or replaces it.
    pub fn insert(&mut self, name: &str, bytes: Vec<u8>) {
        self.files.insert(name.to_owned(), bytes);
    }

    /// A file's bytes.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(Vec::as_slice)
    }

    /// Every file, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// The chat template (jinja), from its own file or from the tokenizer's config.
    pub fn chat_template(&self) -> Option<String> {
        if let Some(bytes) = self.file(CHAT_TEMPLATE) {
            return Some(String::from_utf8_lossy(bytes).into_owned());
        }
        for name in ["chat_template.json", TOKENIZER_CONFIG] {
            let Some(template) = self
                .json(name)
                .and_then(|config| config.get("chat_template").cloned())
            else {
                continue;
            };
            match template {
                Value::String(text) => return Some(text),
                // Several templates under names: the one called default.
                Value::Array(list) => {
                    return list
                        .iter()
                        .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
                        .and_then(|entry| entry.get("template"))
                        .and_then(Value::as_str)
                        .map(str::to_owned);
                }
                _ => {}
            }
        }
        None
    }

    /// A file as JSON; none when it is absent.
    pub fn json(&self, name: &str) -> Option<Value> {
        serde_json::from_slice(self.file(name)?).ok()
    }

    /// The text of `bos_token`, `eos_token`, … in the tokenizer's config.
    pub fn token_text(&self, key: &str) -> Option<String> {
        for name in [TOKENIZER_CONFIG, "special_tokens_map.json"] {
            let Some(token) = self.json(name).and_then(|config| config.get(key).cloned()) else {
                continue;
            };
            let text = match &token {
                Value::String(text) => Some(text.as_str()),
                Value::Object(fields) => fields.get("content").and_then(Value::as_str),
                _ => None,
            };
            if let Some(text) = text {
                return Some(text.to_owned());
            }
        }
        None
    }

    /// Special tokens: the tokenizer's config first, then what generation and model configs add.
    pub fn special_tokens(&self, config: &Value, id_of: &dyn Fn(&str) -> Option<u32>) -> SpecialTokens {
        let generation = self.json(GENERATION_CONFIG).unwrap_or(Value::Null);
        let named = |key: &str| self.token_text(key).and_then(|text| id_of(&text));
        let numbered = |key: &str| {
            let mut ids = token_ids(generation.get(key));
            ids.extend(token_ids(config.get(key)));
            ids
        };
        let mut eos: Vec<u32> = named("eos_token").into_iter().collect();
        for id in numbered("eos_token_id") {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
        SpecialTokens {
            bos: named("bos_token").or_else(|| numbered("bos_token_id").first().copied()),
            eos,
            pad: named("pad_token").or_else(|| numbered("pad_token_id").first().copied()),
        }
    }
}

fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}
