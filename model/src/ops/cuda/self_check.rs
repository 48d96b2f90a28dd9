//! Whether a variant of attention that was compiled just now computes what the plain one does.

use super::attention::{AttentionGradients, AttentionInputs, AttentionShape, Choice, Forward};
use super::device::CudaDevice;
use super::error::{Error, Result};
use super::kernel::Candidate;
use super::matrix::{Element, Matrix};

/// (sequences, tokens, query heads, KV heads, window): tiles cut off at the end, a group, a window.
const SHAPES: [(usize, usize, usize, usize, usize); 2] = [(2, 193, 4, 2, 0), (1, 333, 2, 1, 50)];
/// The relative difference that is still rounding. Both variants are within 0.005 of exact ones; a fragment that
/// was overwritten gave 0.6.
const BOUND: f64 = 0.02;

/// `wanted`, each of its kernels replaced by `plain`'s where it was compiled just now and gives something else.
/// What is in the cache passed before.
pub(super) fn sound_of(
    device: &CudaDevice,
    head_dim: usize,
    wanted: Choice,
    plain: Choice,
) -> Result<Choice> {
    let mut chosen = wanted;
    let forward = wanted.forward.forward_kernel(head_dim);
    let query = wanted.query.query_kernel(head_dim);
    let key = wanted.key.key_kernel(head_dim);
    let kernels = [forward, query, key];
    if kernels
        .iter()
        .all(|kernel| device.kernels.known(kernel).is_some())
    {
        return Ok(chosen);
    }
    // Each takes about a second to compile.
    let [forward_module, query_module, key_module] = std::thread::scope(|scope| {
        let compiled = kernels.map(|kernel| scope.spawn(move || device.kernels.candidate(kernel)));
        compiled.map(|thread| thread.join().unwrap_or(Err(Error::Lost)))
    });
    let candidates = [forward_module?, query_module?, key_module?];
    let mut sound = [true; 3];
    if candidates.iter().any(Candidate::is_fresh) {
        for shape in SHAPES {
            let differences = compare(device, head_dim, shape, wanted, plain, &candidates)?;
            for (sound, difference) in sound.iter_mut().zip(differences) {
                // Not a number is not sound either.
                *sound &= difference <= BOUND;
            }
        }
    }
    let places = [
        (&mut chosen.forward, plain.forward),
        (&mut chosen.query, plain.query),
        (&mut chosen.key, plain.key),
    ];
    for (((kernel, candidate), sound), (place, replacement)) in
        kernels.into_iter().zip(candidates).zip(sound).zip(places)
    {
        if sound {
            device.kernels.accept(kernel, candidate);
        } else {
            tracing::warn!(%kernel, "the compiler gets this kernel wrong: the plain, slower one runs in its place");
            *place = replacement;
        }
    }
    Ok(chosen)
}

/// Relative differences of the forward, of the gradient to q, and of those to k and v.
fn compare(
    device: &CudaDevice,
    head_dim: usize,
    (sequences, tokens, query_heads, kv_heads, window): (usize, usize, usize, usize, usize),
    wanted: Choice,
    plain: Choice,
    candidates: &[Candidate; 3],
) -> Result<[f64; 3]> {
    let shape = AttentionShape {
        head_dim,
        sequences,
        window,
    };
    let (rows, q_width, kv_width) = (sequences * tokens, query_heads * head_dim, kv_heads * head_dim);
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let mut random = |columns: usize| device.upload_bf16(&noise.take(rows * columns), rows, columns);
    let (q, k, v, grad_output) = (
        random(q_width)?,
        random(kv_width)?,
        random(kv_width)?,
        random(q_width)?,
    );
    let [forward, query, key] = candidates;
    let run = |choice: Choice, hopper: bool| -> Result<[Matrix; 4]> {
        let bf16 = |columns| device.zeros(Element::Bf16, rows, columns);
        let (output, log_sums) = (bf16(q_width)?, device.zeros(Element::F32, query_heads, rows)?);
        let module = |candidate: &Candidate, kernel| {
            if hopper {
                Ok(candidate.module.clone())
            } else {
                device.kernels.get(kernel)
            }
        };
        let operands = Forward {
            q: &q,
            k: &k,
            v: &v,
            output: &output,
            log_sums: &log_sums,
        };
        let forward = module(forward, choice.forward.forward_kernel(head_dim))?;
        device.run_attention(operands, shape, None, choice.forward, &forward)?;
        let gradients = [bf16(q_width)?, bf16(kv_width)?, bf16(kv_width)?];
        // The backward's inputs are the plain forward's in both runs only if both forwards agree; where they do
        // not, all three are dropped, which is as well.
        let inputs = AttentionInputs {
            q: &q,
            k: &k,
            v: &v,
            output: &output,
            log_sums: &log_sums,
            grad_output: &grad_output,
        };
        let modules = [
            module(query, choice.query.query_kernel(head_dim))?,
            module(key, choice.key.key_kernel(head_dim))?,
        ];
        let [grad_q, grad_k, grad_v] = &gradients;
        let into = AttentionGradients {
            q: grad_q,
            k: grad_k,
            v: grad_v,
        };
        device.run_attention_backward(inputs, into, shape, choice, &modules)?;
        let [grad_q, grad_k, grad_v] = gradients;
        Ok([output, grad_q, grad_k, grad_v])
    };
    let (theirs, ours) = (run(plain, false)?, run(wanted, true)?);
    let mut found = [0.0; 4];
    for ((difference, ours), theirs) in found.iter_mut().zip(&ours).zip(&theirs) {
        *difference = relative(&device.download(ours)?, &device.download(theirs)?);
    }
    let [output, grad_q, grad_k, grad_v] = found;
    // f64::max would drop what is not a number.
    let keys = if grad_k.is_nan() { grad_k } else { grad_k + grad_v };
    Ok([output, grad_q, keys])
}

/// ‖ours − theirs‖ / ‖theirs‖.
fn relative(ours: &[f32], theirs: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let apart: f64 = ours
        .iter()
        .zip(theirs)
        .map(|(&a, &b)| square(f64::from(a) - f64::from(b)))
        .sum();
    let whole: f64 = theirs.iter().map(|&b| square(f64::from(b))).sum();
    (apart / whole).sqrt()
}

/// Numbers of a bell-like spread, the same in every process.
struct Noise(u64);

impl Noise {
    fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| (0..4).map(|_| self.next()).sum::<f32>())
            .collect()
    }

    /// In −1 .. 1 (xorshift, Marsaglia 2003).
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_difference_is_measured_and_what_is_not_a_number_never_passes() {
        assert!((relative(&[3.0, 4.1], &[3.0, 4.0]) - 0.02).abs() < 1e-6);
        assert!(relative(&[f32::NAN, 4.0], &[3.0, 4.0]).is_nan());
    }

    #[test]
    fn noise_is_spread_around_zero() {
        let numbers = Noise(1).take(10_000);
        let mean = numbers.iter().sum::<f32>() / 10_000.0;
        let variance = numbers.iter().map(|x| x * x).sum::<f32>() / 10_000.0;
        assert!(
            mean.abs() < 0.05 && (variance - 4.0 / 3.0).abs() < 0.1,
            "{mean} {variance}"
        );
    }
}
