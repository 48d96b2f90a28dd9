//! What can be reached of each limit where no candidate is inside all.

use serde::{Deserialize, Serialize};

use super::Library;
use super::sums::Sum;
use crate::AbsoluteLimit;

/// The most that can be reached of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reachable {
    /// The limit that was asked for.
    pub limit: AbsoluteLimit,
    /// The best value that a candidate was found to have of this metric alone, at the confidence asked for. Without a
    /// confidence no candidate that has a price has a better one.
    pub alone: f64,
    /// The value of the candidate that comes nearest to all limits together, at the confidence asked for.
    pub together: f64,
}

impl Reachable {
    /// The best that can be reached, in words: alone, and where there are other limits beside them.
    pub fn best(&self, has_others: bool) -> String {
        let display = |value| self.limit.metric.display(value);
        let alone = format!("the best that can be reached is {}", display(self.alone));
        if has_others {
            format!("{alone} ({} with the other limits)", display(self.together))
        } else {
            alone
        }
    }

    /// Each limit with the best that can be reached, in words.
    pub fn describe(all: &[Self]) -> String {
        let each = all.iter().map(|reach| {
            let metric = reach.limit.metric;
            let bound = if metric.more_is_better() {
                "at least"
            } else {
                "at most"
            };
            format!(
                "{metric} {bound} {}; {}",
                metric.display(reach.limit.value),
                reach.best(all.len() > 1)
            )
        });
        each.collect::<Vec<_>>().join(", and ")
    }
}

/// Why there is no candidate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Impossible {
    /// Each limit with what can be reached.
    pub limits: Vec<Reachable>,
    /// Whether it is proven; if not, none was found.
    pub proven: bool,
    /// Whether the engine needs attention, and without it more could be reached.
    pub attention: bool,
    /// What was not looked at for want of measurements.
    pub unmeasured: Option<String>,
}

impl Impossible {
    /// Of limits that cannot be met whatever is measured.
    pub fn of(limits: Vec<Reachable>) -> Self {
        Self {
            limits,
            proven: true,
            attention: false,
            unmeasured: None,
        }
    }

    /// What should be known beside the limits.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.proven {
            notes.push("it is not proven that there is none".to_owned());
        }
        if self.attention {
            notes.push(super::ATTENTION.to_owned());
        }
        notes.extend(self.unmeasured.clone());
        notes
    }

    /// What can be reached in either of two problems that differ in how many sequences run together.
    pub(super) fn or(self, other: Self) -> Self {
        let farthest = |impossible: &Self| {
            let uses = impossible
                .limits
                .iter()
                .map(|reach| reach.limit.use_of(reach.together));
            uses.fold(0.0, f64::max)
        };
        let other_is_nearer = farthest(&other) < farthest(&self);
        let pairs = self.limits.iter().zip(&other.limits);
        let limits = pairs.map(|(one, other)| Reachable {
            limit: one.limit,
            alone: if one.limit.use_of(other.alone) < one.limit.use_of(one.alone) {
                other.alone
            } else {
                one.alone
            },
            together: if other_is_nearer {
                other.together
            } else {
                one.together
            },
        });
        Self {
            limits: limits.collect(),
            proven: self.proven && other.proven,
            attention: self.attention || other.attention,
            unmeasured: self.unmeasured.or(other.unmeasured),
        }
    }
}

/// How often every block is looked at for a variant that lowers a sum.
const MOST_PASSES: usize = 8;

impl Library<'_> {
    /// What can be reached of each limit; `closest` is the choice that comes nearest to all.
    pub(super) fn reachable(&self, limits: &[AbsoluteLimit], closest: &[usize]) -> Vec<Reachable> {
        let each = limits.iter().map(|limit| {
            let sums = self.sums(&[*limit], 0.0);
            Reachable {
                limit: *limit,
                alone: self.model.figure(limit.metric, worst(&sums, &self.lowest(&sums))),
                together: self.model.figure(limit.metric, worst(&sums, closest)),
            }
        });
        each.collect()
    }

    /// A choice with attention where the engine needs it: `choice`, or with the one block put back that counts least.
    pub(super) fn with_attention(&self, choice: Vec<usize>, weigh: impl Fn(&[usize]) -> f64) -> Vec<usize> {
        if !self.lacks_attention(&choice) {
            return choice;
        }
        let kept = self.variants.iter().enumerate().flat_map(|(block, variants)| {
            let kept = (0..variants.len()).filter(move |&variant| self.keeps_attention(block, variant));
            kept.map(move |variant| (block, variant))
        });
        let each = kept.map(|(block, variant)| exchanged(&choice, block, variant));
        let lightest = each.min_by(|one, other| weigh(one).total_cmp(&weigh(other)));
        lightest.unwrap_or(choice)
    }

    /// A choice of which the largest of some sums is low: least where that is one sum without errors, and otherwise as low
    /// as exchanging one variant after another makes it.
    pub(super) fn lowest(&self, sums: &[Sum]) -> Vec<usize> {
        let each = self.variants.iter().enumerate().map(|(block, variants)| {
            let weigh = |variant: &usize| sums.iter().map(|sum| sum.alone(block, *variant)).sum::<f64>();
            (0..variants.len())
                .min_by(|one, other| weigh(one).total_cmp(&weigh(other)))
                .unwrap_or(0)
        });
        let mut choice = self.with_attention(each.collect(), |choice| worst(sums, choice));
        if let [sum] = sums
            && !sum.is_doubted()
        {
            return choice;
        }
        let mut least = worst(sums, &choice);
        for _ in 0..MOST_PASSES {
            let before = least;
            for (block, variants) in self.variants.iter().enumerate() {
                for variant in 0..variants.len() {
                    let other = exchanged(&choice, block, variant);
                    let value = worst(sums, &other);
                    if value < least && !self.lacks_attention(&other) {
                        (choice, least) = (other, value);
                    }
                }
            }
            if least >= before {
                break;
            }
        }
        choice
    }
}

/// The largest of the sums at confidence: a limit holds where all of its sums do.
fn worst(sums: &[Sum], choice: &[usize]) -> f64 {
    sums.iter().map(|sum| sum.worth(choice)).fold(0.0, f64::max)
}

fn exchanged(choice: &[usize], block: usize, variant: usize) -> Vec<usize> {
    let mut other = choice.to_vec();
    if let Some(place) = other.get_mut(block) {
        *place = variant;
    }
    other
}
