//! Norm, rotary positions, activations, embedding, sums and casts.

use espalier_model::ops::cuda::{Element, Matrix, NormResidual, Result, RopeAngles, Rotation};

use crate::harness::{Harness, Operand, Output};

/// Rounded once to bf16, in norm.
const BF16: f64 = 4e-3;

pub(crate) fn check(harness: &mut Harness, small: bool) -> Result<()> {
    // (rows, width of a group, groups, padding, whether something is added first)
    let norms = [
        (37, 576, 1, 0, false),
        (133, 577, 1, 0, true),
        (65, 573, 1, 11, false),
        (301, 64, 5, 8, false),
        (9, 333, 3, 1, true),
        (20, 1536, 1, 8, true),
        (1, 8, 1, 0, false),
        (2049, 576, 1, 0, true),
        (70, 2048, 1, 0, false),
        (9, 8192, 1, 0, true),
    ];
    for case in &norms[..if small { 7 } else { norms.len() }] {
        norm(harness, *case)?;
    }
    for case in [
        (154, 77, 64, 9, 3, 0),
        (33, 11, 128, 2, 1, 5),
        (9, 3, 6, 2, 2, 0),
        (8, 8, 80, 1, 0, 3),
    ] {
        rope(harness, case)?;
    }
    for case in [
        (37, 1536, true),
        (37, 1536, false),
        (101, 333, true),
        (5, 1, false),
        (64, 640, true),
    ] {
        activations(harness, case)?;
    }
    let embeddings = [(300, 101, 577), (1, 3, 8), (777, 49152, 576)];
    for case in &embeddings[..if small { 2 } else { 3 }] {
        embedding(harness, *case)?;
    }
    for (rows, columns) in [(55, 576), (33, 333), (1, 8), (700, 65)] {
        elementwise(harness, rows, columns)?;
        columns_of(harness, rows, columns)?;
    }
    Ok(())
}

fn norm(harness: &mut Harness, case: (usize, usize, usize, usize, bool)) -> Result<()> {
    let (rows, width, groups, pad, with_delta) = case;
    let shape = format!(
        "{rows}x{groups}x{width}+{pad}{}",
        if with_delta { " residual" } else { "" }
    );
    let (columns, leading) = (width * groups, width * groups + pad);
    let x = harness.bf16(rows, columns, leading, 1.0)?;
    let delta = harness.bf16(rows, columns, leading, 1.0)?;
    let weight = harness.row(width, 1.0)?;
    let output = harness.poison(Element::Bf16, rows, columns, leading)?;
    let sum = harness.poison(Element::Bf16, rows, columns, leading)?;
    let reciprocal = harness.poison(Element::F32, rows, groups, groups)?;
    let residual = with_delta.then_some(NormResidual {
        delta: &delta.device,
        sum: &sum.view,
    });
    harness.device.rms_norm(
        &x.device,
        residual,
        &weight.device,
        &output.view,
        &reciprocal.view,
        1e-5,
    )?;
    let mut value = x.host.clone();
    if with_delta {
        let added: Vec<f64> = x.host.iter().zip(&delta.host).map(|(a, b)| a + b).collect();
        harness.compare("rms_norm sum", &shape, &sum, BF16, || added)?;
        // What later readers see is the rounded sum.
        value = harness
            .device
            .download(&sum.view)?
            .into_iter()
            .map(f64::from)
            .collect();
    }
    let scale: Vec<f64> = value
        .chunks(width)
        .map(|group| {
            (group.iter().map(|x| x * x).sum::<f64>() / width as f64 + f64::from(1e-5_f32))
                .sqrt()
                .recip()
        })
        .collect();
    let expected = |i: usize| value[i] * scale[i / width] * weight.host[i % width];
    harness.compare("rms_norm", &shape, &output, BF16, || {
        (0..value.len()).map(expected).collect()
    })?;
    harness.compare("rms_norm reciprocal", &shape, &reciprocal, 1e-6, || scale.clone())?;

    let source = if with_delta { &sum.view } else { &x.device };
    let grad = harness.bf16(rows, columns, leading, 1.0)?;
    let before = harness.bf16(rows, columns, leading, 1.0)?;
    let weight_before = harness.row(width, 1.0)?;
    for add in [true, false] {
        let grad_x = if add {
            harness.copy(&before)?
        } else {
            harness.poison(Element::Bf16, rows, columns, leading)?
        };
        let grad_weight = harness.copy(&weight_before)?;
        harness.device.rms_norm_backward(
            &grad.device,
            source,
            &weight.device,
            &reciprocal.view,
            &grad_x.view,
            add,
            Some(&grad_weight.view),
        )?;
        let through = || {
            let mut result = if add {
                before.host.clone()
            } else {
                vec![0.0; value.len()]
            };
            for (group, r) in scale.iter().enumerate() {
                let at = group * width..(group + 1) * width;
                let dot: f64 = at
                    .clone()
                    .map(|i| grad.host[i] * weight.host[i % width] * value[i])
                    .sum();
                for i in at {
                    result[i] +=
                        r * weight.host[i % width] * grad.host[i] - value[i] * r.powi(3) / width as f64 * dot;
                }
            }
            result
        };
        harness.compare(
            "rms_norm grad x",
            &format!("{shape} add {add}"),
            &grad_x,
            BF16,
            through,
        )?;
        let to_weight = || {
            let mut result = weight_before.host.clone();
            for i in 0..value.len() {
                result[i % width] += grad.host[i] * value[i] * scale[i / width];
            }
            result
        };
        harness.compare("rms_norm grad weight", &shape, &grad_weight, 1e-5, to_weight)?;
    }
    Ok(())
}

