//! How far apart the latencies of models with equally many parameters lie, and the parameters of models that are equally
//! fast: what a budget in parameters says of time.
//!
//! Quality is not asked for, so no scores are needed: a table and a config are enough. Every model keeps at least half of the
//! parent's blocks of each kind, whichever of them; where there are several of one shape it does not matter to the sums.
//! Latencies are sums of the device's times here, and what is stated of each model is its whole prediction. Where the host
//! decides, models whose sums are equal may take times that are not: such a pair is left out.

use espalier_arch::{Architecture, BlockKind, BlockShape, Candidate, Variant};
use serde::{Deserialize, Serialize};

use crate::predict::{Prices, priced};
use crate::solver::{Item, Options, Problem, Solved, solve};
use crate::{
    CostKey, CostModel, CostTable, Costs, Error, MemoryModel, Metric, Prediction, Result, Subject, Workload,
};

/// Pairs of each kind, one for each part of the way from the least to the most that can be had.
const VALUES: usize = 12;
/// What is equal differs by this share at the most, where it cannot be equal to the last digit.
const EQUAL: f64 = 5e-4;
/// Latencies of equal sums that are predicted farther apart than this, for the host's sake, are not equal.
const MOST_APART: f64 = 0.02;
/// Parameters are whole numbers.
const HALF: f64 = 0.5;

/// One model of a pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// One variant for each block of the parent.
    pub candidate: Candidate,
    /// The blocks that are left.
    pub blocks: Vec<BlockShape>,
    /// Parameters in all: blocks, embedding, head and norms.
    pub parameters: u64,
    /// What it will cost, with standard errors.
    pub prediction: Prediction,
}

/// Two models that are equal in one thing and as far apart as can be in another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// The one with less: milliseconds, or parameters.
    pub less: Shape,
    /// The one with more.
    pub more: Shape,
    /// more / less.
    pub ratio: f64,
}

/// What a table says of shapes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shapes {
    /// What the times are true for.
    pub target: CostKey,
    /// What is asked of the served models.
    pub workload: Workload,
    /// The fastest and the slowest of equally many parameters, the fewest parameters first.
    pub equal_parameters: Vec<Pair>,
    /// The smallest and the largest of equal latency, the fastest first.
    pub equal_latency: Vec<Pair>,
}

/// Pairs of models of the sizes that the table has; `memory` says how weights and state are stored.
///
/// # Errors
/// When the table does not hold the parent's own blocks at the workload's loads, or the parent has no positions for it.
pub fn shapes(
    parent: &Architecture,
    table: &CostTable,
    workload: &Workload,
    memory: MemoryModel,
    extrapolate: bool,
) -> Result<Shapes> {
    workload.has_positions(parent)?;
    let mut model = CostModel::new(table, workload, parent, memory, None)?;
    if extrapolate {
        model = model.extrapolating()?;
    }
    let asking = Asking::new(parent, table, &model)?;
    Ok(Shapes {
        target: table.key.clone(),
        workload: *workload,
        equal_parameters: asking.pairs(Metric::BlockParameters, Metric::Latency)?,
        equal_latency: asking.pairs(Metric::Latency, Metric::BlockParameters)?,
    })
}

struct Asking<'a> {
    parent: &'a Architecture,
    model: &'a CostModel,
    variants: Vec<Vec<Variant>>,
    costs: Vec<Vec<Costs>>,
}

impl<'a> Asking<'a> {
    fn new(parent: &'a Architecture, table: &CostTable, model: &'a CostModel) -> Result<Self> {
        // Of these some may have been timed under the loads of other workloads alone.
        let (variants, _) = priced(parent, &sizes(parent, table), model)?;
        let mut prices = Prices::new(model);
        let mut costs = Vec::with_capacity(variants.len());
        for (block, variants) in parent.blocks.iter().zip(&variants) {
            let each = variants.iter().map(|variant| {
                let left = block.shape.with_variant(variant).map_err(Error::Shape)?;
                Ok(prices.of(left.as_ref())?.costs)
            });
            costs.push(each.collect::<Result<Vec<_>>>()?);
        }
        Ok(Self {
            parent,
            model,
            variants,
            costs,
        })
    }

