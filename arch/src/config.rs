//! Hugging Face `config.json` in and out: what its keys say about a model's shape.
//!
//! One room a family group; `keys` reads values with errors that name key, value and remedy; `output` writes
//! a uniform architecture back as its plain family. No files are read here, and no tensors are known.

mod keys;
mod llama;
mod nemotron_h;
mod output;
mod rope;
#[cfg(test)]
mod tests;

use serde_json::Value;

use crate::{Architecture, Error, Family, Result};
use keys::Keys;

/// Every `model_type` that can be read.
const KNOWN: [(&str, Family); 6] = [
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("nemotron_h", Family::NemotronH),
    ("nemotron_h_puzzle", Family::NemotronH),
];

impl Architecture {
    /// The shape that a Hugging Face `config.json` describes.
    ///
    /// # Errors
    /// Naming the key, its value and what would be right: a key is missing, a size is not a whole number
    /// within sane bounds, sizes do not divide, a feature is unknown, or the `model_type` is.
    pub fn from_config(config: &Value) -> Result<Self> {
        let Some(fields) = config.as_object() else {
            return Err(Error::BadValue {
                key: "(whole file)".to_owned(),
                value: keys::shortened(config),
                expected: "a JSON object of keys".to_owned(),
            });
        };
        if let Some(value) = fields.get("quantization_config").filter(|value| !value.is_null()) {
            return Err(Error::BadValue {
                key: "quantization_config".to_owned(),
                value: keys::shortened(value),
                expected: "none: weights in f32, f16 or bf16, or a GGUF file".to_owned(),
            });
        }
        let keys = Keys::new(fields);
        let known = || KNOWN.map(|(name, _)| name).join(", ");
        let model_type = keys.required("model_type", &known())?;
        let family = KNOWN
            .iter()
            .find(|(name, _)| model_type.as_str() == Some(name))
            .map(|(_, family)| *family)
            .ok_or_else(|| Error::UnknownModelType {
                found: keys::shortened(model_type),
                known: known(),
            })?;
        match family {
            Family::NemotronH => nemotron_h::read(&keys),
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => llama::read(family, &keys),
        }
    }
}
