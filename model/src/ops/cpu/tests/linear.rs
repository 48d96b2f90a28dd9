//! Linear layers against float64.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::ops::LinearGradient;

/// `x · weightᵀ + bias + residual` in f64; inputs in this order, the last two may be empty.
fn formula(inputs: &[Vec<f64>], width: usize) -> Vec<f64> {
    let (x, weight, bias, residual) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3]);
    let outputs = weight.len() / width;
    let mut out = Vec::new();
    for (row, x) in x.chunks(width).enumerate() {
        for (column, weight) in weight.chunks(width).enumerate() {
            let product: f64 = x.iter().zip(weight).map(|(x, weight)| x * weight).sum();
            let bias = bias.get(column).copied().unwrap_or_default();
            out.push(product + bias + residual.get(row * outputs + column).copied().unwrap_or_default());
        }
    }
    out
}

#[test]
fn linear_layers_over_views_match_float64_for_few_and_many_rows() {
    for rows in [1, 3, 6, 7, 33] {
        let (x, weight, bias) = (view(rows, 67, 1), view(29, 67, 2), tensor(1, 29, 3));
        let residual = view(rows, 29, 4);
        let inputs = [values(&x), values(&weight), vec![], vec![]];
        let plain = OPS.linear(&x, plain(&weight)).unwrap();
        assert_close("linear", &values(&plain), &formula(&inputs, 67), 1e-6);
        let inputs = [values(&x), values(&weight), values(&bias), values(&residual)];
        let layer = Linear {
            weight: &weight,
            bias: Some(&bias),
        };
        let whole = OPS.linear_residual(&x, layer, &residual).unwrap();
        assert_close("linear_residual", &values(&whole), &formula(&inputs, 67), 1e-6);
    }
}

#[test]
fn a_large_linear_layer_matches_float64() {
    for rows in [2, 130] {
        let (x, weight) = (tensor(rows, 515, 1), tensor(301, 515, 2));
        let inputs = [values(&x), values(&weight), vec![], vec![]];
        let out = OPS.linear(&x, plain(&weight)).unwrap();
        assert_close("linear", &values(&out), &formula(&inputs, 515), 1e-6);
    }
}

#[test]
fn gradients_of_inputs_are_new_and_those_of_weights_add_to_what_is_there() {
    let (x, weight) = (view(9, 13, 1), view(7, 13, 2));
    let grad = view(9, 7, 3);
    let inputs = [values(&x), values(&weight), vec![0.0; 7], vec![]];
    let slopes = |which| derivatives(|inputs| formula(inputs, 13), &inputs, which, &values(&grad));

    let once = OPS.linear_backward_input(&[(&grad, &weight)]).unwrap();
    assert_close("grad_x", &values(&once), &slopes(0), 1e-6);
    let twice = [(&grad, &weight), (&grad, &weight)];
    let twice = OPS.linear_backward_input(&twice).unwrap();
    let expected: Vec<f64> = slopes(0).iter().map(|slope| 2.0 * slope).collect();
    assert_close("grad_x of two layers", &values(&twice), &expected, 1e-6);

    let mut grad_weight = OPS.contiguous(&weight).unwrap();
    let mut grad_bias = tensor(1, 7, 9);
    let bias_before = values(&grad_bias);
    let layer = LinearGradient {
        output: &grad,
        weight: &mut grad_weight,
        bias: Some(&mut grad_bias),
    };
    OPS.linear_backward_weight(&x, &mut [layer]).unwrap();
    let expected: Vec<f64> = slopes(1)
        .iter()
        .zip(values(&weight))
        .map(|(slope, was)| slope + was)
        .collect();
    assert_close("grad_weight", &values(&grad_weight), &expected, 1e-6);
    let expected: Vec<f64> = slopes(2)
        .iter()
        .zip(bias_before)
        .map(|(slope, was)| slope + was)
        .collect();
    assert_close("grad_bias", &values(&grad_bias), &expected, 1e-6);
}

#[test]
fn products_do_not_depend_on_the_number_of_threads() {
    let (x, weight) = (tensor(77, 190, 1), tensor(210, 190, 2));
    assert_same_on_any_threads(|| {
        let mut grad_weight = zeros(210, 190);
        let out = OPS.linear(&x, plain(&weight)).unwrap();
        let layer = LinearGradient {
            output: &out,
            weight: &mut grad_weight,
            bias: None,
        };
        OPS.linear_backward_weight(&x, &mut [layer]).unwrap();
        [OPS.download(&out).unwrap(), OPS.download(&grad_weight).unwrap()].concat()
    });
}

#[test]
fn shapes_that_disagree_are_refused() {
    let (weight, bias) = (tensor(4, 5, 2), tensor(1, 3, 3));
    let error = OPS.linear(&tensor(2, 3, 1), plain(&weight)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "linear: expected x with 5 columns, as the weight, found 2 x 3"
    );
    let layer = Linear {
        weight: &weight,
        bias: Some(&bias),
    };
    assert!(OPS.linear(&tensor(2, 5, 1), layer).is_err());
    let narrower = tensor(4, 3, 4);
    let grad = tensor(2, 4, 5);
    let layers = [(&grad, &weight), (&grad, &narrower)];
    assert!(OPS.linear_backward_input(&layers).is_err());
}

#[test]
fn layers_taken_together_give_what_each_gives_alone() {
    let x = view(9, 13, 1);
    let (first, second, bias) = (tensor(7, 13, 2), view(5, 13, 3), tensor(1, 5, 4));
    let layers = [
        plain(&first),
        Linear {
            weight: &second,
            bias: Some(&bias),
        },
    ];
    let together = OPS.linear_many(&x, &layers).unwrap();
    assert_eq!(together.len(), 2);
    for (layer, output) in layers.into_iter().zip(&together) {
        assert_eq!(values(output), values(&OPS.linear(&x, layer).unwrap()));
    }
}
