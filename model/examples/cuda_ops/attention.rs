//! Attention forward and backward, over a cache, and one token at a time.

use espalier_model::ops::cuda::{
    AttentionGradients, AttentionInputs, AttentionShape, CachedKeys, DecodeCache, Element, Matrix, Result,
    RopeAngles,
};
use rayon::prelude::*;

use crate::harness::{Harness, Operand};

const OUTPUT: f64 = 4e-3;
const GRADIENT: f64 = 8e-3;

#[derive(Debug, Clone, Copy)]
struct Case {
    sequences: usize,
    tokens: usize,
    heads: usize,
    groups: usize,
    head_dim: usize,
    window: usize,
}

pub(crate) fn check(harness: &mut Harness, small: bool) -> Result<()> {
    let cases = [
        (1, 77, 2, 1, 64, 0),
        (1, 130, 2, 1, 128, 40),
        (1, 65, 2, 2, 16, 7),
        (2, 129, 5, 1, 80, 0),
        (2, 77, 6, 2, 64, 0),
        (1, 1, 3, 1, 64, 0),
        (2, 257, 9, 3, 64, 0),
        (1, 1024, 9, 3, 64, 0),
        (2, 200, 4, 4, 128, 0),
        (1, 513, 8, 2, 128, 0),
        (1, 333, 4, 2, 64, 50),
        (1, 300, 2, 1, 128, 128),
        (3, 64, 4, 2, 32, 0),
        (2, 96, 3, 1, 112, 33),
    ];
    for &(sequences, tokens, heads, groups, head_dim, window) in &cases[..if small { 4 } else { cases.len() }]
    {
        let case = Case {
            sequences,
            tokens,
            heads,
            groups,
            head_dim,
            window,
        };
        whole(harness, case)?;
    }
    let cached = [
        (2, 5, 130, 200, 4, 2, 64),
        (3, 1, 77, 77, 6, 2, 64),
        (1, 70, 200, 256, 2, 1, 128),
    ];
    for case in cached {
        over_cache(harness, case)?;
    }
    let decoded = [
        (3, 6, 2, 64, 200, 0),
        (1, 9, 3, 64, 1000, 0),
        (2, 4, 4, 128, 77, 0),
        (2, 8, 1, 16, 130, 50),
        // So many sequences that a block takes more than one round of keys.
        (64, 32, 8, 64, 700, 0),
    ];
    for case in decoded {
        decode(harness, case)?;
    }
    Ok(())
}

/// What one query head gives in float64: output, log sums, and gradients to q, and to k and v of its group.
struct Head {
    output: Vec<f64>,
    log_sums: Vec<f64>,
    grads: Option<[Vec<f64>; 3]>,
}

/// Row-major `(rows, width)` with one head's columns of one sequence.
fn head_of(
    host: &[f64],
    width: usize,
    (first, rows): (usize, usize),
    (column, dim): (usize, usize),
) -> Vec<f64> {
    let row = |row: usize| &host[(first + row) * width + column..][..dim];
    (0..rows).flat_map(row).copied().collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_scaled(to: &mut [f64], from: &[f64], factor: f64) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// One head of one sequence; `q` stands at the end of `k`.
fn reference(q: &[f64], k: &[f64], v: &[f64], grad: Option<&[f64]>, dim: usize, window: usize) -> Head {
    let (tokens, keys) = (q.len() / dim, k.len() / dim);
    let scale = (dim as f64).sqrt().recip();
    let row = |of: &[f64], row: usize| of[row * dim..(row + 1) * dim].to_vec();
    let mut head = Head {
        output: Vec::with_capacity(q.len()),
        log_sums: Vec::with_capacity(tokens),
        grads: grad.map(|_| [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]]),
    };
    for query in 0..tokens {
        let position = query + keys - tokens;
        let first = if window > 0 {
            (position + 1).saturating_sub(window)
        } else {
            0
        };
        let own = row(q, query);
        let scores: Vec<f64> = (first..=position)
            .map(|key| scale * dot(&own, &k[key * dim..][..dim]))
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        let log_sum = largest + sum.ln();
        let mut output = vec![0.0; dim];
        for (key, score) in (first..).zip(&scores) {
            add_scaled(&mut output, &v[key * dim..][..dim], (score - log_sum).exp());
        }
        head.log_sums.push(log_sum);
        if let (Some(grad), Some([grad_q, grad_k, grad_v])) = (grad, &mut head.grads) {
            let grad = &grad[query * dim..][..dim];
            let delta = dot(grad, &output);
            for (key, score) in (first..).zip(&scores) {
                let at = key * dim..(key + 1) * dim;
                let p = (score - log_sum).exp();
                let ds = scale * p * (dot(grad, &v[at.clone()]) - delta);
                add_scaled(&mut grad_q[query * dim..][..dim], &k[at.clone()], ds);
                add_scaled(&mut grad_k[at.clone()], &own, ds);
                add_scaled(&mut grad_v[at], grad, p);
            }
        }
        head.output.extend(output);
    }
    head
}

