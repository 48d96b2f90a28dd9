//! Packed sequences as artifacts: the 8 bytes `ESPSHRD1`, tokens of a sequence (u32), sequences (u32), then
//! the tokens (u32), all little-endian.

use espalier_artifact::BlockingStore;
use espalier_proto::task::{ArtifactId, Shard};

use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"ESPSHRD1";
const HEADER_BYTES: usize = 16;

/// Sequences of one length, one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequences {
    /// Every token, sequence by sequence.
    pub tokens: Vec<u32>,
    /// Tokens of each sequence.
    pub sequence_tokens: usize,
}

impl Sequences {
    /// How many sequences.
    pub fn len(&self) -> usize {
        self.tokens.len().checked_div(self.sequence_tokens).unwrap_or(0)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sequence by sequence.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.tokens.chunks_exact(self.sequence_tokens.max(1))
    }

    /// The first `sequences`, or all when there are fewer.
    pub fn first(&self, sequences: usize) -> Self {
        let end = sequences.min(self.len()) * self.sequence_tokens;
        Self {
            tokens: self.tokens[..end].to_vec(),
            sequence_tokens: self.sequence_tokens,
        }
    }

    /// In pieces of at most `sequences` each.
    pub fn pieces(&self, sequences: usize) -> Vec<Self> {
        self.tokens
            .chunks(sequences.max(1).saturating_mul(self.sequence_tokens.max(1)))
            .map(|tokens| Self {
                tokens: tokens.to_vec(),
                sequence_tokens: self.sequence_tokens,
            })
            .collect()
    }
}

/// Stores sequences.
///
/// # Errors
/// When the store cannot be written, or there are more than u32 can count.
pub fn write(store: &BlockingStore, sequences: &Sequences) -> Result<Shard> {
    let count = |value: usize| {
        u32::try_from(value).map_err(|_| Error::Invalid {
            reason: format!("{value} sequences are too many for a shard"),
        })
    };
    let mut bytes = Vec::with_capacity(HEADER_BYTES + 4 * sequences.tokens.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&count(sequences.sequence_tokens)?.to_le_bytes());
    bytes.extend_from_slice(&count(sequences.len())?.to_le_bytes());
    for token in &sequences.tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    let name = store.put_bytes(bytes)?;
    Ok(Shard {
        artifact: ArtifactId(name.to_string()),
        sequences: sequences.len(),
        sequence_tokens: sequences.sequence_tokens,
    })
}

/// Loads a shard and checks it against what is said of it and against the vocabulary.
///
/// # Errors
/// When the artifact is absent or damaged, is not what the shard says, or has a token that the vocabulary has not.
pub fn read(store: &BlockingStore, shard: &Shard, vocab_size: usize) -> Result<Sequences> {
    let bytes = store.get_bytes(&shard.artifact.0)?;
    let refused = |reason: &str| Error::Shard {
        artifact: shard.artifact.0.clone(),
        reason: reason.to_owned(),
    };
    let header = bytes
        .get(..HEADER_BYTES)
        .ok_or_else(|| refused("shorter than its header"))?;
    if &header[..8] != MAGIC {
        return Err(refused("not a shard of tokens"));
    }
    let field =
        |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize;
    let (sequence_tokens, sequences) = (field(8), field(12));
    if sequence_tokens != shard.sequence_tokens || sequences != shard.sequences {
        return Err(refused(
            "another number of sequences or tokens than the task says",
        ));
    }
    let body = &bytes[HEADER_BYTES..];
    if Some(body.len())
        != sequences
            .checked_mul(sequence_tokens)
            .and_then(|tokens| tokens.checked_mul(4))
    {
        return Err(refused("another length than its header says"));
    }
    let tokens: Vec<u32> = body
        .chunks_exact(4)
        .map(|token| u32::from_le_bytes([token[0], token[1], token[2], token[3]]))
        .collect();
    if tokens.iter().any(|token| *token as usize >= vocab_size) {
        return Err(refused("it has tokens beyond the model's vocabulary"));
    }
    Ok(Sequences {
        tokens,
        sequence_tokens,
    })
}
