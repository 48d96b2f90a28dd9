//! How a measured model was served.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How vLLM served a model while it was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serving {
    /// What follows `vllm serve DIRECTORY`.
    pub arguments: Vec<String>,
    /// Variables of the process, by name.
    pub environment: BTreeMap<String, String>,
}

impl Serving {
    /// The line, for a shell, that serves a directory alike.
    pub fn command(&self, directory: &str) -> String {
        // In GiB, and vLLM would have it over the bytes that the arguments name.
        let mut words = ["env", "-u", "VLLM_CPU_KVCACHE_SPACE"]
            .map(str::to_owned)
            .to_vec();
        let variables = self.environment.iter();
        words.extend(variables.map(|(name, value)| format!("{name}={}", quoted(value))));
        words.extend(["vllm", "serve"].map(str::to_owned));
        words.push(quoted(directory));
        words.extend(self.arguments.iter().map(|argument| quoted(argument)));
        words.join(" ")
    }
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,+@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_what_a_shell_reads_back() {
        let serving = Serving {
            arguments: ["--max-num-seqs", "4", "--compilation-config", r#"{"a": "it's"}"#]
                .map(str::to_owned)
                .to_vec(),
            environment: BTreeMap::from([("OMP_NUM_THREADS".to_owned(), "2".to_owned())]),
        };
        assert_eq!(
            serving.command("my out/checkpoint"),
            "env -u VLLM_CPU_KVCACHE_SPACE OMP_NUM_THREADS=2 vllm serve 'my out/checkpoint' --max-num-seqs 4 \
             --compilation-config '{\"a\": \"it'\\''s\"}'"
        );
    }
}
