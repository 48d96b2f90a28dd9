//! Cross-entropy, distillation, the choice of a token.

use espalier_model::ops::cuda::{Element, LogitGradient, Result};

use crate::harness::Harness;

const BF16: f64 = 4e-3;

pub(crate) fn check(harness: &mut Harness, small: bool) -> Result<()> {
    let cases = [(9, 1001), (2, 40), (17, 49152), (3, 131_072)];
    for element in [Element::Bf16, Element::F32] {
        for &(rows, vocabulary) in &cases[..if small { 2 } else { 4 }] {
            cross_entropy(harness, rows, vocabulary, element)?;
            distillation(harness, rows, vocabulary, element)?;
            argmax(harness, rows, vocabulary, element)?;
        }
    }
    Ok(())
}

/// (ln Σ e^x, softmax).
fn softmax(logits: &[f64]) -> (f64, Vec<f64>) {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
    let log_sum = largest + sum.ln();
    (log_sum, logits.iter().map(|x| (x - log_sum).exp()).collect())
}

fn cross_entropy(harness: &mut Harness, rows: usize, vocabulary: usize, element: Element) -> Result<()> {
    let shape = format!("{rows}x{vocabulary} {element:?}");
    let scale = 1.0 / 7.0_f32;
    let logits = harness.operand(element, (rows, vocabulary), vocabulary, 4.0)?;
    let target = |harness: &mut Harness, row| {
        let any = harness.below(u32::try_from(vocabulary).unwrap_or(u32::MAX));
        if row == 1 {
            -1
        } else {
            i32::try_from(any).unwrap_or(0)
        }
    };
    let targets: Vec<i32> = (0..rows).map(|row| target(harness, row)).collect();
    let ids = harness.device.upload_i32(&targets)?;
    let loss = harness.poison(Element::F32, 1, rows, rows)?;
    // Over the logits where it may.
    let over = harness.copy(&logits)?;
    let beside = harness.poison(Element::Bf16, rows, vocabulary, vocabulary + 8)?;
    let gradient = if element == Element::Bf16 { &over } else { &beside };
    let into = LogitGradient {
        target: &gradient.view,
        scale,
    };
    harness
        .device
        .cross_entropy(&over.view, &ids, &loss.view, Some(into))?;
    let row = |row: usize| &logits.host[row * vocabulary..(row + 1) * vocabulary];
    let chosen = |r: usize| usize::try_from(targets[r]).ok();
    let losses = || {
        (0..rows)
            .map(|r| chosen(r).map_or(0.0, |target| softmax(row(r)).0 - row(r)[target]))
            .collect()
    };
    harness.compare("cross_entropy", &shape, &loss, 1e-6, losses)?;
    let gradients = || {
        let one = |r: usize| match chosen(r) {
            None => vec![0.0; vocabulary],
            Some(target) => {
                let mut gradient = softmax(row(r)).1;
                gradient[target] -= 1.0;
                gradient.iter().map(|g| g * f64::from(scale)).collect()
            }
        };
        (0..rows).flat_map(one).collect()
    };
    harness.compare("cross_entropy gradient", &shape, gradient, BF16, gradients)?;
    let alone = harness.poison(Element::F32, 1, rows, rows)?;
    harness
        .device
        .cross_entropy(&logits.device, &ids, &alone.view, None)?;
    harness.compare(
        "cross_entropy",
        &format!("{shape} without gradient"),
        &alone,
        1e-6,
        losses,
    )
}