/// Every head of every sequence, sequence by sequence.
fn references(
    case: Case,
    q: &Operand,
    k: &Operand,
    v: &Operand,
    keys: usize,
    capacity: usize,
    grad: Option<&Operand>,
) -> Vec<Head> {
    let Case {
        sequences,
        tokens,
        heads,
        groups,
        head_dim,
        window,
    } = case;
    (0..sequences * heads)
        .into_par_iter()
        .map(|index| {
            let (sequence, head) = (index / heads, index % heads);
            let of_q = |host: &[f64]| {
                head_of(
                    host,
                    heads * head_dim,
                    (sequence * tokens, tokens),
                    (head * head_dim, head_dim),
                )
            };
            let of_k = |host: &[f64]| {
                let column = head / (heads / groups) * head_dim;
                head_of(
                    host,
                    groups * head_dim,
                    (sequence * capacity, keys),
                    (column, head_dim),
                )
            };
            let grad = grad.map(|grad| of_q(&grad.host));
            reference(
                &of_q(&q.host),
                &of_k(&k.host),
                &of_k(&v.host),
                grad.as_deref(),
                head_dim,
                window,
            )
        })
        .collect()
}

/// Puts heads back side by side, `count` of them a row, adding those that share a place.
fn join<'a>(
    (sequences, rows, count, dim): (usize, usize, usize, usize),
    parts: impl Iterator<Item = (usize, usize, &'a [f64])>,
) -> Vec<f64> {
    let mut result = vec![0.0; sequences * rows * count * dim];
    for (sequence, head, part) in parts {
        for (row, from) in part.chunks(dim).enumerate() {
            let at = ((sequence * rows + row) * count + head) * dim;
            add_scaled(&mut result[at..at + dim], from, 1.0);
        }
    }
    result
}

