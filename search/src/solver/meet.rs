//! Every choice that could still beat the best one known, by meeting in the middle.
//!
//! Let λ ≥ 0 be multipliers, an item's priced cost be cost + λ·uses, and its reduced cost be how much dearer it
//! is so than the cheapest item of its group. Then every choice inside the limits costs
//!
//! > bound(λ) + Σ reduced costs + λ·(capacity − uses),
//!
//! where no term after the bound is negative. A choice that costs less than bound + room therefore has reduced
//! costs that sum to less than room: nearly all its items are their groups' cheapest. At the multipliers of
//! the linear relaxation a useful room is small, and such choices are few enough to look at.
//!
//! They are looked at in halves (Horowitz and Sahni 1974): the part-choices of one half of the groups whose
//! reduced costs sum to at most room are listed, those of the other half likewise, and halves are joined that
//! fit together. By the equation above two halves leave no more than (room − their reduced costs) / λ of
//! any limit unused, so of one list, sorted by its use of one limit, only a short stretch is looked at for
//! each entry of the other.
//!
//! Finding nothing proves that no choice costs less than bound + room: what a node of the tree needs to be
//! closed. At the root, where a good choice may not be known yet, [`deepen`] lets the room grow step by step:
//! the cheapest choice within the first room that holds any is optimal.

use super::halves::{Exchanges, Half, Sorted};
use super::primal::Incumbent;
use super::reduce::Reduced;
use super::relaxation::Relaxed;

/// The room that [`deepen`] begins with holds so many items beside the cheapest.
const FIRST_ITEMS: usize = 16;
/// How many times as large each further room is.
const GROWTH: f64 = 1.15;

/// How much one meeting may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// Part-choices of each half.
    pub(super) parts: usize,
    /// Part-choices listed and looked at.
    pub(super) work: u64,
}

/// How a meeting ended.
#[derive(Debug)]
pub(super) struct Met {
    /// Whether everything within the room was looked at: if so, nothing there beats the incumbent's cutoff.
    pub(super) complete: bool,
    /// In the unit of [`Budget::work`].
    pub(super) work: u64,
}

/// What [`deepen`] came to.
#[derive(Debug)]
pub(super) struct Deepened {
    /// No choice costs less than this, or than the incumbent's cutoff.
    pub(super) bound: f64,
    /// In the unit of [`Budget::work`].
    pub(super) work: u64,
}

/// The items near the cheapest of each group at given multipliers.
#[derive(Debug)]
pub(super) struct Core<'a> {
    reduced: &'a Reduced,
    multipliers: &'a [f64],
    /// The Lagrangian bound at the multipliers.
    bound: f64,
    /// The cheapest item of each group.
    cheapest: Vec<u32>,
    /// Each group's other items by rising reduced cost.
    others: Vec<Vec<(f64, u32)>>,
}

impl<'a> Core<'a> {
    /// The allowed items whose reduced cost is less than `most`, at the multipliers of `relaxed`.
    pub(super) fn new(reduced: &'a Reduced, allowed: &[(u32, u32)], relaxed: &'a Relaxed, most: f64) -> Self {
        let multipliers = &relaxed.multipliers;
        let mut cheapest = Vec::with_capacity(allowed.len());
        let mut others = Vec::with_capacity(allowed.len());
        for &(first, end) in allowed {
            let values = (first..end).map(|item| (reduced.priced(item, multipliers), item));
            let least = values.clone().min_by(|a, b| a.0.total_cmp(&b.0));
            let (least, own) = least.unwrap_or((0.0, first));
            let mut near: Vec<(f64, u32)> = values
                .filter(|&(value, item)| item != own && value - least < most)
                .map(|(value, item)| (value - least, item))
                .collect();
            near.sort_by(|a, b| a.0.total_cmp(&b.0));
            cheapest.push(own);
            others.push(near);
        }
        Self {
            reduced,
            multipliers,
            bound: relaxed.bound,
            cheapest,
            others,
        }
    }

    /// The least room that holds `count` items beside the cheapest and those that cost no more.
    fn room_for(&self, count: usize) -> Option<f64> {
        let extras = self.others.iter().flatten().map(|(extra, _)| *extra);
        let mut extras: Vec<f64> = extras.filter(|extra| *extra > 0.0).collect();
        extras.sort_by(f64::total_cmp);
        extras.get(count).or_else(|| extras.last()).copied()
    }

