//! Random weights made where they are used: one tile of numbers goes to the device, and tensors are laid out of
//! stretches of it. A tensor's weights follow from its name alone, so every split of a model has the same.

use std::ops::Range;

use espalier_arch::{Architecture, TensorSpec};
use espalier_model::ops::Operations;
use espalier_model::{ElementType, Result, StageWeights, Tensor};

/// Numbers of the tile, and the longest stretch of it.
const TILE: usize = 1 << 22;
const STRETCH: usize = 1 << 20;
/// Where stretches may begin.
const ALIGNMENT: usize = 64;

fn mixed(state: u64) -> u64 {
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A stage of a model of this shape: matrices uniform with standard deviation `deviation`, ones for norms, zeros
/// for biases.
pub(crate) fn random(
    operations: &dyn Operations,
    architecture: &Architecture,
    range: Range<usize>,
    seed: u64,
    deviation: f32,
) -> Result<StageWeights> {
    let reach = deviation * 3.0_f32.sqrt();
    let tile: Vec<f32> = (0..TILE as u64)
        .map(|index| {
            let unit = (mixed(seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15))) >> 40) as f32;
            reach * unit.mul_add(2.0 / 16_777_216.0, -1.0)
        })
        .collect();
    let tile = operations.upload(&tile, 1, TILE)?;
    StageWeights::build(architecture, range, |spec| match spec.shape.as_slice() {
        [columns] => {
            let value = if spec.name.ends_with("norm.weight") {
                1.0
            } else {
                0.0
            };
            operations.upload(&vec![value; *columns], 1, *columns)
        }
        _ => matrix(operations, &tile, spec, seed),
    })
}

fn matrix(operations: &dyn Operations, tile: &Tensor, spec: &TensorSpec, seed: u64) -> Result<Tensor> {
    let columns = spec.shape.last().copied().unwrap_or(1);
    let rows = spec.shape.iter().rev().skip(1).product::<usize>();
    let mut state = spec
        .name
        .bytes()
        .fold(seed, |state, byte| mixed(state ^ u64::from(byte)).wrapping_add(1));
    let places = (TILE - STRETCH) / ALIGNMENT;
    let mut stretches = Vec::new();
    for start in (0..rows * columns).step_by(STRETCH) {
        state = mixed(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        let from = state as usize % places * ALIGNMENT;
        stretches.push((start, tile.window(from, 1, STRETCH.min(rows * columns - start))?));
    }
    let parts: Vec<(usize, &Tensor)> = stretches.iter().map(|(start, part)| (*start, part)).collect();
    let element_type: ElementType = operations.activation_type();
    operations.flatten(&parts, rows, columns, element_type)
}
