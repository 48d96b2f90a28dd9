//! What is asked of the served model.

use espalier_arch::Architecture;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

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

impl Workload {
    /// Whether the parent, and so every candidate of it, has a position for each token of a request.
    ///
    /// # Errors
    /// When it has fewer.
    pub fn has_positions(&self, parent: &Architecture) -> Result<()> {
        let longest = self.prompt_tokens.saturating_add(self.output_tokens);
        if longest > parent.max_positions {
            return Err(Error::Positions {
                longest,
                most: parent.max_positions,
            });
        }
        Ok(())
    }
}

fn one() -> usize {
    1
}
