//! Causal grouped-query attention, forward: a tile of queries against tiles of keys with a running softmax
//! (2112.05682, 2205.14135), so that no score matrix is larger than a tile.
//!
//! A piece of work is one sequence, one KV group and one block of queries; the group's query heads are
//! stacked in the tile, so that each key tile is read once for all of them.

use rayon::prelude::*;

use super::matmul::{Threads, View, ViewMut, multiply};
use super::rows::{Rows, Shared, expect, expect_shape};
use super::simd;
use crate::ops::Layout;
use crate::tensor::Buffer;
use crate::{Result, Tensor};
use espalier_arch::Attention;

/// Query positions of one tile.
pub(super) const QUERY_BLOCK: usize = 64;
/// Key positions of one tile.
pub(super) const KEY_BLOCK: usize = 256;

/// What a tile needs to know about heads.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) groups: usize,
    pub(super) per_group: usize,
    pub(super) dim: usize,
    /// Tokens that a token attends to at most.
    pub(super) window: usize,
    pub(super) scale: f32,
}

impl Heads {
    pub(super) fn of(operation: &'static str, shape: &Attention) -> Result<Self> {
        let window = shape.sliding_window.unwrap_or(usize::MAX);
        expect(
            operation,
            shape.kv_groups > 0 && shape.queries_per_group > 0 && shape.head_dim > 0 && window > 0,
            || "at least one group, query head, head entry and token of the window".to_owned(),
            || format!("{shape:?}"),
        )?;
        Ok(Self {
            groups: shape.kv_groups,
            per_group: shape.queries_per_group,
            dim: shape.head_dim,
            window,
            scale: (1.0 / (shape.head_dim as f64).sqrt()) as f32,
        })
    }

    /// Keys `first..end` that the token at `position` attends to.
    pub(super) fn keys_of(self, position: usize) -> (usize, usize) {
        ((position + 1).saturating_sub(self.window), position + 1)
    }
}

/// Heads of one sequence and group: position `p` begins at `p * leading`.
#[derive(Clone, Copy)]
pub(super) struct Band<'a> {
    pub(super) data: &'a [f32],
    pub(super) leading: usize,
}

impl<'a> Band<'a> {
    /// From `row` and `column` of `rows` on.
    pub(super) fn of(rows: Rows<'a>, row: usize, column: usize) -> Self {
        let leading = rows.leading;
        Self {
            data: rows.data.get(row * leading + column..).unwrap_or_default(),
            leading,
        }
    }

    pub(super) fn view(self, first: usize, rows: usize, columns: usize) -> Result<View<'a>> {
        let data = self.data.get(first * self.leading..).unwrap_or_default();
        View::new(data, rows, columns, self.leading)
    }

    pub(super) fn row(self, index: usize, columns: usize) -> &'a [f32] {
        let start = index * self.leading;
        self.data.get(start..start + columns).unwrap_or_default()
    }
}

/// Heads of one group at `count` positions from `first`, stacked head by head into `(heads * count, dim)`.
pub(super) fn pack_heads(
    packed: &mut [f32],
    from: Band<'_>,
    first: usize,
    count: usize,
    heads: Heads,
    factor: f32,
) {
    for (index, out) in packed.chunks_exact_mut(heads.dim).enumerate() {
        let (head, position) = (index / count, first + index % count);
        let start = position * from.leading + head * heads.dim;
        let source = from.data.get(start..start + heads.dim).unwrap_or_default();
        simd::scale_into(out, factor, source);
    }
}

/// One block of queries of one sequence and group.
struct Tile<'a> {
    heads: Heads,
    queries: Band<'a>,
    keys: Band<'a>,
    values: Band<'a>,
    /// First query, counted in the queries' rows.
    first: usize,
    count: usize,
    /// Position of the first query among the keys.
    position: usize,
}

/// What a tile gives: `(heads * count, dim)` and the log of each denominator.
struct Attended {
    output: Buffer,
    log_sums: Vec<f32>,
}

