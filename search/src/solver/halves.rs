//! Lists of part-choices: what a half of the groups may contribute, and how to find those that fit.

use std::ops::Range;

use super::reduce::{Reduced, TOLERANCE};

/// Reduced costs are told apart in so many bands of equal width.
const BANDS: usize = 16;

/// One item of some groups instead of the cheapest; every other group keeps its cheapest.
#[derive(Debug, Clone, Copy)]
struct Part {
    /// Sum of the items' reduced costs.
    reduced_cost: f64,
    /// How much more it costs than the cheapest items.
    cost: f64,
    /// The same part-choice without its last exchange: an earlier one. The first has none.
    before: u32,
    /// The last exchange.
    group: u32,
    item: u32,
}

/// The part-choices of some groups.
#[derive(Debug)]
pub(super) struct Half {
    limits: usize,
    parts: Vec<Part>,
    /// `limits` for each part-choice: how much more it uses than the cheapest items.
    uses: Vec<f64>,
}

/// The items of one group that may take the place of its cheapest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exchanges<'a> {
    pub(super) group: u32,
    pub(super) cheapest: u32,
    /// (reduced cost, item) by rising reduced cost.
    pub(super) others: &'a [(f64, u32)],
}

impl Half {
    /// Only the part-choice that exchanges nothing.
    pub(super) fn new(limits: usize) -> Self {
        let nothing = Part {
            reduced_cost: 0.0,
            cost: 0.0,
            before: 0,
            group: 0,
            item: 0,
        };
        Self {
            limits,
            parts: vec![nothing],
            uses: vec![0.0; limits],
        }
    }

    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }

    /// Adds every part-choice with each of a group's exchanges whose reduced costs stay within `room`. False,
    /// and unfinished, when that would be more than `most`.
    pub(super) fn extend(
        &mut self,
        reduced: &Reduced,
        exchanges: Exchanges<'_>,
        room: f64,
        most: usize,
    ) -> bool {
        let own = exchanges.cheapest as usize;
        for before in 0..self.parts.len() {
            let from = self.parts[before];
            for &(extra, item) in exchanges.others {
                let reduced_cost = from.reduced_cost + extra;
                if reduced_cost > room {
                    break;
                }
                if self.parts.len() >= most {
                    return false;
                }
                self.parts.push(Part {
                    reduced_cost,
                    cost: from.cost + reduced.items[item as usize].cost - reduced.items[own].cost,
                    before: u32::try_from(before).unwrap_or(0), // `most` is far less than 2^32
                    group: exchanges.group,
                    item,
                });
                for limit in 0..self.limits {
                    let exchanged = reduced.uses_of(item as usize)[limit] - reduced.uses_of(own)[limit];
                    self.uses
                        .push(self.uses[before * self.limits + limit] + exchanged);
                }
            }
        }
        true
    }

    pub(super) fn reduced_cost(&self, part: usize) -> f64 {
        self.parts[part].reduced_cost
    }

    pub(super) fn cost(&self, part: usize) -> f64 {
        self.parts[part].cost
    }

    pub(super) fn uses_of(&self, part: usize) -> &[f64] {
        &self.uses[part * self.limits..(part + 1) * self.limits]
    }

    /// Standard deviation of the uses of one limit.
    #[allow(clippy::cast_precision_loss)] // part-choices are far fewer than 2^53
    fn spread(&self, limit: usize) -> f64 {
        let uses = || self.uses.iter().skip(limit).step_by(self.limits);
        let mean = uses().sum::<f64>() / self.len() as f64;
        (uses().map(|amount| (amount - mean).powi(2)).sum::<f64>() / self.len() as f64).sqrt()
    }

    /// Makes the part-choice's exchanges in a choice of the cheapest items.
    pub(super) fn apply(&self, part: usize, choice: &mut [u32]) {
        let mut part = part;
        while part > 0 {
            let Part {
                before, group, item, ..
            } = self.parts[part];
            choice[group as usize] = item;
            part = before as usize;
        }
    }
}