fn whole(harness: &mut Harness, case: Case) -> Result<()> {
    let Case {
        sequences,
        tokens,
        heads,
        groups,
        head_dim,
        window,
    } = case;
    let shape = format!("{sequences}x{tokens}, {heads}/{groups} heads of {head_dim}, window {window}");
    let (rows, q_width, kv_width) = (sequences * tokens, heads * head_dim, groups * head_dim);
    // One buffer, as the layers have it.
    let all = q_width + 2 * kv_width;
    let packed = harness.bf16(rows, all, all, 1.5)?;
    let part = |start: usize, width: usize| -> Result<Operand> {
        let host = packed
            .host
            .chunks(all)
            .flat_map(|row| &row[start..start + width])
            .copied()
            .collect();
        let device = packed.device.narrow_columns(start, width)?;
        Ok(Operand { device, host })
    };
    let (q, k, v) = (
        part(0, q_width)?,
        part(q_width, kv_width)?,
        part(q_width + kv_width, kv_width)?,
    );
    let grad = harness.bf16(rows, q_width, q_width + 8, 1.0)?;
    let output = harness.poison(Element::Bf16, rows, q_width, q_width + 8)?;
    let log_sums = harness.poison(Element::F32, heads, rows, rows)?;
    let attention = AttentionShape {
        head_dim,
        sequences,
        window,
    };
    let (qd, kd, vd) = (&q.device, &k.device, &v.device);
    harness
        .device
        .attention(qd, kd, vd, &output.view, &log_sums.view, attention, None)?;
    let mut known: Option<Vec<Head>> = None;
    let mut heads_of = || {
        let compute = || references(case, &q, &k, &v, tokens, tokens, Some(&grad));
        std::mem::take(known.get_or_insert_with(compute))
    };
    let mut computed: Vec<Head> = Vec::new();
    let joined = |computed: &[Head], of: fn(&Head) -> &[f64]| {
        join(
            (sequences, tokens, heads, head_dim),
            computed
                .iter()
                .enumerate()
                .map(|(i, head)| (i / heads, i % heads, of(head))),
        )
    };
    harness.compare("attention", &shape, &output, OUTPUT, || {
        computed = heads_of();
        joined(&computed, |head| &head.output)
    })?;
    harness.compare("attention log sums", &shape, &log_sums, 1e-5, || {
        let of = |head: usize| (0..sequences).flat_map(move |sequence| [sequence * heads + head]);
        (0..heads)
            .flat_map(of)
            .flat_map(|index| computed[index].log_sums.clone())
            .collect()
    })?;

    let grads = harness.poison(Element::Bf16, rows, all, all + 16)?;
    let view = |start: usize, width: usize| grads.view.narrow_columns(start, width);
    let (grad_q, grad_k, grad_v) = (
        view(0, q_width)?,
        view(q_width, kv_width)?,
        view(q_width + kv_width, kv_width)?,
    );
    let inputs = AttentionInputs {
        q: qd,
        k: kd,
        v: vd,
        output: &output.view,
        log_sums: &log_sums.view,
        grad_output: &grad.device,
    };
    let into = AttentionGradients {
        q: &grad_q,
        k: &grad_k,
        v: &grad_v,
    };
    harness.device.attention_backward(inputs, into, attention)?;
    // Gradients to q and k may be 0 (one token): what is left of them is measured against the gradient.
    let least = 0.1 * dot(&grad.host, &grad.host).sqrt();
    let of = |place: usize, head: &Head| {
        head.grads
            .as_ref()
            .map_or_else(Vec::new, |grads| grads[place].clone())
    };
    for (place, what) in ["q", "k", "v"].into_iter().enumerate() {
        let matrix: &Matrix = [&grad_q, &grad_k, &grad_v][place];
        let count = if place == 0 { heads } else { groups };
        let expected = || {
            let parts: Vec<Vec<f64>> = computed.iter().map(|head| of(place, head)).collect();
            let at = |i: usize| (i / heads, i % heads / (heads / count));
            join(
                (sequences, tokens, count, head_dim),
                parts
                    .iter()
                    .enumerate()
                    .map(|(i, part)| (at(i).0, at(i).1, part.as_slice())),
            )
        };
        let found = crate::harness::Output::of(matrix.clone());
        harness.compare_above(
            &format!("attention grad {what}"),
            &shape,
            &found,
            GRADIENT,
            least,
            expected,
        )?;
    }
    let around = harness.device.download(&grads.view)?;
    harness.record(
        "attention gradients",
        &shape,
        around.iter().all(|x| !x.is_nan()),
        "were not all written",
    );
    Ok(())
}

fn over_cache(harness: &mut Harness, case: (usize, usize, usize, usize, usize, usize, usize)) -> Result<()> {
    let (sequences, tokens, keys, capacity, heads, groups, head_dim) = case;
    let shape =
        format!("{sequences}x{tokens} over {keys} of {capacity}, {heads}/{groups} heads of {head_dim}");
    let rows = sequences * tokens;
    let q = harness.bf16(rows, heads * head_dim, heads * head_dim, 1.0)?;
    let k = harness.bf16(sequences * capacity, groups * head_dim, groups * head_dim, 1.0)?;
    let v = harness.bf16(sequences * capacity, groups * head_dim, groups * head_dim, 1.0)?;
    let output = harness.poison(Element::Bf16, rows, heads * head_dim, heads * head_dim)?;
    let log_sums = harness.poison(Element::F32, heads, rows, rows)?;
    let attention = AttentionShape {
        head_dim,
        sequences,
        window: 0,
    };
    let cached = Some(CachedKeys { keys, capacity });
    let (qd, kd, vd) = (&q.device, &k.device, &v.device);
    harness
        .device
        .attention(qd, kd, vd, &output.view, &log_sums.view, attention, cached)?;
    let case = Case {
        sequences,
        tokens,
        heads,
        groups,
        head_dim,
        window: 0,
    };
    harness.compare("attention cached", &shape, &output, OUTPUT, || {
        let computed = references(case, &q, &k, &v, keys, capacity, None);
        let parts = computed
            .iter()
            .enumerate()
            .map(|(i, head)| (i / heads, i % heads, head.output.as_slice()));
        join((sequences, tokens, heads, head_dim), parts)
    })
}

