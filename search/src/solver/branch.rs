//! Branch and bound over intervals of items, best bound first, diving into the heavier half.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::Options;
use super::meet::{Budget, Core, deepen};
use super::primal::{Incumbent, improve, improve_from, repair, round};
use super::reduce::{Allowed, Reduced};
use super::relaxation::{Basis, Relaxation, Relaxed};

/// One node in so many is mended and improved.
const MENDED: u64 = 16;
/// A node is closed by looking at all it may hold when that is at most so many part-choices of each half …
const CLOSED_PARTS: usize = 1 << 12;
/// … and so many of them to list and to look at together.
const CLOSED_WORK: u64 = 1 << 18;

/// What the search found.
#[derive(Debug)]
pub(super) struct Found {
    /// Original index of the chosen item in each group.
    pub(super) best: Option<Vec<usize>>,
    /// No choice costs less.
    pub(super) lower_bound: f64,
    /// Whether the whole tree was searched.
    pub(super) exhausted: bool,
    pub(super) nodes: u64,
}

struct Node {
    bound: f64,
    allowed: Allowed,
    basis: Basis,
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Node {}
impl PartialOrd for Node {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Node {
    /// The heap gives its greatest: the least bound.
    fn cmp(&self, other: &Self) -> Ordering {
        other.bound.total_cmp(&self.bound)
    }
}

/// Searches the whole problem.
pub(super) fn search(whole: &Reduced, options: &Options) -> Found {
    if whole.capacity.iter().any(|&capacity| capacity < -1e-9) {
        return Found {
            best: None,
            lower_bound: f64::INFINITY,
            exhausted: true,
            nodes: 0,
        };
    }
    let mut relaxation = Relaxation::new(whole);
    let mut incumbent = Incumbent::new(whole, options.relative_gap);
    let allowed = whole.all();
    let mut basis = relaxation.first_basis();
    let root = relaxation.solve(&allowed, &mut basis, f64::INFINITY, |choice, cost, uses| {
        incumbent.offer(whole, choice, cost, uses);
    });
    round(whole, &allowed, &root, &mut incumbent);
    if let Some(repaired) = repair(whole, &root.choice, &root.multipliers) {
        incumbent.offer_choice(whole, &repaired);
    }
    improve(whole, &mut incumbent);
    let most = options.work.saturating_sub(relaxation.work);
    let deepened = deepen(whole, &allowed, &root, most, &mut incumbent);
    let work = relaxation.work + deepened.work;
    let mut kept = within_reach(whole, &allowed, &root, incumbent.cutoff());
    for &item in incumbent.choice() {
        kept[item as usize] = true;
    }
    let core = whole.restricted(|item| kept[item]);
    let Some(mut incumbent) = incumbent.moved(whole, &core) else {
        // Some group has no item that any choice inside the limits could hold.
        return Found {
            best: None,
            lower_bound: f64::INFINITY,
            exhausted: true,
            nodes: 1,
        };
    };
    let mut tree = Tree {
        core: &core,
        relaxation: Relaxation::new(&core),
        nodes: 1,
    };
    tree.relaxation.work = work;
    let open = tree.explore(deepened.bound, &mut incumbent, options.work);
    Found {
        best: incumbent.original(&core),
        lower_bound: open
            .unwrap_or(f64::INFINITY)
            .min(incumbent.cutoff())
            .max(deepened.bound),
        exhausted: open.is_none(),
        nodes: tree.nodes,
    }
}

/// Which items some choice better than `cutoff` may hold, by their reduced cost at the root.
fn within_reach(whole: &Reduced, allowed: &[(u32, u32)], root: &Relaxed, cutoff: f64) -> Vec<bool> {
    let mut kept = vec![true; whole.items.len()];
    for &(first, end) in allowed {
        let values: Vec<f64> = (first..end)
            .map(|item| whole.priced(item, &root.multipliers))
            .collect();
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        for (item, value) in (first..end).zip(values) {
            kept[item as usize] = root.bound + (value - least) < cutoff;
        }
    }
    kept
}

struct Tree<'a> {
    core: &'a Reduced,
    relaxation: Relaxation<'a>,
    nodes: u64,
}

impl Tree<'_> {
    /// Explores until nothing is open or the work is spent; gives the least bound still open then.
    fn explore(&mut self, bound: f64, incumbent: &mut Incumbent, work: u64) -> Option<f64> {
        let mut open = BinaryHeap::new();
        let mut current = Some(Node {
            bound,
            allowed: self.core.all(),
            basis: self.relaxation.first_basis(),
        });
        loop {
            let node = current.take().or_else(|| open.pop())?;
            if node.bound >= incumbent.cutoff() {
                continue;
            }
            if self.relaxation.work >= work {
                let least = open
                    .iter()
                    .map(|node: &Node| node.bound)
                    .fold(node.bound, f64::min);
                return Some(least);
            }
            if let Some((near, far)) = self.branch(node, incumbent) {
                open.push(far);
                current = Some(near);
            }
        }
    }

