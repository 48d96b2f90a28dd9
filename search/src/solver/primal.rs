//! Good choices quickly: rounding a relaxation, mending a choice that exceeds a limit, exchanging items.

use super::reduce::Reduced;
use super::relaxation::Relaxed;

/// Combinations of split groups' items that one rounding may try.
const MOST_ROUNDINGS: usize = 4096;
/// Exchanges of two items are tried in problems up to this many items.
const MOST_PAIRED_ITEMS: usize = 4096;

/// The best choice so far.
#[derive(Debug)]
pub(super) struct Incumbent {
    best: Option<(Vec<u32>, f64)>,
    relative_gap: f64,
    /// What every choice costs less than.
    ceiling: f64,
    /// Differences below this are rounding.
    rounding: f64,
}

impl Incumbent {
    pub(super) fn new(reduced: &Reduced, relative_gap: f64) -> Self {
        let mut ceiling = 0.0;
        let mut scale = 0.0;
        for bounds in reduced.starts.windows(2) {
            let costs = reduced.items[bounds[0]..bounds[1]].iter().map(|item| item.cost);
            ceiling += costs.clone().fold(f64::NEG_INFINITY, f64::max);
            scale += costs.fold(0.0_f64, |largest, cost| largest.max(cost.abs()));
        }
        let scale = if scale > 0.0 { scale } else { 1.0 };
        Self {
            best: None,
            relative_gap,
            ceiling: ceiling + 1e-3 * scale,
            rounding: 1e-12 * scale,
        }
    }

    /// A node whose bound reaches this holds nothing better that matters.
    pub(super) fn cutoff(&self) -> f64 {
        match &self.best {
            Some((_, cost)) => cost - (self.relative_gap * cost.abs()).max(self.rounding),
            None => self.ceiling,
        }
    }

    pub(super) fn cost(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(_, cost)| *cost)
    }

    /// The best choice so far; empty when there is none.
    pub(super) fn choice(&self) -> &[u32] {
        self.best.as_ref().map_or(&[], |(choice, _)| choice)
    }

    pub(super) fn offer(&mut self, reduced: &Reduced, choice: &[u32], cost: f64, uses: &[f64]) {
        if cost < self.cost() && reduced.fits(uses) {
            self.best = Some((choice.to_vec(), cost));
        }
    }

    pub(super) fn offer_choice(&mut self, reduced: &Reduced, choice: &[u32]) {
        let (cost, uses) = reduced.totals(choice);
        self.offer(reduced, choice, cost, &uses);
    }

    pub(super) fn original(&self, reduced: &Reduced) -> Option<Vec<usize>> {
        self.best.as_ref().map(|(choice, _)| reduced.original(choice))
    }

    /// The same incumbent among another set of items, which holds all of its own; none when a group is empty.
    pub(super) fn moved(&self, from: &Reduced, to: &Reduced) -> Option<Self> {
        if to.starts.windows(2).any(|bounds| bounds[0] == bounds[1]) {
            return None;
        }
        let best = match &self.best {
            Some((choice, cost)) => Some((to.position(&from.original(choice))?, *cost)),
            None => None,
        };
        Some(Self { best, ..*self })
    }
}

/// Tries the allowed items of the groups that a relaxation splits, the others as in its choice.
pub(super) fn round(reduced: &Reduced, allowed: &[(u32, u32)], relaxed: &Relaxed, incumbent: &mut Incumbent) {
    if relaxed.choice.is_empty() {
        return;
    }
    let mut groups: Vec<usize> = relaxed.split.iter().map(|(group, ..)| *group).collect();
    groups.dedup();
    let mut combinations = 1;
    groups.retain(|&group| {
        let (first, end) = allowed[group];
        let more = combinations * (end - first) as usize;
        let fits = more <= MOST_ROUNDINGS;
        if fits {
            combinations = more;
        }
        fits
    });
    let mut choice = relaxed.choice.clone();
    for &group in &groups {
        choice[group] = allowed[group].0;
    }
    let (mut cost, mut uses) = reduced.totals(&choice);
    loop {
        incumbent.offer(reduced, &choice, cost, &uses);
        let mut carried = true;
        for &group in &groups {
            let (first, end) = allowed[group];
            let old = choice[group];
            let new = if old + 1 < end { old + 1 } else { first };
            choice[group] = new;
            exchange(reduced, old, new, &mut cost, &mut uses);
            if new != first {
                carried = false;
                break;
            }
        }
        if carried {
            return;
        }
    }
}

fn exchange(reduced: &Reduced, old: u32, new: u32, cost: &mut f64, uses: &mut [f64]) {
    let (old, new) = (old as usize, new as usize);
    *cost += reduced.items[new].cost - reduced.items[old].cost;
    for ((sum, less), more) in uses
        .iter_mut()
        .zip(reduced.uses_of(old))
        .zip(reduced.uses_of(new))
    {
        *sum += more - less;
    }
}

