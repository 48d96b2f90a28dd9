//! Times that were taken while others used the processors: taken again, so often for each thing that is timed, after a
//! pause that doubles while the others stay; and counted, so that whoever asked is told where the machine was too noisy.

use std::time::Duration;

use espalier_search::Point;

use super::options::Pause;
use crate::{Error, Result};

/// The share of the processors that others may use while something is timed: where the processors compute, and where
/// they only tell a GPU what to do, which takes one or two of many.
const MOST_BUSY: f64 = 0.2;
const MOST_BUSY_HOST: f64 = 0.5;
/// The longest pause, in first ones.
const LONGEST: u32 = 32;
/// How often something is timed again: with the pauses, for minutes.
const MOST_AGAIN: usize = 8;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum What {
    /// Steps at a point, of whichever model.
    Steps(Point),
    /// The workload, served.
    Workload,
}

/// What is to be done with a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judged {
    /// It was undisturbed.
    Undisturbed,
    /// After this pause it is taken again.
    Again(Duration),
    /// It was disturbed, and enough was waited for others.
    Disturbed,
}

/// How often what is timed was disturbed.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    times: usize,
    disturbed: usize,
    again: usize,
    /// The largest share that others used.
    worst: f64,
}

/// What is known of others.
#[derive(Debug)]
pub(super) struct Contention {
    most_busy: f64,
    first: Duration,
    pause: Duration,
    tallies: Vec<(What, Tally)>,
}

impl Contention {
    /// Nothing yet, on a platform.
    pub fn new(Pause(first): Pause, platform: &str) -> Self {
        Self {
            most_busy: if platform == "cpu" {
                MOST_BUSY
            } else {
                MOST_BUSY_HOST
            },
            first,
            pause: first,
            tallies: Vec::new(),
        }
    }

    /// Whether others used no more of the processors than does not matter.
    pub fn is_quiet(&self, busy: Option<f64>) -> bool {
        busy.is_none_or(|busy| busy <= self.most_busy)
    }

    /// Takes in a time during which others used so much of the processors, as far as that is known.
    pub fn judge(&mut self, what: What, busy: Option<f64>) -> Judged {
        let place = self.tallies.iter().position(|(known, _)| *known == what);
        let place = place.unwrap_or_else(|| {
            self.tallies.push((what, Tally::default()));
            self.tallies.len() - 1
        });
        let Some((_, tally)) = self.tallies.get_mut(place) else {
            return Judged::Undisturbed;
        };
        tally.times += 1;
        let Some(busy) = busy.filter(|busy| *busy > self.most_busy) else {
            self.pause = self.first;
            return Judged::Undisturbed;
        };
        tally.disturbed += 1;
        tally.worst = tally.worst.max(busy);
        if tally.again == MOST_AGAIN {
            return Judged::Disturbed;
        }
        tally.again += 1;
        let pause = self.pause;
        self.pause = pause.saturating_mul(2).min(self.first.saturating_mul(LONGEST));
        Judged::Again(pause)
    }

    /// Whether others let this be timed.
    ///
    /// # Errors
    /// [`Error::TooNoisy`] where most of its times were disturbed, though they were waited for.
    pub fn expect_quiet(&self, what: What) -> Result<()> {
        let tally = self.tally(what);
        if tally.again < MOST_AGAIN || 2 * tally.disturbed <= tally.times {
            return Ok(());
        }
        Err(self.too_noisy(what))
    }

    /// That others left too few undisturbed times of this to go by.
    pub fn too_noisy(&self, what: What) -> Error {
        let tally = self.tally(what);
        let what = match what {
            What::Steps(point) => point.to_string(),
            What::Workload => "the workload".to_owned(),
        };
        Error::TooNoisy {
            evidence: format!(
                "{} of {} times of {what} were taken while others used more than {:.0}% of the processors, up to \
                 {:.0}%, though {} pauses were made for them; end what else runs on this machine, or give the worker \
                 processors of its own",
                tally.disturbed,
                tally.times,
                100.0 * self.most_busy,
                100.0 * tally.worst,
                tally.again,
            ),
        }
    }

    fn tally(&self, what: What) -> Tally {
        let found = self.tallies.iter().find(|(known, _)| *known == what);
        found.map_or_else(Tally::default, |(_, tally)| *tally)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const BUSY: Option<f64> = Some(0.6);
    const DECODE: What = What::Steps(Point::Decode {
        context: 8,
        sequences: 1,
    });

    fn seconds(judged: Judged) -> u64 {
        match judged {
            Judged::Again(pause) => pause.as_secs(),
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn the_pause_doubles_while_others_stay_and_begins_anew_once_they_have_left() {
        let mut contention = Contention::new(Pause::default(), "cpu");
        let pauses: Vec<u64> = (0..7).map(|_| seconds(contention.judge(DECODE, BUSY))).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 32]);
        assert_eq!(contention.judge(DECODE, Some(0.2)), Judged::Undisturbed);
        assert_eq!(seconds(contention.judge(DECODE, BUSY)), 1);
        assert_eq!(contention.judge(DECODE, None), Judged::Undisturbed);
    }

    #[test]
    fn one_point_does_not_use_up_the_patience_of_another() {
        let mut contention = Contention::new(Pause::default(), "cpu");
        for _ in 0..MOST_AGAIN {
            assert!(matches!(contention.judge(DECODE, BUSY), Judged::Again(_)));
        }
        assert_eq!(contention.judge(DECODE, BUSY), Judged::Disturbed);
        assert!(matches!(contention.judge(What::Workload, BUSY), Judged::Again(_)));
    }

    #[test]
    fn most_times_disturbed_is_too_noisy_and_half_of_them_is_not() {
        let mut contention = Contention::new(Pause::default(), "cpu");
        contention.expect_quiet(DECODE).unwrap();
        for _ in 0..=MOST_AGAIN {
            contention.judge(DECODE, BUSY);
        }
        let told = contention.expect_quiet(DECODE).unwrap_err().to_string();
        for part in [
            "9 of 9 times of decode of 1 sequences at context 8",
            "up to 60%",
            "8 pauses",
        ] {
            assert!(told.contains(part), "{told}");
        }
        contention.expect_quiet(What::Workload).unwrap();
        for _ in 0..=MOST_AGAIN {
            contention.judge(DECODE, None);
        }
        contention.expect_quiet(DECODE).unwrap();
    }
}