fn rope(harness: &mut Harness, case: (usize, usize, usize, usize, usize, usize)) -> Result<()> {
    let (rows, tokens, head_dim, q_heads, k_heads, first) = case;
    let shape = format!("{rows} rows, {q_heads}+{k_heads} heads of {head_dim} from {first}");
    let half = head_dim / 2;
    let width = (q_heads + k_heads) * head_dim;
    let both = harness.bf16(rows, width, width + head_dim, 1.0)?;
    let angles = harness.normals((first + tokens) * half, 3.0);
    let cosine: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
    let sine: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
    let cosine_device = harness.device.upload_f32(&cosine, first + tokens, half)?;
    let sine_device = harness.device.upload_f32(&sine, first + tokens, half)?;
    for (rotation, direction) in [(Rotation::Forward, 1.0), (Rotation::Backward, -1.0)] {
        let turned = harness.copy(&both)?;
        let q = turned.view.narrow_columns(0, q_heads * head_dim)?;
        let k = turned
            .view
            .narrow_columns(q_heads * head_dim, k_heads * head_dim)?;
        let angles = RopeAngles {
            cosine: &cosine_device,
            sine: &sine_device,
        };
        let k = (k_heads > 0).then_some(&k);
        harness
            .device
            .rope(&q, k, angles, head_dim, tokens, first, rotation)?;
        let expected = || {
            let mut result = both.host.clone();
            for (index, head) in result.chunks_mut(head_dim).enumerate() {
                let position = first + index / (q_heads + k_heads) % tokens;
                for i in 0..half {
                    let c = f64::from(cosine[position * half + i]);
                    let s = f64::from(sine[position * half + i]) * direction;
                    let (a, b) = (head[i], head[i + half]);
                    (head[i], head[i + half]) = (a * c - b * s, b * c + a * s);
                }
            }
            result
        };
        harness.compare("rope", &format!("{shape} {rotation:?}"), &turned, BF16, expected)?;
    }
    Ok(())
}

fn sigmoid(z: f64) -> f64 {
    (1.0 + (-z).exp()).recip()
}

