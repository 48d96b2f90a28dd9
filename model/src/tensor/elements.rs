//! Elements in the host's memory, on their way from a file to a device.
//!
//! What a device holds in fewer bits is rounded here and nowhere else, so that a weight has the same bits whichever way it
//! came.

use rayon::prelude::*;

use super::ElementType;

/// Elements that a thread rounds at the least: fewer are not worth handing over.
const LEAST_ROUNDED: usize = 1 << 16;

/// Elements in the host's memory, row by row, in a type that tensors are made of.
#[derive(Debug, Clone, PartialEq)]
pub enum Elements {
    /// In IEEE single precision.
    F32(Vec<f32>),
    /// The bits of each in bf16.
    Bf16(Vec<u16>),
}

impl Elements {
    /// Values in this type: rounded to the nearest, ties to even.
    pub fn rounded(values: Vec<f32>, element_type: ElementType) -> Self {
        match element_type {
            ElementType::F32 => Self::F32(values),
            ElementType::Bf16 => Self::Bf16(to_bf16(&values)),
        }
    }

    /// What one element is.
    pub fn element_type(&self) -> ElementType {
        match self {
            Self::F32(_) => ElementType::F32,
            Self::Bf16(_) => ElementType::Bf16,
        }
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(values) => size_of_val(values.as_slice()),
            Self::Bf16(bits) => size_of_val(bits.as_slice()),
        }
    }
}

/// The bits of each value in bf16.
pub(crate) fn to_bf16(values: &[f32]) -> Vec<u16> {
    let values = values.par_iter().with_min_len(LEAST_ROUNDED);
    values.map(|value| bf16_bits(*value)).collect()
}

/// The bits of a value in bf16, rounded to the nearest, ties to even.
pub(crate) fn bf16_bits(value: f32) -> u16 {
    half::bf16::from_f32(value).to_bits()
}
