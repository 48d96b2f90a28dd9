//! Shapes that exist only in the JSON schema, where the type's own serde form says too little.

use schemars::JsonSchema;

/// The word `auto`.
#[derive(JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) enum Auto {
    /// Every count.
    Auto,
}

/// A file, or what stands in it.
#[derive(JsonSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) enum CostTable {
    /// The file.
    File(String),
    /// Its content.
    Table(serde_json::Map<String, serde_json::Value>),
}
