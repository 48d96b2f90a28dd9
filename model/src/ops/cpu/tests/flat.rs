//! Tensors laid flat.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;

#[test]
fn tensors_lie_flat_at_their_places_with_zeros_between_and_come_back_as_windows() {
    let (first, second) = (tensor(3, 5, 1), tensor(1, 7, 2));
    let flat = OPS
        .flatten(&[(2, &first), (20, &second)], 4, 8, ElementType::F32)
        .unwrap();
    let mut expected = vec![0.0; 32];
    expected[2..17].copy_from_slice(&values(&first));
    expected[20..27].copy_from_slice(&values(&second));
    assert_eq!(values(&flat), expected);
    assert_eq!(values(&flat.window(2, 3, 5).unwrap()), values(&first));
    assert_eq!(
        values(&flat.window(20, 1, 7).unwrap().window(3, 2, 2).unwrap()),
        values(&second)[3..]
    );
    assert!(flat.window(30, 1, 3).is_err());
    assert!(
        flat.first_columns(3).unwrap().window(0, 1, 3).is_err(),
        "gaps between rows"
    );
}

#[test]
fn tensors_that_overlap_or_do_not_fit_are_refused() {
    let part = tensor(2, 3, 1);
    let flatten =
        |places: [usize; 2]| OPS.flatten(&places.map(|place| (place, &part)), 1, 12, ElementType::F32);
    flatten([0, 6]).unwrap();
    for wrong in [[0, 5], [6, 0], [0, 7], [usize::MAX, 0]] {
        assert!(flatten(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn cleared_tensors_are_zero_and_shared_ones_are_refused() {
    let (mut first, mut second) = (tensor(3, 5, 1), tensor(1, 7, 2));
    OPS.clear(&mut [&mut first, &mut second]).unwrap();
    assert!(
        values(&first)
            .iter()
            .chain(&values(&second))
            .all(|value| *value == 0.0)
    );
    let other = second.clone();
    assert!(OPS.clear(&mut [&mut second]).is_err());
    drop(other);
}
