//! What is asked of the served model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One request's shape, and how many run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens generated for each request.
    pub output_tokens: usize,
    /// Requests in flight together.
    #[serde(default = "one")]
    pub concurrency: usize,
}

fn one() -> usize {
    1
}
