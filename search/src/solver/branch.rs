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
/// How many part-choices of each half a meeting may list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Effort {
    /// At the root, where the room grows; each takes about 100 bytes.
    root: usize,
    /// At every other node: few enough that a meeting costs about as much as the node's relaxation.
    node: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self {
            root: 1 << 20,
            node: 1 << 8,
        }
    }
}

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
pub(super) fn search(whole: &Reduced, options: &Options, effort: Effort) -> Found {
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
    // The other half is the tree's: where ties make every room too full, it finds the better choices.
    let most = options.work.saturating_sub(relaxation.work) / 2;
    let budget = Budget {
        parts: effort.root,
        work: most,
    };
    let deepened = deepen(whole, &allowed, &root, budget, &mut incumbent);
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
        effort,
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
    effort: Effort,
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
            parts: self.effort.node,
            work: 16 * self.effort.node as u64,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::cast_precision_loss)]
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::solver::{Item, Problem};

    const TREE_ALONE: Effort = Effort { root: 1, node: 1 };
    const SMALL_MEETINGS: Effort = Effort { root: 8, node: 4 };
    const OPTIMUM: Options = Options {
        relative_gap: 0.0,
        work: 50_000_000,
    };

    /// Costs that fall by what is used, with whole numbers, so that much is nearly as good as the best.
    fn problem(seed: u64, groups: usize, items: usize) -> Problem {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut item = || {
            let uses: Vec<f64> = (0..3)
                .map(|_| f64::from(random.random_range(1..=60_u32)))
                .collect();
            let cost = 180.0 - uses.iter().sum::<f64>() + f64::from(random.random_range(0..20_u32));
            Item { cost, uses }
        };
        let groups: Vec<Vec<Item>> = (0..groups)
            .map(|_| (0..items).map(|_| item()).collect())
            .collect();
        let limits = (0..3)
            .map(|limit| 26.0 * groups.len() as f64 + f64::from(limit))
            .collect();
        Problem { groups, limits }
    }

    /// Least cost by going through every choice, depth first.
    fn least(groups: &[Vec<Item>], unused: &[f64]) -> f64 {
        if unused.iter().any(|amount| *amount < 0.0) {
            return f64::INFINITY;
        }
        let Some((group, rest)) = groups.split_first() else {
            return 0.0;
        };
        let costs = group.iter().map(|item| {
            let unused: Vec<f64> = unused
                .iter()
                .zip(&item.uses)
                .map(|(all, used)| all - used)
                .collect();
            item.cost + least(rest, &unused)
        });
        costs.fold(f64::INFINITY, f64::min)
    }

    fn optimum(problem: &Problem, effort: Effort) -> (f64, u64) {
        let found = search(&Reduced::new(problem), &OPTIMUM, effort);
        assert!(found.exhausted);
        let cost = found
            .best
            .map_or(f64::INFINITY, |chosen| problem.totals(&chosen).0);
        (cost, found.nodes)
    }

    #[test]
    fn branching_and_meeting_each_alone_find_what_going_through_everything_finds() {
        let mut nodes = 0;
        for seed in 0..40 {
            let problem = problem(seed, 6, 5);
            let expected = least(&problem.groups, &problem.limits);
            for effort in [TREE_ALONE, SMALL_MEETINGS, Effort::default()] {
                let (cost, visited) = optimum(&problem, effort);
                assert!(
                    cost == expected || (cost - expected).abs() < 1e-9,
                    "seed {seed}, {effort:?}: {cost} instead of {expected}"
                );
                nodes += visited;
            }
        }
        assert!(nodes > 1000, "the tree was hardly used: {nodes} nodes");
    }

    #[test]
    fn branching_and_meeting_agree_where_going_through_everything_takes_too_long() {
        for seed in 0..3 {
            let problem = problem(seed, 12, 7);
            let (alone, nodes) = optimum(&problem, TREE_ALONE);
            let (met, few) = optimum(&problem, Effort::default());
            assert!((alone - met).abs() < 1e-9, "seed {seed}: {alone} and {met}");
            assert!(few < nodes, "seed {seed}: meeting took {few} nodes of {nodes}");
        }
    }
}