    /// Pairs that are equal in `equal` and differ in `other`.
    #[allow(clippy::cast_precision_loss)] // a handful of values
    fn pairs(&self, equal: Metric, other: Metric) -> Result<Vec<Pair>> {
        let ends = |pick: fn(f64, f64) -> f64| -> f64 {
            let blocks = self.costs.iter().map(|block| {
                let values = block.iter().map(|costs| costs.get(equal));
                values.reduce(pick).unwrap_or(0.0)
            });
            blocks.sum()
        };
        let (least, most) = (ends(f64::min), ends(f64::max));
        let at = |step: usize| least + (most - least) * step as f64 / VALUES as f64;
        let mut pairs = Vec::with_capacity(VALUES);
        for step in 1..=VALUES {
            let Some(less) = self.extreme(other, false, equal, (at(step - 1), at(step)))? else {
                continue;
            };
            let own = self.sum(&less, equal);
            let mut more = None;
            if equal == Metric::BlockParameters {
                more = self.extreme(other, true, equal, (own - HALF, own + HALF))?;
            }
            if more.is_none() {
                more = self.extreme(other, true, equal, (own * (1.0 - EQUAL), own * (1.0 + EQUAL)))?;
            }
            let Some(more) = more else { continue };
            let (less, more) = (self.shape(&less)?, self.shape(&more)?);
            if equal == Metric::Latency && are_apart(&less, &more) {
                continue;
            }
            let value = |shape: &Shape| match other {
                Metric::BlockParameters => shape.parameters as f64,
                _ => shape.prediction.figures.get(other).unwrap_or(0.0),
            };
            pairs.push(Pair {
                ratio: value(&more) / value(&less),
                less,
                more,
            });
        }
        Ok(pairs)
    }

    /// The choice with the least or the most of `other` whose blocks have a sum of `equal` inside `range`.
    fn extreme(
        &self,
        other: Metric,
        most: bool,
        equal: Metric,
        range: (f64, f64),
    ) -> Result<Option<Vec<usize>>> {
        let groups = self.costs.iter().map(|block| {
            let largest = block.iter().map(|costs| costs.get(other)).fold(0.0, f64::max);
            let items = block.iter().map(|costs| {
                let (value, used) = (costs.get(other), costs.get(equal));
                Item {
                    cost: if most { largest - value } else { value },
                    uses: vec![used, -used],
                }
            });
            items.collect()
        });
        let problem = Problem {
            groups: groups.collect(),
            limits: vec![range.1, -range.0],
        };
        let options = Options {
            relative_gap: 1e-3,
            work: 4_000_000,
        };
        Ok(match solve(&problem, &options)? {
            Solved::Found(solution) => Some(solution.chosen),
            Solved::Infeasible(_) => None,
        })
    }

    /// Sum over blocks.
    fn sum(&self, chosen: &[usize], metric: Metric) -> f64 {
        let picked = self.costs.iter().zip(chosen);
        picked
            .filter_map(|(block, &variant)| block.get(variant))
            .map(|costs| costs.get(metric))
            .sum()
    }

    fn shape(&self, chosen: &[usize]) -> Result<Shape> {
        let picked = self.variants.iter().zip(chosen);
        let variants = picked.map(|(block, &variant)| block.get(variant).cloned().unwrap_or(Variant::Whole));
        let candidate = Candidate {
            variants: variants.collect(),
        };
        let architecture = self.parent.with_candidate(&candidate)?;
        Ok(Shape {
            candidate,
            parameters: architecture.parameters().total,
            prediction: self.model.predict(&architecture)?,
            blocks: architecture.blocks.into_iter().map(|block| block.shape).collect(),
        })
    }
}

/// Whether the host makes the latencies of models with equal sums unequal.
fn are_apart(one: &Shape, other: &Shape) -> bool {
    let latency = |shape: &Shape| shape.prediction.figures.latency_ms.unwrap_or(0.0);
    let (one, other) = (latency(one), latency(other));
    (one - other).abs() > MOST_APART * one.min(other)
}

