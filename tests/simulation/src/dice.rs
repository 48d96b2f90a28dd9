//! Seeded chance. Each part of the world rolls dice of its own, so that a change in one moves no other.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A source of chance.
#[derive(Debug, Clone)]
pub struct Dice(ChaCha8Rng);

impl Dice {
    /// The dice of one part of the world, by the run's seed and the part's name.
    pub fn new(seed: u64, part: &str) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // FNV-1a of the name: any function of it will do, as long as it stays what it is.
        let stream = part.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        rng.set_stream(stream);
        Self(rng)
    }

    /// Whether something happens that does so with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.0.random_bool(probability.clamp(0.0, 1.0))
    }

    /// One of `0..end`; 0 where that is empty.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { self.0.random_range(0..end) }
    }

    /// One of `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0.random_range(low..=high.max(low))
    }

    /// A time between two.
    pub fn duration(&mut self, low: Duration, high: Duration) -> Duration {
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.between(micros(low), micros(high)))
    }

    /// A time between two, short ones as likely as long ones: uniform in its logarithm.
    pub fn scale(&mut self, low: Duration, high: Duration) -> Duration {
        let (low, high) = (
            low.as_secs_f64().max(1e-6).ln(),
            high.as_secs_f64().max(1e-6).ln(),
        );
        let exponent = low + (high - low) * self.0.random::<f64>();
        Duration::try_from_secs_f64(exponent.exp()).unwrap_or_default()
    }

    /// Something from 0 to 1.
    pub fn share(&mut self) -> f64 {
        self.0.random()
    }

    /// One of these; none where there is none.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_roll_apart_and_the_same_each_time() {
        let roll = |part| Dice::new(7, part).between(0, u64::MAX);
        assert_eq!(roll("disk"), roll("disk"));
        assert_ne!(roll("disk"), roll("network"));
    }
}
