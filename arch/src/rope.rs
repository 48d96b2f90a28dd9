//! Rotary positions and the ways in which families stretch them.

use serde::{Deserialize, Serialize};

/// Rotary position embedding over a whole head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the wavelengths are stretched for long contexts.
    pub scaling: RopeScaling,
}

/// How RoPE's frequencies differ from `theta^(-2i/d)`, as in transformers' `modeling_rope_utils`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every position divided by `factor`.
    Linear {
        /// The stretch.
        factor: f64,
    },
    /// NTK scaling, recomputed for sequences beyond the original length.
    Dynamic {
        /// The stretch.
        factor: f64,
        /// Positions the model was trained for.
        original_max_positions: usize,
    },
    /// Llama 3.1's piecewise stretch.
    Llama3 {
        /// The stretch of long wavelengths.
        factor: f64,
        /// Wavelengths above original / this are stretched whole.
        low_freq_factor: f64,
        /// Wavelengths below original / this are left alone.
        high_freq_factor: f64,
        /// Positions the model was trained for.
        original_max_positions: usize,
    },
    /// YaRN (2309.00071).
    Yarn {
        /// The stretch.
        factor: f64,
        /// Multiplies cosine and sine.
        attention_factor: f64,
        /// Rotations above which a frequency is left alone.
        beta_fast: f64,
        /// Rotations below which a frequency is stretched whole.
        beta_slow: f64,
        /// Positions the model was trained for.
        original_max_positions: usize,
        /// Whether the correction range is rounded to whole dimensions.
        truncate: bool,
    },
}
