//! Matrix products: three forms, accumulation, residual, bias, few rows with what they take in.

use espalier_model::ops::cuda::{Element, FewRows, Onto, Result};
use rayon::prelude::*;

use crate::harness::{Harness, Operand};

const BF16: f64 = 4e-3;
const F32: f64 = 3e-5;

pub(crate) fn check(harness: &mut Harness, small: bool) -> Result<()> {
    // (rows, in, out, padding of x, of the weight, of the output)
    let cases = [
        (154, 577, 333, 0, 0, 0),
        (77, 321, 575, 1, 2, 3),
        (512, 512, 1024, 0, 1024, 0),
        (2048, 576, 1536, 0, 0, 960),
        (1024, 1024, 576, 512, 512, 0),
        (65, 8, 16, 0, 0, 0),
    ];
    for (index, case) in cases.iter().take(if small { 2 } else { cases.len() }).enumerate() {
        for element in [Element::Bf16, Element::F32] {
            forward(harness, *case, element)?;
            backward(harness, *case, element, index % 2 == 0)?;
        }
        full_precision(harness, *case)?;
    }
    for case in [(1, 576, 1536), (4, 577, 333), (8, 2048, 64), (3, 64, 49152)] {
        few_rows(harness, case)?;
    }
    Ok(())
}

/// `left · right`, with the strides of each given as (row, column).
fn product(
    (left, left_strides): (&[f64], (usize, usize)),
    (right, right_strides): (&[f64], (usize, usize)),
    (rows, inner, columns): (usize, usize, usize),
) -> Vec<f64> {
    let mut result = vec![0.0; rows * columns];
    result
        .par_chunks_mut(columns)
        .enumerate()
        .for_each(|(row, sums)| {
            for i in 0..inner {
                let factor = left[row * left_strides.0 + i * left_strides.1];
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum += factor * right[i * right_strides.0 + column * right_strides.1];
                }
            }
        });
    result
}

fn plus(mut a: Vec<f64>, b: &[f64], period: usize) -> Vec<f64> {
    for (index, a) in a.iter_mut().enumerate() {
        *a += b[index % period];
    }
    a
}

type Case = (usize, usize, usize, usize, usize, usize);

fn bound(output: Element) -> f64 {
    if output == Element::Bf16 { BF16 } else { F32 }
}

fn forward(harness: &mut Harness, case: Case, element: Element) -> Result<()> {
    let (rows, inner, out, x_pad, w_pad, o_pad) = case;
    let shape = format!("{rows}x{inner}x{out}+{x_pad}+{w_pad}+{o_pad} to {element:?}");
    let x = harness.bf16(rows, inner, inner + x_pad, 1.0)?;
    let weight = harness.bf16(out, inner, inner + w_pad, 1.0)?;
    let bias = harness.operand(element, (1, out), out, 10.0)?;
    let residual = harness.operand(element, (rows, out), out + o_pad, 10.0)?;
    let mut known: Option<Vec<f64>> = None;
    let mut plain = || {
        let compute = || {
            product(
                (&x.host, (inner, 1)),
                (&weight.host, (1, inner)),
                (rows, inner, out),
            )
        };
        known.get_or_insert_with(compute).clone()
    };
    let fresh = |harness: &Harness| harness.poison(element, rows, out, out + o_pad);
    let output = fresh(harness)?;
    harness
        .device
        .linear(&x.device, &weight.device, None, Onto::Nothing, &output.view)?;
    harness.compare("linear", &shape, &output, bound(element), &mut plain)?;
    let output = fresh(harness)?;
    harness.device.linear(
        &x.device,
        &weight.device,
        Some(&bias.device),
        Onto::Nothing,
        &output.view,
    )?;
    harness.compare("linear bias", &shape, &output, bound(element), || {
        plus(plain(), &bias.host, out)
    })?;
    let output = fresh(harness)?;
    let onto = Onto::Residual(&residual.device);
    harness
        .device
        .linear(&x.device, &weight.device, None, onto, &output.view)?;
    harness.compare("linear residual", &shape, &output, bound(element), || {
        plus(plain(), &residual.host, rows * out)
    })?;
    let output = fresh(harness)?;
    harness
        .device
        .linear(&x.device, &weight.device, Some(&bias.device), onto, &output.view)?;
    harness.compare("linear bias residual", &shape, &output, bound(element), || {
        plus(plus(plain(), &bias.host, out), &residual.host, rows * out)
    })
}

fn backward(harness: &mut Harness, case: Case, element: Element, add: bool) -> Result<()> {
    let (rows, inner, out, x_pad, w_pad, o_pad) = case;
    let shape = format!("{rows}x{inner}x{out}+{x_pad}+{w_pad}+{o_pad} to {element:?}");
    let grad = harness.bf16(rows, out, out + o_pad, 1.0)?;
    let weight = harness.bf16(out, inner, inner + w_pad, 1.0)?;
    let x = harness.bf16(rows, inner, inner + x_pad, 1.0)?;
    let before = harness.operand(element, (rows, inner), inner + x_pad, 10.0)?;
    let grad_x = if add {
        harness.copy(&before)?
    } else {
        harness.poison(element, rows, inner, inner + x_pad)?
    };
    // The copy's padding is unspecified memory, poisoned like all of it.
    let onto = if add { Onto::Output } else { Onto::Nothing };
    harness
        .device
        .linear_backward_input(&grad.device, &weight.device, onto, &grad_x.view)?;
    harness.compare(
        "linear grad x",
        &format!("{shape} add {add}"),
        &grad_x,
        bound(element),
        || {
            let result = product(
                (&grad.host, (out, 1)),
                (&weight.host, (inner, 1)),
                (rows, out, inner),
            );
            if add {
                plus(result, &before.host, rows * inner)
            } else {
                result
            }
        },
    )?;
    let before = harness.operand(element, (out, inner), inner + w_pad, 10.0)?;
    let grad_weight = harness.copy(&before)?;
    harness
        .device
        .linear_backward_weight(&grad.device, &x.device, &grad_weight.view)?;
    harness.compare("linear grad weight", &shape, &grad_weight, bound(element), || {
        let result = product((&grad.host, (1, out)), (&x.host, (inner, 1)), (out, rows, inner));
        plus(result, &before.host, out * inner)
    })
}

