//! What a check tells, and what it leaves in doubt.
//!
//! A check brings the sum B that was predicted of one model to what was measured of it, and every other sum A by the same
//! factor. If the table's errors make A wrong by a and B by b, one coordinate for each source, what is left of them is
//!
//! > a − (A / B) · b
//!
//! and A / B of what the check itself may be off: what a model has in common with the checked one is known, what it has
//! more or less of is in doubt as before (the ratio estimator of survey sampling: Cochran, Sampling Techniques, chapter 6).
//! That is linear in the blocks: each time t loses t / B of b.
//!
//! By the clock a step is the longer of the device's side and the host's. The check tells of the longer one, and of the
//! other only that it was no longer.

use espalier_arch::Candidate;
use serde::{Deserialize, Serialize};

use super::corrections::Corrections;
use super::sampled::{Sampled, Source};
use super::timed::{Side, Timed, both, slower};
use crate::Workload;

/// A model that was measured whole, and how well: standard errors of its times as shares of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checked {
    /// Which.
    pub candidate: Candidate,
    /// Under what it was measured; of others nothing is known.
    pub workload: Workload,
    /// Sequences that ran together.
    pub running: usize,
    /// Of the time to the first token.
    pub first_token_error: f64,
    /// Of its decode steps.
    pub decode_error: f64,
    /// Of [`Costs::turnover_ms`](crate::Costs::turnover_ms).
    pub turnover_error: f64,
}

/// A model's two sides of every step, as the table has them: of which the longer is the clock's.
#[derive(Debug)]
pub(super) struct Sides {
    /// With what the device waits for.
    pub(super) device: Timed,
    pub(super) host: Timed,
}

/// What is made of the table's times; nothing at first.
#[derive(Debug, Default)]
pub(super) struct Lessons {
    device: Lesson,
    host: Lesson,
}

/// Of one side.
#[derive(Debug, Default)]
struct Lesson {
    first: Told,
    decode: Told,
    steady: Told,
    joined: Told,
}

impl Lessons {
    /// By factors alone, both sides alike.
    pub(super) fn of(corrections: &Corrections) -> Self {
        let lesson = || Lesson {
            first: Told::by(corrections.first_token),
            decode: Told::by(corrections.decode),
            steady: Told::by(corrections.turnover),
            joined: Told::by(corrections.turnover),
        };
        Self {
            device: lesson(),
            host: lesson(),
        }
    }

    /// By the check of a model of which the table has these two sides. It tells of those that decided. The others were at
    /// most as long as what was measured.
    pub(super) fn of_check(corrections: &Corrections, checked: &Checked, sides: &Sides) -> Self {
        let (device, host) = (&sides.device, &sides.host);
        let own = |longer: &Sampled, factor, error| Told {
            factor,
            doubt: Doubt::of(longer, error),
        };
        let first = own(
            slower(&device.first, &host.first),
            corrections.first_token,
            checked.first_token_error,
        );
        let decode = own(
            slower(&device.decode, &host.decode),
            corrections.decode,
            checked.decode_error,
        );
        let turnover = both(
            slower(&device.steady, &host.steady),
            slower(&device.joined, &host.joined),
        );
        let turnover = own(&turnover, corrections.turnover, checked.turnover_error);
        let (first_device, first_host) = first.of(&device.first, &host.first);
        let (decode_device, decode_host) = decode.of(&device.decode, &host.decode);
        let (steady_device, steady_host) = turnover.of(&device.steady, &host.steady);
        let (joined_device, joined_host) = turnover.of(&device.joined, &host.joined);
        Self {
            device: Lesson {
                first: first_device,
                decode: decode_device,
                steady: steady_device,
                joined: joined_device,
            },
            host: Lesson {
                first: first_host,
                decode: decode_host,
                steady: steady_host,
                joined: joined_host,
            },
        }
    }

    /// What they make of the table's times.
    pub(super) fn apply(&self, side: Side, timed: &Timed) -> Timed {
        let lesson = match side {
            Side::Device => &self.device,
            Side::Host => &self.host,
        };
        Timed {
            first: lesson.first.apply(&timed.first),
            decode: lesson.decode.apply(&timed.decode),
            steady: lesson.steady.apply(&timed.steady),
            joined: lesson.joined.apply(&timed.joined),
        }
    }
}

/// What is told of one time.
#[derive(Debug, Clone)]
struct Told {
    /// Of the table's.
    factor: f64,
    doubt: Doubt,
}

impl Default for Told {
    fn default() -> Self {
        Self::by(1.0)
    }
}

impl Told {
    fn by(factor: f64) -> Self {
        Self {
            factor,
            doubt: Doubt::default(),
        }
    }

    /// What a check that says this of the longer of two sides says of the device's and of the host's.
    fn of(&self, device: &Sampled, host: &Sampled) -> (Self, Self) {
        let at_most = |side: &Sampled, longer: &Sampled| {
            let measured = self.factor * longer.value;
            Self::by(if side.value > measured {
                measured / side.value
            } else {
                1.0
            })
        };
        if device.value >= host.value {
            (self.clone(), at_most(host, device))
        } else {
            (at_most(device, host), self.clone())
        }
    }

    fn apply(&self, time: &Sampled) -> Sampled {
        let mut told = time.times(self.factor);
        self.doubt.leave(&mut told);
        told
    }
}

/// What is taken from the doubt of a time.
#[derive(Debug, Clone, Default)]
struct Doubt {
    /// Errors of the checked sum, as shares of it.
    shares: Vec<(Source, f64)>,
    /// The check's own.
    own: f64,
}

impl Doubt {
    fn of(predicted: &Sampled, own: f64) -> Self {
        if predicted.value <= 0.0 {
            return Self::default();
        }
        let shares = predicted.errors.iter();
        Self {
            shares: shares
                .map(|(source, error)| (*source, error / predicted.value))
                .collect(),
            own,
        }
    }

    fn leave(&self, time: &mut Sampled) {
        for (source, share) in &self.shares {
            time.add_error(*source, -share * time.value);
        }
        if self.own > 0.0 {
            time.add_error(Source::Check, self.own * time.value);
        }
    }
}
