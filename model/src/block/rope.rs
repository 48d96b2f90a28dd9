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
        let known = entries.iter().position(|entry| {
            entry.rope == *rope && entry.head_dim == *head_dim && entry.exact_length == exact_length
        });
        if let Some(entry) = known.and_then(|index| entries.get(index))
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