/// A half ordered so that the part-choices which may fit another's stand together: in bands of reduced cost,
/// each by rising use of the limit that tells part-choices apart best.
#[derive(Debug)]
pub(super) struct Sorted {
    half: Half,
    /// The limit, and its multiplier.
    limit: usize,
    multiplier: f64,
    /// Width of a band of reduced costs.
    width: f64,
    /// Where each band begins; one more entry than bands.
    starts: Vec<usize>,
    order: Vec<u32>,
    /// Use of the limit, in `order`.
    uses: Vec<f64>,
    /// Costs, in `order`.
    costs: Vec<f64>,
}

impl Sorted {
    /// `room` is the most that a part-choice's reduced costs sum to.
    pub(super) fn new(half: Half, multipliers: &[f64], room: f64) -> Self {
        #[allow(clippy::cast_precision_loss)] // a handful
        let width = room / BANDS as f64;
        // What a limit leaves to look at is room / λ of the spread of uses: the limit with the largest λ·spread.
        let telling = |limit: usize| multipliers[limit] * half.spread(limit);
        let limit = (0..half.limits)
            .max_by(|&a, &b| telling(a).total_cmp(&telling(b)))
            .unwrap_or(0);
        let mut order: Vec<(usize, f64, u32)> = (0..half.len())
            .zip(0..)
            .map(|(part, number)| {
                (
                    band(half.reduced_cost(part), width),
                    half.uses_of(part)[limit],
                    number,
                )
            })
            .collect();
        order.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let starts = (0..=BANDS).map(|band| order.partition_point(|(other, ..)| *other < band));
        Self {
            limit,
            multiplier: multipliers[limit],
            width,
            starts: starts.collect(),
            uses: order.iter().map(|(_, amount, _)| *amount).collect(),
            costs: order.iter().map(|(.., part)| half.cost(*part as usize)).collect(),
            order: order.iter().map(|(.., part)| *part).collect(),
            half,
        }
    }

    /// The stretches of the order with every part-choice that uses at most `unused` of the limits and leaves so
    /// little of it that reduced costs and λ·unused stay within `room`; others may stand between them.
    pub(super) fn stretches(&self, unused: &[f64], room: f64) -> impl Iterator<Item = Range<usize>> {
        let unused = unused[self.limit];
        self.starts
            .windows(2)
            .zip(0_u32..)
            .map(move |(bounds, band)| (bounds[0]..bounds[1], room - f64::from(band) * self.width))
            .take_while(|(_, left)| *left >= 0.0)
            .map(move |(band, left)| {
                let uses = &self.uses[band.clone()];
                let least = unused - left / self.multiplier.max(f64::MIN_POSITIVE) - TOLERANCE;
                let first = uses.partition_point(|amount| *amount < least);
                let end = uses.partition_point(|amount| *amount <= unused + TOLERANCE);
                band.start + first..band.start + end.max(first)
            })
    }

    /// The first part-choice of a stretch that costs less than `most` and fits into what is unused.
    pub(super) fn first_fit(&self, stretch: Range<usize>, unused: &[f64], most: f64) -> Option<usize> {
        let costs = self.costs[stretch.clone()].iter();
        let fits = |part: usize| {
            let uses = self.half.uses_of(part).iter().zip(unused);
            uses.fold(true, |fits, (amount, unused)| {
                fits & (*amount <= unused + TOLERANCE)
            })
        };
        costs
            .zip(stretch)
            .find(|(cost, at)| **cost < most && fits(self.order[*at] as usize))
            .map(|(_, at)| at)
    }

    /// Makes the exchanges of the part-choice at one place of the order.
    pub(super) fn apply(&self, at: usize, choice: &mut [u32]) {
        self.half.apply(self.order[at] as usize, choice);
    }
}

/// The band of a reduced cost.
fn band(reduced_cost: f64, width: f64) -> usize {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates; never negative
    let band = (reduced_cost / width) as usize;
    band.min(BANDS - 1)
}
