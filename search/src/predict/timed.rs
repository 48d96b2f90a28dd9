//! The times that every metric is made of.

use super::sampled::Sampled;

/// The times of one subject, or sums of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Timed {
    /// Prefill of every prompt that runs together.
    pub(super) first: Sampled,
    /// All their decode steps.
    pub(super) decode: Sampled,
    /// Of [`super::Costs::turnover_ms`], steps in which those that run only decode.
    pub(super) steady: Sampled,
    /// And steps that a prompt joins.
    pub(super) joined: Sampled,
}

impl Timed {
    pub(super) fn add(&mut self, other: &Self, factor: f64) {
        self.first.add(&other.first, factor);
        self.decode.add(&other.decode, factor);
        self.steady.add(&other.steady, factor);
        self.joined.add(&other.joined, factor);
    }
}

/// What a step costs that a prompt joins while the others decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joining {
    /// The prompt's part and the others'.
    Adds,
    /// The prompt's, whatever the others do.
    Replaces,
    /// What it would cost without.
    IsHidden,
}

/// The longer of what the device and what the host needs.
pub(super) fn slower<'a>(device: &'a Sampled, host: &'a Sampled) -> &'a Sampled {
    if device.value >= host.value { device } else { host }
}

/// The sum of two.
pub(super) fn both(one: &Sampled, other: &Sampled) -> Sampled {
    let mut sum = one.clone();
    sum.add(other, 1.0);
    sum
}
