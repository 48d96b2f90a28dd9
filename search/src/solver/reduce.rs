//! The problem as the search sees it: dominated items gone, uses as shares of their limit, items by cost.

use super::{Item, Problem};

/// Uses beyond a limit by less than this are rounding, not excess; the larger of the limit and the largest use is 1.
pub(crate) const TOLERANCE: f64 = 1e-9;

/// The items of each group that a node still allows: `[first, end)` in [`Reduced::items`].
pub(super) type Allowed = Vec<(u32, u32)>;

/// Item counts fit 32 bits: a problem with more would not fit memory as choices and nodes.
fn narrow(item: usize) -> u32 {
    u32::try_from(item).unwrap_or(u32::MAX)
}

/// One item, flat: its uses stand in [`Reduced::uses`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) cost: f64,
    original: usize,
}

/// The problem without dominated items. Within a group items stand by rising cost, so a set of neighbours
/// is an interval.
#[derive(Debug)]
pub(super) struct Reduced {
    pub(super) limits: usize,
    /// What each scaled limit leaves once every group has used what it must.
    pub(super) capacity: Vec<f64>,
    /// Where each group's items begin in `items`; one more entry than groups.
    pub(super) starts: Vec<usize>,
    pub(super) items: Vec<Kept>,
    /// `limits` scaled uses for each item, beyond the least that its group can use; never negative.
    pub(super) uses: Vec<f64>,
}

impl Reduced {
    pub(super) fn new(problem: &Problem) -> Self {
        let limits = problem.limits.len();
        let scale: Vec<f64> = (0..limits).map(|limit| scale_of(problem, limit)).collect();
        let capacity = problem
            .limits
            .iter()
            .zip(&scale)
            .map(|(limit, scale)| limit * scale)
            .collect();
        let mut reduced = Self {
            limits,
            capacity,
            starts: vec![0],
            items: Vec::new(),
            uses: Vec::new(),
        };
        for group in &problem.groups {
            let least: Vec<f64> = (0..limits).map(|limit| least_use(group, limit)).collect();
            for ((capacity, least), scale) in reduced.capacity.iter_mut().zip(&least).zip(&scale) {
                *capacity -= least * scale;
            }
            let mut order: Vec<usize> = (0..group.len()).collect();
            order.sort_by(|&a, &b| {
                let (a, b) = (&group[a], &group[b]);
                a.cost
                    .total_cmp(&b.cost)
                    .then_with(|| a.uses.iter().sum::<f64>().total_cmp(&b.uses.iter().sum()))
            });
            let mut kept: Vec<usize> = Vec::new();
            for candidate in order {
                let dominated = kept.iter().any(|&other| {
                    group[other]
                        .uses
                        .iter()
                        .zip(&group[candidate].uses)
                        .all(|(less, more)| less <= more)
                });
                if !dominated {
                    kept.push(candidate);
                }
            }
            for original in kept {
                reduced.items.push(Kept {
                    cost: group[original].cost,
                    original,
                });
                let uses = group[original].uses.iter().zip(&least).zip(&scale);
                reduced
                    .uses
                    .extend(uses.map(|((amount, least), scale)| (amount - least) * scale));
            }
            reduced.starts.push(reduced.items.len());
        }
        reduced
    }

    /// The uses of one item, for each limit.
    pub(super) fn uses_of(&self, item: usize) -> &[f64] {
        &self.uses[item * self.limits..(item + 1) * self.limits]
    }

    /// The same problem with only the items that `keep` names; false leaves out.
    pub(super) fn restricted(&self, keep: impl Fn(usize) -> bool) -> Self {
        let mut restricted = Self {
            limits: self.limits,
            capacity: self.capacity.clone(),
            starts: vec![0],
            items: Vec::new(),
            uses: Vec::new(),
        };
        for bounds in self.starts.windows(2) {
            for item in (bounds[0]..bounds[1]).filter(|&item| keep(item)) {
                restricted.items.push(self.items[item]);
                restricted.uses.extend_from_slice(self.uses_of(item));
            }
            restricted.starts.push(restricted.items.len());
        }
        restricted
    }

    /// Where the items with these original indices stand, one for each group; none where one is gone.
    pub(super) fn position(&self, original: &[usize]) -> Option<Vec<u32>> {
        let groups = self.starts.windows(2).zip(original);
        groups
            .map(|(bounds, wanted)| {
                let found = (bounds[0]..bounds[1]).find(|&item| self.items[item].original == *wanted);
                found.and_then(|item| u32::try_from(item).ok())
            })
            .collect()
    }

    /// Every item of every group.
    pub(super) fn all(&self) -> Allowed {
        self.starts
            .windows(2)
            .map(|bounds| (narrow(bounds[0]), narrow(bounds[1])))
            .collect()
    }

    /// Each chosen item's index in its own group of the original problem.
    pub(super) fn original(&self, chosen: &[u32]) -> Vec<usize> {
        chosen
            .iter()
            .map(|&item| self.items[item as usize].original)
            .collect()
    }

    /// Cost and scaled uses of a choice.
    pub(super) fn totals(&self, chosen: &[u32]) -> (f64, Vec<f64>) {
        let mut uses = vec![0.0; self.limits];
        let mut cost = 0.0;
        for &item in chosen {
            cost += self.items[item as usize].cost;
            for (sum, amount) in uses.iter_mut().zip(self.uses_of(item as usize)) {
                *sum += amount;
            }
        }
        (cost, uses)
    }

    /// cost + λ·uses of one item.
    pub(super) fn priced(&self, item: u32, multipliers: &[f64]) -> f64 {
        let item = item as usize;
        let uses = self.uses_of(item).iter().zip(multipliers);
        self.items[item].cost + uses.map(|(amount, value)| amount * value).sum::<f64>()
    }

    /// Whether these uses are inside every limit.
    pub(super) fn fits(&self, uses: &[f64]) -> bool {
        uses.iter()
            .zip(&self.capacity)
            .all(|(amount, capacity)| *amount <= capacity + TOLERANCE)
    }
}

/// What every item of a group uses of a limit at the least.
pub(super) fn least_use(group: &[Item], limit: usize) -> f64 {
    group
        .iter()
        .filter_map(|item| item.uses.get(limit))
        .fold(f64::INFINITY, |least, amount| least.min(*amount))
}

/// Makes the larger of the limit and the largest use 1.
fn scale_of(problem: &Problem, limit: usize) -> f64 {
    let largest = problem
        .groups
        .iter()
        .flatten()
        .filter_map(|item| item.uses.get(limit))
        .chain(problem.limits.get(limit))
        .fold(0.0_f64, |largest, value| largest.max(value.abs()));
    if largest > 0.0 { 1.0 / largest } else { 1.0 }
}