/// f32 in and out: what a product in double the width costs nothing to check.
fn full_precision(harness: &mut Harness, case: Case) -> Result<()> {
    let (rows, inner, out, x_pad, w_pad, o_pad) = case;
    let shape = format!("{rows}x{inner}x{out}+{x_pad}+{w_pad}+{o_pad} f32");
    let operand = |harness: &mut Harness, rows, columns, leading| -> Result<Operand> {
        harness.operand(Element::F32, (rows, columns), leading, 1.0)
    };
    let x = operand(harness, rows, inner, inner + x_pad)?;
    let weight = operand(harness, out, inner, inner + w_pad)?;
    let output = harness.poison(Element::F32, rows, out, out + o_pad)?;
    harness
        .device
        .linear(&x.device, &weight.device, None, Onto::Nothing, &output.view)?;
    harness.compare("linear f32", &shape, &output, 3e-6, || {
        product(
            (&x.host, (inner, 1)),
            (&weight.host, (1, inner)),
            (rows, inner, out),
        )
    })
}

fn few_rows(harness: &mut Harness, (rows, inner, out): (usize, usize, usize)) -> Result<()> {
    let shape = format!("{rows}x{inner}x{out}");
    let x = harness.bf16(rows, inner, inner + 8, 1.0)?;
    let weight = harness.bf16(out, inner, inner + 16, 1.0)?;
    let residual = harness.bf16(rows, out, out, 10.0)?;
    let plain = || {
        product(
            (&x.host, (inner, 1)),
            (&weight.host, (1, inner)),
            (rows, inner, out),
        )
    };
    let output = harness.poison(Element::Bf16, rows, out, out + 1)?;
    let what = FewRows::default();
    harness
        .device
        .few_rows(&x.device, &weight.device, what, &output.view)?;
    harness.compare("few_rows", &shape, &output, BF16, plain)?;
    let output = harness.poison(Element::F32, rows, out, out + 1)?;
    harness
        .device
        .few_rows(&x.device, &weight.device, what, &output.view)?;
    harness.compare("few_rows to f32", &shape, &output, F32, plain)?;
    let output = harness.copy(&residual)?;
    let onto = FewRows {
        residual: Some(&output.view),
        ..what
    };
    harness
        .device
        .few_rows(&x.device, &weight.device, onto, &output.view)?;
    harness.compare("few_rows residual", &shape, &output, BF16, || {
        plus(plain(), &residual.host, rows * out)
    })?;
    few_normed_rows(harness, &shape, (rows, inner, out), &x, &weight)
}

/// With the norm before and the activation after.
fn few_normed_rows(
    harness: &mut Harness,
    shape: &str,
    (rows, inner, out): (usize, usize, usize),
    x: &Operand,
    weight: &Operand,
) -> Result<()> {
    const EPSILON: f32 = 1e-5;
    let norm = harness.row(inner, 1.0)?;
    let gate = harness.bf16(out, inner, inner + 16, 1.0)?;
    let normed: Vec<f64> = x
        .host
        .chunks(inner)
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / inner as f64;
            let factor = (mean + f64::from(EPSILON)).sqrt().recip();
            row.iter()
                .zip(&norm.host)
                .map(move |(x, scale)| x * factor * scale)
        })
        .collect();
    let of = |layer: &Operand| {
        product(
            (&normed, (inner, 1)),
            (&layer.host, (1, inner)),
            (rows, inner, out),
        )
    };
    let plain = FewRows {
        norm: Some((&norm.device, EPSILON)),
        early: true,
        ..FewRows::default()
    };
    let gated = FewRows {
        gate: Some(&gate.device),
        ..plain
    };
    for (element, bound) in [(Element::Bf16, BF16), (Element::F32, F32)] {
        let output = harness.poison(element, rows, out, out)?;
        harness
            .device
            .few_rows(&x.device, &weight.device, plain, &output.view)?;
        let kind = format!("few_rows normed to {element:?}");
        harness.compare(&kind, shape, &output, bound, || of(weight))?;
    }
    let output = harness.poison(Element::Bf16, rows, out, out + 2)?;
    harness
        .device
        .few_rows(&x.device, &weight.device, gated, &output.view)?;
    harness.compare("few_rows gated", shape, &output, BF16, || {
        let opened = |(up, gate): (f64, f64)| up * gate / (1.0 + (-gate).exp());
        of(weight).into_iter().zip(of(&gate)).map(opened).collect()
    })
}