fn excess(reduced: &Reduced, uses: impl Iterator<Item = f64>) -> f64 {
    uses.zip(&reduced.capacity)
        .map(|(amount, capacity)| (amount - capacity).max(0.0))
        .sum()
}

/// Exchanges one item at a time until every limit holds: the least priced cost for each unit of excess that
/// goes. None when no single exchange helps any more.
pub(super) fn repair(reduced: &Reduced, choice: &[u32], multipliers: &[f64]) -> Option<Vec<u32>> {
    let mut choice = choice.to_vec();
    let (mut cost, mut uses) = reduced.totals(&choice);
    while !reduced.fits(&uses) {
        let now = excess(reduced, uses.iter().copied());
        let mut best: Option<(f64, usize, u32)> = None;
        for (group, bounds) in reduced.starts.windows(2).enumerate() {
            let old = choice[group] as usize;
            for new in bounds[0]..bounds[1] {
                let (before, after) = (reduced.uses_of(old), reduced.uses_of(new));
                let then = uses
                    .iter()
                    .zip(before)
                    .zip(after)
                    .map(|((sum, less), more)| sum - less + more);
                let gained = now - excess(reduced, then);
                if gained <= 1e-15 {
                    continue;
                }
                let priced: f64 = reduced.items[new].cost - reduced.items[old].cost
                    + after
                        .iter()
                        .zip(before)
                        .zip(multipliers)
                        .map(|((a, b), value)| (a - b) * value)
                        .sum::<f64>();
                let rate = priced / gained;
                if best.is_none_or(|(other, ..)| rate < other) {
                    best = Some((rate, group, u32::try_from(new).ok()?));
                }
            }
        }
        let (_, group, new) = best?;
        exchange(reduced, choice[group], new, &mut cost, &mut uses);
        choice[group] = new;
    }
    Some(choice)
}

/// Exchanges two items at a time as long as that lowers the cost inside the limits.
pub(super) fn improve(reduced: &Reduced, incumbent: &mut Incumbent) {
    if reduced.items.len() > MOST_PAIRED_ITEMS {
        return;
    }
    let Some((choice, _)) = incumbent.best.clone() else {
        return;
    };
    improve_from(reduced, choice, incumbent);
}

/// [`improve`] from any choice inside the limits.
pub(super) fn improve_from(reduced: &Reduced, mut choice: Vec<u32>, incumbent: &mut Incumbent) {
    let (mut cost, mut uses) = reduced.totals(&choice);
    for _ in 0..32 {
        let Some((a, b)) = best_pair(reduced, &choice, &uses) else {
            break;
        };
        for (group, new) in [a, b] {
            exchange(reduced, choice[group], new, &mut cost, &mut uses);
            choice[group] = new;
        }
    }
    incumbent.offer_choice(reduced, &choice);
}

/// The pair of exchanges that lowers the cost most; the two may be the same when one alone does.
#[allow(clippy::type_complexity)] // (group, item) twice
fn best_pair(reduced: &Reduced, choice: &[u32], uses: &[f64]) -> Option<((usize, u32), (usize, u32))> {
    let limits = reduced.limits;
    let mut moves: Vec<(f64, usize, u32)> = Vec::new();
    for (group, bounds) in reduced.starts.windows(2).enumerate() {
        let own = reduced.items[choice[group] as usize].cost;
        for item in bounds[0]..bounds[1] {
            moves.push((reduced.items[item].cost - own, group, u32::try_from(item).ok()?));
        }
    }
    moves.sort_by(|a, b| a.0.total_cmp(&b.0));
    let deltas: Vec<f64> = moves
        .iter()
        .flat_map(|&(_, group, item)| {
            let (new, old) = (
                reduced.uses_of(item as usize),
                reduced.uses_of(choice[group] as usize),
            );
            new.iter().zip(old).map(|(new, old)| new - old)
        })
        .collect();
    let room: Vec<f64> = uses
        .iter()
        .zip(&reduced.capacity)
        .map(|(amount, capacity)| capacity - amount)
        .collect();
    let scale: f64 = moves
        .iter()
        .fold(0.0, |largest, (delta, ..)| f64::max(largest, delta.abs()));
    let mut best = (-1e-12 * scale, None);
    for (first, &(gain, group, item)) in moves.iter().enumerate() {
        if gain >= 0.0 {
            break;
        }
        for (second, &(loss, other, other_item)) in moves.iter().enumerate() {
            if gain + loss >= best.0 {
                break;
            }
            if group == other {
                continue;
            }
            let fits = (0..limits)
                .all(|limit| deltas[first * limits + limit] + deltas[second * limits + limit] <= room[limit]);
            if fits {
                best = (gain + loss, Some(((group, item), (other, other_item))));
                break;
            }
        }
    }
    best.1
}