fn decode(harness: &mut Harness, case: (usize, usize, usize, usize, usize, usize)) -> Result<()> {
    let (sequences, heads, groups, head_dim, capacity, window) = case;
    let shape = format!("{sequences} of {capacity}, {heads}/{groups} heads of {head_dim}, window {window}");
    let (q_width, kv_width, half) = (heads * head_dim, groups * head_dim, head_dim / 2);
    let lengths: Vec<usize> = (0..sequences)
        .map(|s| 1 + (capacity - 1) * (sequences - s) / sequences)
        .collect();
    let q = harness.bf16(sequences, q_width, q_width + 8, 1.0)?;
    let k = harness.bf16(sequences, kv_width, kv_width, 1.0)?;
    let v = harness.bf16(sequences, kv_width, kv_width, 1.0)?;
    let keys = harness.bf16(sequences * capacity, kv_width, kv_width, 1.0)?;
    let values = harness.bf16(sequences * capacity, kv_width, kv_width, 1.0)?;
    let angles = harness.normals(capacity * half, 3.0);
    let table = |of: fn(f32) -> f32| angles.iter().map(|&a| of(a)).collect::<Vec<f32>>();
    let (cosine, sine) = (table(f32::cos), table(f32::sin));
    let (cosine_device, sine_device) = (
        harness.device.upload_f32(&cosine, capacity, half)?,
        harness.device.upload_f32(&sine, capacity, half)?,
    );
    let as_i32: Vec<i32> = lengths
        .iter()
        .map(|&length| i32::try_from(length).unwrap_or(0))
        .collect();
    let lengths_device = harness.device.upload_i32(&as_i32)?;
    let output = harness.poison(Element::Bf16, sequences, q_width, q_width)?;
    let (key_copy, value_copy) = (harness.copy(&keys)?, harness.copy(&values)?);
    let cache = DecodeCache {
        keys: &key_copy.view,
        values: &value_copy.view,
        capacity,
        lengths: &lengths_device,
    };
    let rope = RopeAngles {
        cosine: &cosine_device,
        sine: &sine_device,
    };
    let (kd, vd) = (&k.device, &v.device);
    harness.device.decode_attention(
        &q.device,
        kd,
        vd,
        cache,
        Some(rope),
        &output.view,
        head_dim,
        window,
        false,
    )?;
    // The rotated k as it was rounded, which another check compares with the exact one.
    let keys_after: Vec<f64> = harness
        .device
        .download(&key_copy.view)?
        .into_iter()
        .map(f64::from)
        .collect();
    let turn = |host: &[f64], position: usize| {
        let mut result = host.to_vec();
        for head in result.chunks_mut(head_dim) {
            for i in 0..half {
                let (c, s) = (
                    f64::from(cosine[position * half + i]),
                    f64::from(sine[position * half + i]),
                );
                (head[i], head[i + half]) =
                    (head[i] * c - head[i + half] * s, head[i + half] * c + head[i] * s);
            }
        }
        result
    };
    harness.compare("decode key cache", &shape, &key_copy, OUTPUT, || {
        let mut expected = keys.host.clone();
        for (s, &length) in lengths.iter().enumerate() {
            let at = (s * capacity + length - 1) * kv_width;
            let turned = turn(&k.host[s * kv_width..][..kv_width], length - 1);
            expected[at..at + kv_width].copy_from_slice(&turned);
        }
        expected
    })?;
    let mut values_after = values.host;
    for (s, &length) in lengths.iter().enumerate() {
        let at = (s * capacity + length - 1) * kv_width;
        values_after[at..at + kv_width].copy_from_slice(&v.host[s * kv_width..][..kv_width]);
    }
    harness.compare("decode value cache", &shape, &value_copy, 0.0, || {
        values_after.clone()
    })?;
    harness.compare("decode attention", &shape, &output, OUTPUT, || {
        let one = |index: usize| {
            let (s, head) = (index / heads, index % heads);
            let column = head / (heads / groups) * head_dim;
            let of = |host: &[f64]| head_of(host, kv_width, (s * capacity, lengths[s]), (column, head_dim));
            let own = turn(
                &q.host[s * q_width + head * head_dim..][..head_dim],
                lengths[s] - 1,
            );
            reference(&own, &of(&keys_after), &of(&values_after), None, head_dim, window).output
        };
        (0..sequences * heads).flat_map(one).collect()
    })
}