fn activations(harness: &mut Harness, (rows, width, packed): (usize, usize, bool)) -> Result<()> {
    let shape = format!("{rows}x{width}{}", if packed { " packed, in place" } else { "" });
    let leading = if packed { 2 * width } else { width + 3 };
    let both = harness.bf16(rows, if packed { 2 * width } else { width }, leading, 2.0)?;
    let other = harness.bf16(rows, width, leading, 2.0)?;
    let halves = |harness: &Harness| -> Result<(Output, [Matrix; 2])> {
        let copy = harness.copy(&both)?;
        let gate = copy.view.narrow_columns(0, width)?;
        let up = if packed {
            copy.view.narrow_columns(width, width)?
        } else {
            other.device.clone()
        };
        Ok((copy, [gate, up]))
    };
    let stride = if packed { 2 * width } else { width };
    let z = |i: usize| both.host[i / width * stride + i % width];
    let u = |i: usize| {
        if packed {
            both.host[i / width * stride + width + i % width]
        } else {
            other.host[i]
        }
    };
    let count = rows * width;
    let (copy, [gate, up]) = halves(harness)?;
    let output = harness.poison(Element::Bf16, rows, width, width + 5)?;
    harness.device.swiglu(&gate, &up, &output.view)?;
    let silu = |i: usize| z(i) * sigmoid(z(i)) * u(i);
    harness.compare("swiglu", &shape, &output, BF16, || (0..count).map(silu).collect())?;
    let grad = harness.bf16(rows, width, width + 1, 1.0)?;
    let to_gate = |i: usize| {
        let s = sigmoid(z(i));
        grad.host[i] * u(i) * s * (1.0 + z(i) * (1.0 - s))
    };
    let to_up = |i: usize| grad.host[i] * z(i) * sigmoid(z(i));
    if packed {
        harness
            .device
            .swiglu_backward(&grad.device, &gate, &up, &gate, &up)?;
        let one = |i: usize| {
            let (row, column) = (i / stride, i % stride);
            if column < width {
                to_gate(row * width + column)
            } else {
                to_up(row * width + column - width)
            }
        };
        harness.compare("swiglu gradients", &shape, &copy, BF16, || {
            (0..rows * stride).map(one).collect()
        })?;
    } else {
        let grad_gate = harness.poison(Element::Bf16, rows, width, width + 7)?;
        let grad_up = harness.poison(Element::Bf16, rows, width, width + 7)?;
        harness
            .device
            .swiglu_backward(&grad.device, &gate, &up, &grad_gate.view, &grad_up.view)?;
        harness.compare("swiglu gradients", &shape, &grad_gate, BF16, || {
            (0..count).map(to_gate).collect()
        })?;
        harness.compare("swiglu gradients", &shape, &grad_up, BF16, || {
            (0..count).map(to_up).collect()
        })?;
    }
    let output = harness.poison(Element::Bf16, rows, width, width)?;
    harness.device.relu_squared(&other.device, &output.view)?;
    let positive = |i: usize| other.host[i].max(0.0);
    let squared = || (0..count).map(|i| positive(i).powi(2)).collect();
    harness.compare_above("relu_squared", &shape, &output, BF16, 0.1, squared)?;
    let grad_x = harness.poison(Element::Bf16, rows, width, width)?;
    harness
        .device
        .relu_squared_backward(&grad.device, &other.device, &grad_x.view)?;
    let through = || (0..count).map(|i| grad.host[i] * 2.0 * positive(i)).collect();
    harness.compare_above("relu_squared gradient", &shape, &grad_x, BF16, 0.1, through)
}

