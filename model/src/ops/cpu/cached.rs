//! Attention over a KV cache: appends the new keys and values, then attends to all that is there.

use rayon::prelude::*;

use super::attention::{Band, Heads, Past, attend, expect_qkv};
use super::rows::{Rows, Shared, expect, expect_shape};
use super::simd;
use crate::ops::{KvCache, Layout};
use crate::{Result, Tensor};
use espalier_arch::Attention;

/// Multiply-adds below which one thread decodes alone.
const SERIAL_PRODUCT: usize = 128 * 1024;

pub(super) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &mut KvCache,
    shape: &Attention,
    layout: Layout,
) -> Result<Tensor> {
    const OPERATION: &str = "attention_cached";
    let heads = Heads::of(OPERATION, shape)?;
    expect_qkv(OPERATION, q, k, v, heads, layout)?;
    let rows = layout.sequences.saturating_mul(cache.capacity);
    expect_shape(
        OPERATION,
        "cache.keys",
        &cache.keys,
        rows,
        heads.groups * heads.dim,
    )?;
    expect_shape(
        OPERATION,
        "cache.values",
        &cache.values,
        rows,
        heads.groups * heads.dim,
    )?;
    let end = cache.length.saturating_add(layout.tokens);
    expect(
        OPERATION,
        end <= cache.capacity,
        || {
            format!(
                "at most {} tokens a sequence, the cache's capacity",
                cache.capacity
            )
        },
        || format!("{} new ones after {}", layout.tokens, cache.length),
    )?;
    let first = cache.length;
    append(&mut cache.keys, k, cache.capacity, first, layout)?;
    append(&mut cache.values, v, cache.capacity, first, layout)?;
    cache.length = end;
    if layout.tokens == 1 {
        return decode(q, cache, heads, layout.sequences);
    }
    let past = Past {
        keys: &cache.keys,
        values: &cache.values,
        stride: cache.capacity,
        position: first,
    };
    Ok(attend(q, &past, heads, layout)?.0)
}

fn append(cache: &mut Tensor, new: &Tensor, capacity: usize, first: usize, layout: Layout) -> Result<()> {
    let (leading, columns) = (cache.leading_dimension(), cache.columns());
    let target = cache.host_mut()?;
    let new = Rows::of(new)?;
    for index in 0..layout.rows() {
        let position = index / layout.tokens * capacity + first + index % layout.tokens;
        if let Some(target) = target.get_mut(position * leading..position * leading + columns) {
            target.copy_from_slice(new.row(index));
        }
    }
    Ok(())
}

/// One new token a sequence: dot products straight from the cache, no packing.
fn decode(q: &Tensor, cache: &KvCache, heads: Heads, sequences: usize) -> Result<Tensor> {
    let width = heads.groups * heads.per_group * heads.dim;
    let mut output = Tensor::unspecified(sequences, width)?;
    let outputs = Shared::new(output.host_mut()?);
    let (low, high) = heads.keys_of(cache.length - 1);
    let (queries, all_keys, all_values) = (Rows::of(q)?, Rows::of(&cache.keys)?, Rows::of(&cache.values)?);
    let work = |piece: usize| {
        let (sequence, group) = (piece / heads.groups, piece % heads.groups);
        let keys = Band::of(all_keys, sequence * cache.capacity + low, group * heads.dim);
        let values = Band::of(all_values, sequence * cache.capacity + low, group * heads.dim);
        let mut weights = vec![0.0f32; high - low];
        for head in group * heads.per_group..(group + 1) * heads.per_group {
            let start = head * heads.dim;
            let query = queries
                .row(sequence)
                .get(start..start + heads.dim)
                .unwrap_or_default();
            weights.fill(0.0);
            simd::add_dots(&mut weights, query, keys.data, keys.leading);
            simd::scale(&mut weights, heads.scale);
            let largest = simd::maximum(&weights);
            let sum = simd::exponentials(&mut weights, largest);
            // SAFETY: a head of a sequence belongs to one piece only.
            let out = unsafe { outputs.slice(sequence * width + start, heads.dim) };
            out.fill(0.0);
            for (index, weight) in weights.iter().enumerate() {
                simd::add_scaled(out, *weight, values.row(index, heads.dim));
            }
            simd::scale(out, (1.0 / sum) as f32);
        }
    };
    let pieces = sequences * heads.groups;
    if pieces * (high - low) * heads.per_group * heads.dim < SERIAL_PRODUCT {
        (0..pieces).for_each(work);
    } else {
        (0..pieces).into_par_iter().for_each(work);
    }
    Ok(output)
}
