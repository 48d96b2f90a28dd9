//! What a check leaves in doubt.
//!
//! A check brings the sum B that was predicted of one model to what was measured of it, and every other sum A by the same
//! factor. If the table's errors make A wrong by a and B by b, one coordinate for each source, what is left of them is
//!
//! > a − (A / B) · b
//!
//! and A / B of what the check itself may be off: what a model has in common with the checked one is known, what it has
//! more or less of is in doubt as before (the ratio estimator of survey sampling: Cochran, Sampling Techniques, chapter 6).
//! That is linear in the blocks: each time t loses t / B of b. It holds of the same rows: under another workload or with
//! another number of sequences together, doubts stay as the table has them, and so does that of lines between shapes.

use espalier_arch::Candidate;
use serde::{Deserialize, Serialize};

use super::sampled::{Sampled, Source};
use super::timed::Timed;
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

/// What is taken from the doubt of every time; nothing at first.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// Sequences that run together. At another number the rows are others, whose errors are their own.
    running: usize,
    first: Doubt,
    decode: Doubt,
    turnover: Doubt,
}

impl Doubts {
    /// By what was predicted of the checked model: first tokens, decode steps and turnover.
    pub(super) fn of(checked: &Checked, [first, decode, turnover]: &[Sampled; 3]) -> Self {
        Self {
            running: checked.running,
            first: Doubt::of(first, checked.first_token_error),
            decode: Doubt::of(decode, checked.decode_error),
            turnover: Doubt::of(turnover, checked.turnover_error),
        }
    }

    /// The same times of `running` sequences, with the doubt that is left of them.
    pub(super) fn left_of(&self, mut timed: Timed, running: usize) -> Timed {
        if running != self.running {
            return timed;
        }
        self.first.leave(&mut timed.first);
        self.decode.leave(&mut timed.decode);
        self.turnover.leave(&mut timed.steady);
        self.turnover.leave(&mut timed.joined);
        timed
    }
}

/// Of one sum.
#[derive(Debug, Default)]
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
        // How far a line between shapes is off is another matter for each place on it.
        let alike = predicted.errors.iter();
        let alike = alike.filter(|(source, _)| !matches!(source, Source::Shapes(_)));
        Self {
            shares: alike
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_other_batches_and_of_lines_between_shapes_are_their_own() {
        let time = |value: f64| Sampled {
            value,
            errors: vec![(Source::Rows(0), 0.1 * value), (Source::Shapes(0), 0.2 * value)],
        };
        let checked = Checked {
            candidate: Candidate { variants: Vec::new() },
            workload: Workload {
                prompt_tokens: 1,
                output_tokens: 2,
                concurrency: 64,
            },
            running: 64,
            first_token_error: 0.01,
            decode_error: 0.01,
            turnover_error: 0.01,
        };
        let doubts = Doubts::of(&checked, &[time(4.0), time(4.0), time(4.0)]);
        let timed = Timed {
            decode: time(2.0),
            ..Timed::default()
        };
        assert_eq!(doubts.left_of(timed.clone(), 16).decode, time(2.0));
        let left = doubts.left_of(timed, 64).decode.errors;
        assert_eq!(
            left,
            [
                (Source::Rows(0), 0.0),
                (Source::Shapes(0), 0.4),
                (Source::Check, 0.02)
            ]
        );
    }
}