    /// Offers the incumbent the cheapest choice that costs less than bound + `room` and than its cutoff.
    pub(super) fn meet(&self, room: f64, budget: Budget, incumbent: &mut Incumbent) -> Met {
        let mut met = Met {
            complete: false,
            work: 0,
        };
        // Without a bound there is no room to speak of; without limits the cheapest items are the best choice.
        if !room.is_finite() || room <= 0.0 || self.reduced.limits == 0 {
            return met;
        }
        if let Some([left, right]) = self.list(room, budget, &mut met.work) {
            let right = Sorted::new(right, self.multipliers, room);
            met.complete = self.join(&left, &right, room, budget, &mut met.work, incumbent);
        }
        met
    }

    /// The part-choices of two halves of the groups, with reduced costs up to `room`; none over the budget.
    fn list(&self, room: f64, budget: Budget, work: &mut u64) -> Option<[Half; 2]> {
        let limits = self.reduced.limits;
        let mut halves = [Half::new(limits), Half::new(limits)];
        let near = |others: &[(f64, u32)]| others.partition_point(|(extra, _)| *extra <= room);
        let mut order: Vec<(usize, u32)> = self.others.iter().map(|others| near(others)).zip(0..).collect();
        order.retain(|(near, _)| *near > 0);
        order.sort_unstable_by(|a, b| b.cmp(a));
        // The widest groups first, each to the half that is shorter so far, keeps both alike.
        for (near, group) in order {
            let [left, right] = &mut halves;
            let half = if right.len() < left.len() { right } else { left };
            let exchanges = Exchanges {
                group,
                cheapest: self.cheapest[group as usize],
                others: &self.others[group as usize][..near],
            };
            let before = half.len();
            let is_whole = half.extend(self.reduced, exchanges, room, budget.parts);
            *work += half.len() as u64 + (half.len() - before) as u64;
            if !is_whole || *work > budget.work {
                return None;
            }
        }
        Some(halves)
    }

    /// Looks for halves that fit together; false when the budget ends before that.
    fn join(
        &self,
        left: &Half,
        right: &Sorted,
        room: f64,
        budget: Budget,
        work: &mut u64,
        incumbent: &mut Incumbent,
    ) -> bool {
        let (cost, uses) = self.reduced.totals(&self.cheapest);
        let capacity = &self.reduced.capacity;
        let unused: Vec<f64> = capacity.iter().zip(uses).map(|(all, used)| all - used).collect();
        let mut most = incumbent.cutoff().min(self.bound + room);
        let mut left_unused = unused.clone();
        for part in 0..left.len() {
            if *work > budget.work {
                return false;
            }
            for ((left_unused, unused), used) in left_unused.iter_mut().zip(&unused).zip(left.uses_of(part)) {
                *left_unused = unused - used;
            }
            let part_cost = cost + left.cost(part);
            for mut stretch in right.stretches(&left_unused, most - self.bound - left.reduced_cost(part)) {
                *work += 1 + stretch.len() as u64;
                while let Some(at) = right.first_fit(stretch.clone(), &left_unused, most - part_cost) {
                    let mut choice = self.cheapest.clone();
                    left.apply(part, &mut choice);
                    right.apply(at, &mut choice);
                    incumbent.offer_choice(self.reduced, &choice);
                    most = most.min(incumbent.cutoff());
                    stretch.start = at + 1;
                }
            }
        }
        true
    }
}

/// Lets the room at the root grow until it holds a choice, reaches the incumbent's cutoff or exceeds the budget.
pub(super) fn deepen(
    reduced: &Reduced,
    allowed: &[(u32, u32)],
    relaxed: &Relaxed,
    budget: Budget,
    incumbent: &mut Incumbent,
) -> Deepened {
    let mut deepened = Deepened {
        bound: relaxed.bound,
        work: 0,
    };
    let core = Core::new(reduced, allowed, relaxed, incumbent.cutoff() - relaxed.bound);
    let mut room = core.room_for(FIRST_ITEMS).unwrap_or(f64::INFINITY);
    while deepened.bound < incumbent.cutoff() {
        room = room.min(incumbent.cutoff() - relaxed.bound);
        let budget = Budget {
            work: budget.work.saturating_sub(deepened.work),
            ..budget
        };
        let met = core.meet(room, budget, incumbent);
        deepened.work += met.work;
        if !met.complete {
            break;
        }
        deepened.bound = deepened.bound.max((relaxed.bound + room).min(incumbent.cutoff()));
        room *= GROWTH;
    }
    deepened
}
