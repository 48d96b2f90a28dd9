//! Rotary positions and the ways in which families stretch them.

use std::f64::consts::TAU;

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

impl Rope {
    /// The angle per position of each pair of a head's dimensions, `head_dim / 2` of them, and the factor that
    /// multiplies cosine and sine, as transformers' `modeling_rope_utils` has them.
    ///
    /// `sequence_tokens` matters only to [`RopeScaling::Dynamic`], beyond the original length.
    pub fn inverse_frequencies(&self, head_dim: usize, sequence_tokens: usize) -> (Vec<f64>, f64) {
        let plain = geometric(self.theta, head_dim);
        match &self.scaling {
            RopeScaling::None => (plain, 1.0),
            RopeScaling::Linear { factor } => (
                plain.into_iter().map(|frequency| frequency / factor).collect(),
                1.0,
            ),
            // Two dimensions have one frequency, 1, whatever the base; the exponent below would be infinite.
            RopeScaling::Dynamic { .. } if head_dim <= 2 => (plain, 1.0),
            RopeScaling::Dynamic {
                factor,
                original_max_positions,
            } => {
                let original = *original_max_positions as f64;
                let tokens = (sequence_tokens as f64).max(original);
                let stretch = factor * tokens / original - (factor - 1.0);
                let dimensions = head_dim as f64;
                let theta = self.theta * stretch.powf(dimensions / (dimensions - 2.0));
                (geometric(theta, head_dim), 1.0)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => {
                let original = *original_max_positions as f64;
                let stretched = |frequency: f64| {
                    // How many whole turns the original context makes, from "long wavelength" to "short".
                    let turns = original * frequency / TAU;
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = kept.clamp(0.0, 1.0);
                    (1.0 - kept) * frequency / factor + kept * frequency
                };
                (plain.into_iter().map(stretched).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_positions,
                truncate,
            } => {
                let range = YarnRange {
                    theta: self.theta,
                    head_dim,
                    original: *original_max_positions as f64,
                };
                let (low, high) = range.bounds(*beta_fast, *beta_slow, *truncate);
                let stretched = |(index, frequency): (usize, f64)| {
                    let interpolated = ((index as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    frequency / factor * interpolated + frequency * (1.0 - interpolated)
                };
                (
                    plain.into_iter().enumerate().map(stretched).collect(),
                    *attention_factor,
                )
            }
        }
    }
}

/// `theta^(-2i/d)` for each pair of dimensions.
fn geometric(theta: f64, head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2)
        .map(|pair| theta.powf(-2.0 * pair as f64 / head_dim as f64))
        .collect()
}

/// Where YaRN goes from leaving frequencies alone to stretching them whole (2309.00071, section 3.2).
struct YarnRange {
    theta: f64,
    head_dim: usize,
    original: f64,
}

impl YarnRange {
    fn bounds(&self, beta_fast: f64, beta_slow: f64, truncate: bool) -> (f64, f64) {
        let (mut low, mut high) = (self.dimension(beta_fast), self.dimension(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(self.head_dim as f64 - 1.0));
        // An empty range would divide by zero.
        if low == high {
            (low, high + 0.001)
        } else {
            (low, high)
        }
    }

    /// The dimension that turns `rotations` times within the original context.
    fn dimension(&self, rotations: f64) -> f64 {
        self.head_dim as f64 * (self.original / (rotations * TAU)).ln() / (2.0 * self.theta.ln())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic)]
    use super::*;

    /// References: the published formulas in numpy (float64), which transformers 5.24 agrees with in float32.
    #[track_caller]
    fn assert_frequencies(theta: f64, scaling: RopeScaling, tokens: usize, expected: &[f64]) {
        let (found, _) = Rope { theta, scaling }.inverse_frequencies(expected.len() * 2, tokens);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found / expected - 1.0).abs() < 1e-12,
                "{found} is not {expected}"
            );
        }
    }

    fn yarn(truncate: bool) -> RopeScaling {
        RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: 1.138_629_436_111_989,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_positions: 2048,
            truncate,
        }
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        assert_frequencies(
            1e4,
            RopeScaling::Linear { factor: 2.5 },
            9,
            &[0.4, 0.04, 0.004, 0.0004],
        );
    }

    #[test]
    fn dynamic_scaling_begins_beyond_the_original_length() {
        let scaling = RopeScaling::Dynamic {
            factor: 2.0,
            original_max_positions: 512,
        };
        assert_frequencies(1e4, scaling.clone(), 512, &[1.0, 0.1, 0.01, 0.001]);
        let long = [
            1.0,
            0.25229990301039,
            0.063655241059052,
            0.0160602111453018,
            0.00405198971428602,
            0.00102231661191346,
            0.000257930382031676,
            6.50758103700245e-05,
        ];
        assert_frequencies(1e4, scaling, 1500, &long);
    }

    #[test]
    fn llama3_scaling_stretches_long_wavelengths_only() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let expected = [
            1.0,
            0.193922744748686,
            0.0376060309308639,
            0.00729266473721711,
            0.000524846160992955,
            3.42810219595259e-05,
            6.64786987118124e-06,
            1.28917317215156e-06,
        ];
        assert_frequencies(5e5, scaling, 4, &expected);
    }

    #[test]
    fn yarn_goes_from_plain_to_stretched_over_its_correction_range() {
        let rounded = [
            1.0,
            0.316227766016838,
            0.1,
            0.0256935059888681,
            0.00625,
            0.00138349647632367,
            0.00025,
            7.90569415042095e-05,
        ];
        assert_frequencies(1e4, yarn(true), 4, &rounded);
        let exact = [
            1.0,
            0.316227766016838,
            0.1,
            0.0238701923217363,
            0.00505697152112944,
            0.000811290381701431,
            0.00025,
            7.90569415042095e-05,
        ];
        assert_frequencies(1e4, yarn(false), 4, &exact);
        let factor = Rope {
            theta: 1e4,
            scaling: yarn(true),
        }
        .inverse_frequencies(16, 4)
        .1;
        assert!((factor - 1.138_629_436_111_989).abs() < 1e-15);
    }
}
