//! AdamW against float64.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::ops::{AdamWParameter, AdamWStep};

#[test]
fn three_steps_of_adamw_match_float64_and_leave_gradients_at_zero() {
    let mut tensors = [
        tensor(3, 41, 1),
        tensor(3, 41, 9),
        OPS.zeros(3, 41).unwrap(),
        OPS.zeros(3, 41).unwrap(),
    ];
    let mut value = values(&tensors[0]);
    let (mut first, mut second) = (vec![0.0f64; 123], vec![0.0f64; 123]);
    for count in 1..=3u32 {
        let step = AdamWStep {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            step: count,
            gradient_scale: 0.5,
        };
        let fresh = tensor(3, 41, 10 + u64::from(count));
        tensors[1] = OPS.contiguous(&fresh).unwrap();
        for (index, gradient) in values(&fresh).iter().map(|gradient| gradient * 0.5).enumerate() {
            first[index] = 0.9 * first[index] + 0.1 * gradient;
            second[index] = 0.95 * second[index] + 0.05 * gradient * gradient;
            let mean = first[index] / (1.0 - 0.9f64.powf(f64::from(count)));
            let variance = second[index] / (1.0 - 0.95f64.powf(f64::from(count)));
            value[index] -= 0.01 * (0.1 * value[index] + mean / (variance.sqrt() + 1e-8));
        }
        let [value, gradient, first_moment, second_moment] = &mut tensors;
        let mut parameters = [AdamWParameter {
            value,
            gradient,
            first_moment,
            second_moment,
        }];
        OPS.adamw(&mut parameters, step).unwrap();
        assert!(values(&tensors[1]).iter().all(|gradient| *gradient == 0.0));
    }
    assert_close("value", &values(&tensors[0]), &value, 1e-6);
    assert_close("first moment", &values(&tensors[2]), &first, 1e-6);
    assert_close("second moment", &values(&tensors[3]), &second, 1e-6);
}

#[test]
fn a_shared_parameter_is_refused_before_anything_is_written() {
    let mut value = tensor(2, 2, 1);
    let other = value.clone();
    let (mut gradient, mut first_moment, mut second_moment) = (
        tensor(2, 2, 2),
        OPS.zeros(2, 2).unwrap(),
        OPS.zeros(2, 2).unwrap(),
    );
    let step = AdamWStep {
        learning_rate: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.0,
        step: 1,
        gradient_scale: 1.0,
    };
    let before = values(&gradient);
    let mut parameters = [AdamWParameter {
        value: &mut value,
        gradient: &mut gradient,
        first_moment: &mut first_moment,
        second_moment: &mut second_moment,
    }];
    assert!(OPS.adamw(&mut parameters, step).is_err());
    assert_eq!(values(&gradient), before);
    drop(other);
}