/// The sizes of each block that a table has times of, whole first; the later half of each kind may be left out.
fn sizes(parent: &Architecture, table: &CostTable) -> Vec<Vec<Variant>> {
    let mut measured: Vec<&BlockShape> = Vec::new();
    for row in &table.rows {
        if let Subject::Block(shape) = &row.subject
            && !measured.contains(&shape)
        {
            measured.push(shape);
        }
    }
    let count = |kind: BlockKind, blocks: &[espalier_arch::Block]| {
        blocks.iter().filter(|block| block.shape.kind() == kind).count()
    };
    let each = parent.blocks.iter().enumerate().map(|(index, block)| {
        let smaller = measured.iter().filter_map(|shape| {
            let variant = match (&block.shape, shape) {
                (BlockShape::Mlp(whole), BlockShape::Mlp(part)) if part.channels < whole.channels => {
                    Variant::Mlp {
                        channels: part.channels,
                    }
                }
                (BlockShape::Attention(whole), BlockShape::Attention(part))
                    if part.kv_groups < whole.kv_groups =>
                {
                    Variant::Attention {
                        kv_groups: part.kv_groups,
                    }
                }
                _ => return None,
            };
            let left = block.shape.with_variant(&variant).ok().flatten();
            (left.as_ref() == Some(*shape)).then_some(variant)
        });
        let mut variants: Vec<Variant> = std::iter::once(Variant::Whole).chain(smaller).collect();
        let kind = block.shape.kind();
        let before = count(kind, parent.blocks.get(..index).unwrap_or_default());
        if before >= count(kind, &parent.blocks).div_ceil(2) {
            variants.push(Variant::Skip);
        }
        variants
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fixtures::{f32, prompts, small};

    #[test]
    fn pairs_are_equal_in_one_thing_far_apart_in_the_other_and_keep_half_of_each_kind() {
        let (workload, table) = prompts();
        let found = shapes(&small(), &table, &workload, f32(), false).unwrap();
        let kept =
            |shape: &Shape, kind: BlockKind| shape.blocks.iter().filter(|block| block.kind() == kind).count();
        for pair in found.equal_parameters.iter().chain(&found.equal_latency) {
            assert!(pair.ratio >= 1.0, "{pair:?}");
            for shape in [&pair.less, &pair.more] {
                assert!(kept(shape, BlockKind::Attention) >= 2 && kept(shape, BlockKind::Mlp) >= 2);
                let whole = small().with_candidate(&shape.candidate).unwrap().parameters();
                assert_eq!(shape.parameters, whole.total, "embedding and head are counted");
            }
        }
        let latency = |shape: &Shape| shape.prediction.figures.latency_ms.unwrap();
        assert!(!found.equal_parameters.is_empty());
        for pair in &found.equal_parameters {
            assert_eq!(pair.less.parameters, pair.more.parameters);
            assert!((pair.ratio - latency(&pair.more) / latency(&pair.less)).abs() < 1e-12);
        }
        assert!(!found.equal_latency.is_empty());
        for pair in &found.equal_latency {
            assert!(
                (latency(&pair.less) / latency(&pair.more) - 1.0).abs() < 2e-3,
                "{pair:?}"
            );
            assert!(pair.less.parameters <= pair.more.parameters);
        }
        assert!(
            found
                .equal_latency
                .iter()
                .any(|pair| pair.less.parameters < pair.more.parameters)
        );
    }

    #[test]
    fn models_of_equal_sums_that_the_host_makes_unequal_are_no_pair() {
        let (workload, mut table) = prompts();
        let latency = |shape: &Shape| shape.prediction.figures.latency_ms.unwrap();
        let alone = shapes(&small(), &table, &workload, f32(), false).unwrap();
        let has_other_count = |pair: &Pair| pair.less.blocks.len() != pair.more.blocks.len();
        assert!(alone.equal_latency.iter().any(has_other_count));
        // 1 ms and 7 for each block: more than any block takes on the device.
        for (subject, median_ms) in [(Subject::HostFloor, 1.0), (Subject::HostBlock, 7.0)] {
            let row = crate::CostRow {
                subject,
                median_ms,
                ..table.rows[0].clone()
            };
            table.rows.push(row);
        }
        let found = shapes(&small(), &table, &workload, f32(), false).unwrap();
        for pair in &found.equal_latency {
            let (less, more) = (latency(&pair.less), latency(&pair.more));
            assert!((less / more - 1.0).abs() <= 0.02, "{less} ms and {more} ms");
            assert!(!has_other_count(pair));
        }
        assert!(found.equal_latency.len() < alone.equal_latency.len());
        assert_eq!(found.equal_parameters.len(), alone.equal_parameters.len());
    }

    #[test]
    fn a_workload_beyond_the_parents_positions_is_refused() {
        let (mut workload, table) = prompts();
        workload.prompt_tokens = 256;
        let message = shapes(&small(), &table, &workload, f32(), true)
            .unwrap_err()
            .to_string();
        assert!(message.contains("is 257, expected at most 256"), "{message}");
    }

    #[test]
    fn a_size_that_was_timed_for_another_workload_alone_is_left_out() {
        let (workload, mut table) = prompts();
        let narrow = Subject::Block(crate::fixtures::mlp(32));
        for row in table.rows.iter_mut().filter(|row| row.subject == narrow) {
            row.point = crate::Point::Prefill {
                tokens: 8,
                sequences: 1,
            };
        }
        let found = shapes(&small(), &table, &workload, f32(), false).unwrap();
        assert!(!found.equal_parameters.is_empty());
        let halved = Variant::Mlp { channels: 32 };
        for pair in found.equal_parameters.iter().chain(&found.equal_latency) {
            for shape in [&pair.less, &pair.more] {
                assert!(!shape.candidate.variants.contains(&halved), "{shape:?}");
            }
        }
    }
}