    /// Solves a node and splits it: the half to dive into first; none when it is closed.
    fn branch(&mut self, mut node: Node, incumbent: &mut Incumbent) -> Option<(Node, Node)> {
        self.nodes += 1;
        let core = self.core;
        let before = incumbent.cost();
        let relaxed = self.relaxation.solve(
            &node.allowed,
            &mut node.basis,
            incumbent.cutoff(),
            |choice, cost, uses| {
                incumbent.offer(core, choice, cost, uses);
            },
        );
        node.bound = node.bound.max(relaxed.bound);
        if node.bound >= incumbent.cutoff() {
            return None;
        }
        if self.close(&node, &relaxed, incumbent) {
            return None;
        }
        round(core, &node.allowed, &relaxed, incumbent);
        if incumbent.cost() < before {
            improve(core, incumbent);
        }
        // Mending what the relaxation suggests here and exchanging pairs finds choices that rounding misses.
        if self.nodes.is_multiple_of(MENDED)
            && let Some(mended) = repair(core, &relaxed.choice, &relaxed.multipliers)
        {
            self.relaxation.work += 10 * core.items.len() as u64;
            improve_from(core, mended, incumbent);
        }
        self.tighten(&mut node, &relaxed, incumbent.cutoff())?;
        let (group, middle, left_first) = division(&node.allowed, &relaxed)?;
        let (first, end) = node.allowed[group];
        let mut left = node.allowed.clone();
        let mut right = node.allowed;
        left[group] = (first, middle);
        right[group] = (middle, end);
        let left = Node {
            bound: node.bound,
            allowed: left,
            basis: node.basis.clone(),
        };
        let right = Node {
            bound: node.bound,
            allowed: right,
            basis: node.basis,
        };
        Some(if left_first { (left, right) } else { (right, left) })
    }

    /// Looks at everything the node may still hold, where that is little; true when nothing is left to find.
    fn close(&mut self, node: &Node, relaxed: &Relaxed, incumbent: &mut Incumbent) -> bool {
        let room = incumbent.cutoff() - relaxed.bound;
        let budget = Budget {
            parts: CLOSED_PARTS,
            work: CLOSED_WORK,
        };
        let met = Core::new(self.core, &node.allowed, relaxed, room).meet(room, budget, incumbent);
        self.relaxation.work += met.work;
        met.complete
    }

    /// Drops items at the ends of each interval that the node's own bound rules out; none when nothing is left.
    fn tighten(&mut self, node: &mut Node, relaxed: &Relaxed, cutoff: f64) -> Option<()> {
        let room = cutoff - relaxed.bound;
        for (first, end) in &mut node.allowed {
            if *end - *first == 1 {
                continue;
            }
            let values: Vec<f64> = (*first..*end)
                .map(|item| self.core.priced(item, &relaxed.multipliers))
                .collect();
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let inside = |value: &f64| value - least < room;
            let lead = values.iter().take_while(|value| !inside(value)).count();
            let trail = values.iter().rev().take_while(|value| !inside(value)).count();
            if lead == values.len() {
                return None;
            }
            *first += u32::try_from(lead).unwrap_or(0);
            *end -= u32::try_from(trail).unwrap_or(0);
        }
        Some(())
    }
}

/// Which group to split, before which item, and whether the lower half is the heavier. None when every group
/// is down to one item.
fn division(allowed: &[(u32, u32)], relaxed: &Relaxed) -> Option<(usize, u32, bool)> {
    let mut best: Option<(f64, usize, u32, bool)> = None;
    let mut at = 0;
    while let Some(&(group, ..)) = relaxed.split.get(at) {
        let parts: Vec<_> = relaxed.split[at..]
            .iter()
            .take_while(|(other, ..)| *other == group)
            .collect();
        at += parts.len();
        let (first, end) = allowed[group];
        let mean: f64 = parts
            .iter()
            .map(|(_, item, weight)| f64::from(*item) * weight)
            .sum::<f64>()
            / parts.iter().map(|(.., weight)| weight).sum::<f64>();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between two item indices
        let middle = mean.floor() as u32 + 1;
        if middle <= first || middle >= end {
            continue;
        }
        let lower: f64 = parts
            .iter()
            .filter(|(_, item, _)| *item < middle)
            .map(|(.., weight)| weight)
            .sum();
        let balance = lower.min(1.0 - lower);
        if best.is_none_or(|(other, ..)| balance > other) {
            best = Some((balance, group, middle, lower >= 0.5));
        }
    }
    if let Some((_, group, middle, left_first)) = best {
        return Some((group, middle, left_first));
    }
    let widest = allowed
        .iter()
        .enumerate()
        .max_by_key(|(_, (first, end))| end - first);
    let (group, &(first, end)) = widest?;
    (end - first > 1).then(|| (group, first + (end - first) / 2, true))
}
