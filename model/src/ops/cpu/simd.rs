//! Loops that the compiler turns into vector code, each compiled for AVX-512, AVX2 and the baseline and
//! chosen when called. Here live slices and scalars only: no tensors, no threads, no shapes.

/// Vector units that this process may use.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg(target_arch = "x86_64")]
pub(super) enum Level {
    Avx512,
    Avx2,
    Baseline,
}

/// What the processor has; the standard library remembers the answer.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn level() -> Level {
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
    {
        Level::Avx512
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        Level::Avx2
    } else {
        Level::Baseline
    }
}

/// Defines a function whose body is compiled three times; within it `FMA` says whether a fused
/// multiply-add is one instruction.
macro_rules! vectorised {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)] // kernels take slices and scalars, nothing to group
        $vis fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
            fn portable<const FMA: bool>($($argument: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($argument: $type),*) $(-> $result)? {
                    portable::<true>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    portable::<true>($($argument),*)
                }
                match $crate::ops::cpu::simd::level() {
                    // SAFETY: the processor has been asked for every feature that the function enables.
                    $crate::ops::cpu::simd::Level::Avx512 => return unsafe { avx512($($argument),*) },
                    // SAFETY: as above.
                    $crate::ops::cpu::simd::Level::Avx2 => return unsafe { avx2($($argument),*) },
                    $crate::ops::cpu::simd::Level::Baseline => {}
                }
            }
            portable::<false>($($argument),*)
        }
    )*};
}
pub(super) use vectorised;

/// Independent partial sums of a reduction: four AVX-512 registers.
const LANES: usize = 64;

/// `a * b + c`, fused where that is one instruction.
#[inline(always)]
pub(super) fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `e^x` within 2e-7 relative for −87.3 ≤ x ≤ 88.3, clamped outside: `2^n · e^r` with a minimax polynomial
/// (Cephes' coefficients) in `|r| ≤ ln 2 / 2`. NaN stays NaN.
#[inline(always)]
pub(super) fn exponential<const FMA: bool>(x: f32) -> f32 {
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.376_26;
    // 1.5 · 2^23: adding it leaves the nearest integer in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = multiply_add::<FMA>(x, std::f32::consts::LOG2_E, ROUNDER);
    let whole = shifted - ROUNDER;
    let rest = multiply_add::<FMA>(-whole, LN_2_LOW, multiply_add::<FMA>(-whole, LN_2_HIGH, x));
    let mut polynomial = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        polynomial = multiply_add::<FMA>(polynomial, rest, coefficient);
    }
    let power = multiply_add::<FMA>(polynomial, rest * rest, rest + 1.0);
    // n goes into the exponent field; the rounder's own bits are shifted out of it.
    f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// The lanes of a reduction, added pairwise.
#[inline(always)]
fn fold_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `Σ a b` over the shorter of the two.
#[inline(always)]
fn inner_product<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let len = a.len().min(b.len());
    let (a_chunks, a_rest) = a[..len].as_chunks::<LANES>();
    let (b_chunks, b_rest) = b[..len].as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] = multiply_add::<FMA>(a[lane], b[lane], lanes[lane]);
        }
    }
    let mut rest = 0.0;
    for (a, b) in a_rest.iter().zip(b_rest) {
        rest = multiply_add::<FMA>(*a, *b, rest);
    }
    fold_lanes(lanes) + rest
}

/// Elements after which a reduction's f32 lanes are added into f64.
const SPAN: usize = 4096;

vectorised! {
    /// `Σ a b` over the shorter of the two.
    pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
        inner_product::<FMA>(a, b)
    }

    /// `out[i] += x · row i`, rows `leading` apart.
    pub(super) fn add_dots(out: &mut [f32], x: &[f32], rows: &[f32], leading: usize) {
        for (out, row) in out.iter_mut().zip(rows.chunks(leading.max(1))) {
            *out += inner_product::<FMA>(x, row);
        }
    }

    /// `Σ x²` in f64 across spans of 4,096.
    pub(super) fn sum_of_squares(x: &[f32]) -> f64 {
        let mut total = 0.0f64;
        for span in x.chunks(SPAN) {
            let mut lanes = [0.0f32; LANES];
            let (chunks, rest) = span.as_chunks::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    lanes[lane] = multiply_add::<FMA>(chunk[lane], chunk[lane], lanes[lane]);
                }
            }
            total += f64::from(fold_lanes(lanes));
            for value in rest {
                total += f64::from(*value) * f64::from(*value);
            }
        }
        total
    }

    /// The largest element; −∞ of nothing. NaN is passed over.
    pub(super) fn maximum(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
            }
        }
        let mut largest = f32::NEG_INFINITY;
        for value in lanes.iter().chain(rest) {
            largest = if *value > largest { *value } else { largest };
        }
        largest
    }

    /// `x = e^(x − shift)`; gives the sum, in f64 across spans.
    pub(super) fn exponentials(x: &mut [f32], shift: f32) -> f64 {
        let mut total = 0.0f64;
        for span in x.chunks_mut(SPAN) {
            let mut lanes = [0.0f32; LANES];
            let (chunks, rest) = span.as_chunks_mut::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    let value = exponential::<FMA>(chunk[lane] - shift);
                    chunk[lane] = value;
                    lanes[lane] += value;
                }
            }
            total += f64::from(fold_lanes(lanes));
            for value in rest {
                *value = exponential::<FMA>(*value - shift);
                total += f64::from(*value);
            }
        }
        total
    }

    /// `Σ e^(x − shift)`, in f64 across spans.
    pub(super) fn sum_of_exponentials(x: &[f32], shift: f32) -> f64 {
        let mut total = 0.0f64;
        for span in x.chunks(SPAN) {
            let mut lanes = [0.0f32; LANES];
            let (chunks, rest) = span.as_chunks::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    lanes[lane] += exponential::<FMA>(chunk[lane] - shift);
                }
            }
            total += f64::from(fold_lanes(lanes));
            for value in rest {
                total += f64::from(exponential::<FMA>(*value - shift));
            }
        }
        total
    }

    /// `y += x`.
    pub(super) fn add_to(y: &mut [f32], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }

    /// `out = a + b`.
    pub(super) fn sum_into(out: &mut [f32], a: &[f32], b: &[f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a + b;
        }
    }

    /// `y += factor · x`.
    pub(super) fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = multiply_add::<FMA>(factor, *x, *y);
        }
    }

    /// `x *= factor`.
    pub(super) fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    /// `out = factor · x`.
    pub(super) fn scale_into(out: &mut [f32], factor: f32, x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = factor * x;
        }
    }
}