fn distillation(harness: &mut Harness, rows: usize, vocabulary: usize, element: Element) -> Result<()> {
    let shape = format!("{rows}x{vocabulary} {element:?}");
    let scale = 1.0 / 7.0_f32;
    let student = harness.operand(element, (rows, vocabulary), vocabulary, 4.0)?;
    // A parent near the student, so that the divergence is small beside both entropies.
    let noise = harness.normals(rows * vocabulary, 0.2);
    let near: Vec<f32> = student
        .host
        .iter()
        .zip(noise)
        .map(|(&x, n)| x as f32 + n)
        .collect();
    let parent = match element {
        Element::Bf16 => harness.device.upload_bf16(&near, rows, vocabulary)?,
        _ => harness.device.upload_f32(&near, rows, vocabulary)?,
    };
    let parent_host: Vec<f64> = harness
        .device
        .download(&parent)?
        .into_iter()
        .map(f64::from)
        .collect();
    let loss = harness.poison(Element::F32, 1, rows, rows)?;
    let over = harness.copy(&student)?;
    let beside = harness.poison(Element::Bf16, rows, vocabulary, vocabulary + 8)?;
    let gradient = if element == Element::Bf16 { &over } else { &beside };
    let into = LogitGradient {
        target: &gradient.view,
        scale,
    };
    harness
        .device
        .distillation(&over.view, &parent, &loss.view, Some(into))?;
    let row = |of: &[f64], row: usize| softmax(&of[row * vocabulary..(row + 1) * vocabulary]);
    let losses = || {
        let one = |r: usize| {
            let ((log_q, _), (log_p, p)) = (row(&student.host, r), row(&parent_host, r));
            let term = |j: usize| {
                let at = r * vocabulary + j;
                p[j] * ((parent_host[at] - log_p) - (student.host[at] - log_q))
            };
            (0..vocabulary).map(term).sum()
        };
        (0..rows).map(one).collect()
    };
    // The divergence is a difference of sums over a vocabulary in f32, each known to some 1e-7 whatever is left of
    // them: below .02 a row the bound is 1e-6, not a part of the divergence.
    let least = 0.02 * (rows as f64).sqrt();
    harness.compare_above("distillation", &shape, &loss, 5e-5, least, losses)?;
    let gradients = || {
        let one = |r: usize| {
            let ((_, q), (_, p)) = (row(&student.host, r), row(&parent_host, r));
            q.into_iter()
                .zip(p)
                .map(|(q, p)| (q - p) * f64::from(scale))
                .collect::<Vec<f64>>()
        };
        (0..rows).flat_map(one).collect()
    };
    harness.compare("distillation gradient", &shape, gradient, BF16, gradients)
}

fn argmax(harness: &mut Harness, rows: usize, vocabulary: usize, element: Element) -> Result<()> {
    let shape = format!("{rows}x{vocabulary} {element:?}");
    // bf16 has few values: the largest occurs more than once.
    let logits = harness.operand(element, (rows, vocabulary), vocabulary + 5, 1.0)?;
    let result = harness.device.matrix(Element::I32, 1, rows)?;
    let lengths = harness
        .device
        .upload_i32(&(0..i32::try_from(rows).unwrap_or(0)).collect::<Vec<_>>())?;
    harness.device.argmax(&logits.device, &result, Some(&lengths))?;
    let counted = harness.device.download_i32(&lengths)?;
    harness.record(
        "argmax",
        &shape,
        counted.iter().zip(1..).all(|(&length, next)| length == next),
        "did not count each sequence's token",
    );
    let found = harness.device.download_i32(&result)?;
    let first_largest = |row: &[f64]| {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter().position(|&x| x == largest)
    };
    let same = logits
        .host
        .chunks(vocabulary)
        .zip(&found)
        .all(|(row, &column)| first_largest(row) == usize::try_from(column).ok());
    harness.record("argmax", &shape, same, "is not the first of the largest");
    // An entry that is not a number is passed over.
    let one = harness
        .device
        .upload_f32(&[f32::NAN, -3.0, f32::NEG_INFINITY, -1.0, f32::NAN], 1, 5)?;
    let result = harness.device.matrix(Element::I32, 1, 1)?;
    harness.device.argmax(&one, &result, None)?;
    let found = harness.device.download_i32(&result)?;
    harness.record(
        "argmax",
        "with what is not a number",
        found == [3],
        "is not the largest number",
    );
    Ok(())
}