fn embedding(harness: &mut Harness, (rows, vocabulary, hidden): (usize, u32, usize)) -> Result<()> {
    let shape = format!("{rows} of {vocabulary}x{hidden}");
    let words = vocabulary as usize;
    let table = harness.bf16(words, hidden, hidden, 1.0)?;
    // A third of the rows are one token, as a padded batch's are.
    let ids: Vec<u32> = (0..rows)
        .map(|row| {
            if row % 3 == 1 {
                0
            } else {
                harness.below(vocabulary)
            }
        })
        .collect();
    let tokens = harness.device.tokens(&ids, words)?;
    let output = harness.poison(Element::Bf16, rows, hidden, hidden)?;
    harness.device.embedding(&table.device, &tokens, &output.view)?;
    let row = |id: &u32| table.host[*id as usize * hidden..][..hidden].to_vec();
    harness.compare("embedding", &shape, &output, 0.0, || {
        ids.iter().flat_map(row).collect()
    })?;
    let before = harness.operand(Element::F32, (words, hidden), hidden, 1.0)?;
    let grad = harness.bf16(rows, hidden, hidden, 1.0)?;
    let grad_table = harness.copy(&before)?;
    harness
        .device
        .embedding_backward(&grad.device, &tokens, &grad_table.view)?;
    let expected = || {
        let mut result = before.host.clone();
        for (row, &id) in ids.iter().enumerate() {
            for column in 0..hidden {
                result[id as usize * hidden + column] += grad.host[row * hidden + column];
            }
        }
        result
    };
    harness.compare("embedding gradient", &shape, &grad_table, 1e-6, expected)?;
    // The same buffers for another batch.
    let ids: Vec<u32> = (0..rows).map(|_| harness.below(vocabulary)).collect();
    harness.device.replace_tokens(&tokens, &ids)?;
    let output = harness.poison(Element::Bf16, rows, hidden, hidden)?;
    harness.device.embedding(&table.device, &tokens, &output.view)?;
    harness.compare("embedding", &format!("{shape}, replaced"), &output, 0.0, || {
        ids.iter().flat_map(row).collect()
    })
}

fn elementwise(harness: &mut Harness, rows: usize, columns: usize) -> Result<()> {
    let pairs = [
        (Element::F32, Element::Bf16),
        (Element::Bf16, Element::Bf16),
        (Element::Bf16, Element::F32),
        (Element::F32, Element::F32),
    ];
    for (target, source) in pairs {
        let shape = format!("{target:?} and {source:?} {rows}x{columns}");
        let bound = if target == Element::F32 { 1e-7 } else { BF16 };
        let b = harness.operand(source, (rows, columns), columns + 8, 1.0)?;
        let a = harness.operand(target, (rows, columns), columns, 1.0)?;
        let sum = harness.copy(&a)?;
        harness.device.add_assign(&sum.view, &b.device)?;
        let expected = || a.host.iter().zip(&b.host).map(|(a, b)| a + b).collect();
        harness.compare("add_assign", &shape, &sum, bound, expected)?;
        let cast = harness.poison(target, rows, columns, columns + 24)?;
        harness.device.cast(&cast.view, &b.device)?;
        harness.compare("cast", &shape, &cast, bound, || b.host.clone())?;
    }
    Ok(())
}

fn columns_of(harness: &mut Harness, rows: usize, columns: usize) -> Result<()> {
    for element in [Element::Bf16, Element::F32] {
        let shape = format!("{element:?} {rows}x{columns}");
        let x = harness.operand(element, (rows, columns), columns + 3, 1.0)?;
        let before = harness.row(columns, 1.0)?;
        let sums = harness.copy(&before)?;
        harness.device.add_column_sums(&x.device, &sums.view)?;
        let add = |start: Vec<f64>, of: fn(f64) -> f64, rows: std::ops::Range<usize>, x: &Operand| {
            let mut result = start;
            for row in rows {
                for (column, sum) in result.iter_mut().enumerate() {
                    *sum += of(x.host[row * columns + column]);
                }
            }
            result
        };
        let expected = || add(before.host.clone(), |x| x, 0..rows, &x);
        harness.compare("column sums", &shape, &sums, 2e-6, expected)?;
        let sequences = if rows.is_multiple_of(11) { 11 } else { 1 };
        let tokens = rows / sequences;
        let magnitudes = harness.poison(Element::F32, sequences, columns, columns)?;
        let squares = harness.poison(Element::F32, sequences, columns, columns)?;
        harness
            .device
            .column_magnitudes(&x.device, sequences, &magnitudes.view, &squares.view)?;
        for (output, of) in [
            (&magnitudes, f64::abs as fn(f64) -> f64),
            (&squares, |x: f64| x * x),
        ] {
            let one = |s: usize| add(vec![0.0; columns], of, s * tokens..(s + 1) * tokens, &x);
            harness.compare("column magnitudes", &shape, output, 1e-6, || {
                (0..sequences).flat_map(one).collect()
            })?;
        }
    }
    Ok(())
}