impl Tile<'_> {
    fn attend(&self) -> Result<Attended> {
        let dim = self.heads.dim;
        let stacked = self.heads.per_group * self.count;
        let mut queries = Buffer::unspecified(stacked * dim);
        pack_heads(
            &mut queries,
            self.queries,
            self.first,
            self.count,
            self.heads,
            self.heads.scale,
        );
        let mut output = Buffer::zeros(stacked * dim);
        let mut scores = Buffer::unspecified(stacked * KEY_BLOCK);
        let mut maxima = vec![f32::NEG_INFINITY; stacked];
        let mut sums = vec![0.0f64; stacked];
        let (first_key, _) = self.heads.keys_of(self.position);
        let (_, end_key) = self.heads.keys_of(self.position + self.count - 1);
        for start in (first_key..end_key).step_by(KEY_BLOCK) {
            let keys = KEY_BLOCK.min(end_key - start);
            multiply(
                ViewMut::new(&mut scores, stacked, keys, keys)?,
                View::new(&queries, stacked, dim, dim)?,
                self.keys.view(start, keys, dim)?.transposed(),
                false,
                Threads::One,
            )?;
            for (index, row) in scores.chunks_exact_mut(keys).take(stacked).enumerate() {
                let position = self.position + index % self.count;
                let shrink = self.weigh(row, start, position, &mut maxima[index], &mut sums[index]);
                simd::scale(&mut output[index * dim..(index + 1) * dim], shrink);
            }
            multiply(
                ViewMut::new(&mut output, stacked, dim, dim)?,
                View::new(&scores, stacked, keys, keys)?,
                self.values.view(start, keys, dim)?,
                true,
                Threads::One,
            )?;
        }
        let mut log_sums = vec![0.0; stacked];
        for (index, log_sum) in log_sums.iter_mut().enumerate() {
            simd::scale(
                &mut output[index * dim..(index + 1) * dim],
                (1.0 / sums[index]) as f32,
            );
            *log_sum = (f64::from(maxima[index]) + sums[index].ln()) as f32;
        }
        Ok(Attended { output, log_sums })
    }

    /// Turns one row of scores into weights relative to the running maximum; gives the factor by which what
    /// was there before shrinks.
    fn weigh(&self, row: &mut [f32], start: usize, position: usize, maximum: &mut f32, sum: &mut f64) -> f32 {
        let (low, high) = self.heads.keys_of(position);
        let low = low.saturating_sub(start).min(row.len());
        let high = high.saturating_sub(start).min(row.len()).max(low);
        row[..low].fill(0.0);
        row[high..].fill(0.0);
        let seen = &mut row[low..high];
        if seen.is_empty() {
            return 1.0;
        }
        let larger = simd::maximum(seen).max(*maximum);
        let shrink = if *maximum == f32::NEG_INFINITY {
            0.0
        } else {
            (*maximum - larger).exp()
        };
        *maximum = larger;
        *sum = *sum * f64::from(shrink) + simd::exponentials(seen, larger);
        shrink
    }
}

/// Refuses q, k or v that do not fit `layout` and `heads`.
pub(super) fn expect_qkv(
    operation: &'static str,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    heads: Heads,
    layout: Layout,
) -> Result<()> {
    let kv_width = heads.groups * heads.dim;
    expect_shape(operation, "q", q, layout.rows(), heads.per_group * kv_width)?;
    expect_shape(operation, "k", k, layout.rows(), kv_width)?;
    expect_shape(operation, "v", v, layout.rows(), kv_width)
}

/// Where a sequence's keys and values are.
pub(super) struct Past<'a> {
    pub(super) keys: &'a Tensor,
    pub(super) values: &'a Tensor,
    /// Rows of one sequence.
    pub(super) stride: usize,
    /// Position of the first query among them.
    pub(super) position: usize,
}

/// Attends every query to `past`: the output, and the log-sums `(tokens, query_heads)`.
pub(super) fn attend(q: &Tensor, past: &Past<'_>, heads: Heads, layout: Layout) -> Result<(Tensor, Tensor)> {
    let query_heads = heads.groups * heads.per_group;
    let width = query_heads * heads.dim;
    let mut output = Tensor::unspecified(layout.rows(), width)?;
    let mut log_sums = Tensor::unspecified(layout.rows(), query_heads)?;
    let outputs = Shared::new(output.host_mut()?);
    let logs = Shared::new(log_sums.host_mut()?);
    let (queries, keys, values) = (Rows::of(q)?, Rows::of(past.keys)?, Rows::of(past.values)?);
    // Long blocks (late queries) first would balance better; with several blocks a thread it hardly shows.
    let blocks = layout.tokens.div_ceil(QUERY_BLOCK);
    let work = |piece: usize| -> Result<()> {
        let (sequence, rest) = (piece / (heads.groups * blocks), piece % (heads.groups * blocks));
        let (group, block) = (rest / blocks, rest % blocks);
        let first = block * QUERY_BLOCK;
        let count = QUERY_BLOCK.min(layout.tokens - first);
        let row = sequence * layout.tokens;
        let tile = Tile {
            heads,
            queries: Band::of(queries, row, group * heads.per_group * heads.dim),
            keys: Band::of(keys, sequence * past.stride, group * heads.dim),
            values: Band::of(values, sequence * past.stride, group * heads.dim),
            first,
            count,
            position: past.position + first,
        };
        let attended = tile.attend()?;
        for (index, log_sum) in attended.log_sums.iter().enumerate() {
            let head = group * heads.per_group + index / count;
            let token = row + first + index % count;
            // SAFETY: a head of a token belongs to one tile only.
            let target = unsafe { outputs.slice(token * width + head * heads.dim, heads.dim) };
            target.copy_from_slice(&attended.output[index * heads.dim..(index + 1) * heads.dim]);
            // SAFETY: as above.
            unsafe { logs.slice(token * query_heads + head, 1) }.fill(*log_sum);
        }
        Ok(())
    };
    (0..layout.sequences * heads.groups * blocks)
        .into_par_iter()
        .try_for_each(work)?;
    Ok((output, log_sums))
}

pub(super) fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: &Attention,
    layout: Layout,
) -> Result<(Tensor, Tensor)> {
    let heads = Heads::of("attention", shape)?;
    expect_qkv("attention", q, k, v, heads, layout)?;
    attend(
        q,
        &Past {
            keys: k,
            values: v,
            stride: layout.tokens,
            position: 0,
        },
        heads,
        layout,
    )
}
