//! Tables of cosines and sines, made once for each kind of RoPE and grown with the longest sequence seen.

use std::sync::{Arc, Mutex, PoisonError};

use espalier_arch::{Attention, BlockShape, Rope, RopeScaling};

use crate::Result;
use crate::ops::{Operations, RopeTable};

#[derive(Debug)]
struct Entry {
    rope: Rope,
    head_dim: usize,
    /// Frequencies of dynamic scaling beyond the original length hold for one length only.
    exact_length: Option<usize>,
    positions: usize,
    table: Arc<RopeTable>,
}

/// The tables of one model.
#[derive(Debug, Default)]
pub struct RopeTables {
    entries: Mutex<Vec<Entry>>,
}

impl RopeTables {
    /// The table for `shape`, of at least `positions` rows; none for blocks without rotary positions.
    ///
    /// # Errors
    /// When the backend cannot hold it.
    pub fn get(
        &self,
        operations: &dyn Operations,
        shape: &BlockShape,
        positions: usize,
    ) -> Result<Option<Arc<RopeTable>>> {
        let BlockShape::Attention(Attention {
            rope: Some(rope),
            head_dim,
            ..
        }) = shape
        else {
            return Ok(None);
        };
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let exact_length = depends_on_length(rope, positions).then_some(positions);
        // One table of a single length is kept: decoding asks for the next length with every token.
        let known = entries.iter().position(|entry| {
            entry.rope == *rope
                && entry.head_dim == *head_dim
                && entry.exact_length.is_some() == exact_length.is_some()
        });
        if let Some(entry) = known.and_then(|index| entries.get(index))
            && entry.exact_length == exact_length
            && entry.positions >= positions
        {
            return Ok(Some(Arc::clone(&entry.table)));
        }
        // Doubling keeps decoding from making a table for every token.
        let rows = if exact_length.is_some() {
            positions
        } else {
            positions.next_power_of_two().max(64)
        };
        let table = Arc::new(make_table(operations, rope, *head_dim, rows, positions)?);
        let entry = Entry {
            rope: rope.clone(),
            head_dim: *head_dim,
            exact_length,
            positions: rows,
            table: Arc::clone(&table),
        };
        match known.and_then(|index| entries.get_mut(index)) {
            Some(held) => *held = entry,
            None => entries.push(entry),
        }
        Ok(Some(table))
    }
}

/// Whether the angles of some block depend on how many tokens there are, up to `positions`, and not on the position
/// alone.
pub(crate) fn any_depends_on_length<'a>(
    mut shapes: impl Iterator<Item = &'a BlockShape>,
    positions: usize,
) -> bool {
    shapes.any(|shape| match shape {
        BlockShape::Attention(Attention { rope: Some(rope), .. }) => depends_on_length(rope, positions),
        _ => false,
    })
}

fn depends_on_length(rope: &Rope, positions: usize) -> bool {
    matches!(rope.scaling, RopeScaling::Dynamic { original_max_positions, .. } if positions > original_max_positions)
}

fn make_table(
    operations: &dyn Operations,
    rope: &Rope,
    head_dim: usize,
    rows: usize,
    length: usize,
) -> Result<RopeTable> {
    let (frequencies, factor) = rope.inverse_frequencies(head_dim, length);
    let mut cosine = Vec::with_capacity(rows * frequencies.len());
    let mut sine = Vec::with_capacity(rows * frequencies.len());
    for position in 0..rows {
        for frequency in &frequencies {
            let (s, c) = (position as f64 * frequency).sin_cos();
            #[allow(clippy::cast_possible_truncation)] // rounding to the activations' own precision
            {
                cosine.push((c * factor) as f32);
                sine.push((s * factor) as f32);
            }
        }
    }
    Ok(RopeTable {
        cosine: operations.upload(&cosine, rows, frequencies.len())?,
        sine: operations.upload(&sine, rows, frequencies.len())?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use espalier_arch::Architecture;
    use serde_json::json;

    use super::*;
    use crate::ops::cpu::CpuOperations;

    #[test]
    fn decoding_beyond_the_original_length_keeps_one_table_for_all_lengths() {
        let config = json!({
            "model_type": "llama", "hidden_act": "silu", "hidden_size": 8, "intermediate_size": 12,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 9,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 },
        });
        let architecture = Architecture::from_config(&config).unwrap();
        let shape = &architecture.blocks[0].shape;
        let (tables, operations) = (RopeTables::default(), CpuOperations::new());
        let get = |positions| {
            let table = tables.get(&operations, shape, positions).unwrap().unwrap();
            operations.download(&table.cosine).unwrap()
        };
        let (short, first) = (get(64), get(65));
        for positions in 66..90 {
            assert_eq!(get(positions).len(), positions * 4);
        }
        assert_eq!(tables.entries.lock().unwrap().len(), 2);
        assert_eq!(get(65), first, "of its own length again");
        assert_eq!(get(64), short);
        assert_ne!(
            first[..short.len()],
            short,
            "each length has frequencies of its own"
        );
    }
}
