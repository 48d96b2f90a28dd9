//! The uniform (Minitron-like) grid: every layer of one size, whole layers dropped in a given order.

use espalier_arch::{Architecture, BlockShape, Candidate, Variant};
use serde::{Deserialize, Serialize};

use crate::running::roomiest;
use crate::{AbsoluteLimit, CostModel, Prediction, Result, Space};

/// One point of the grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GridPoint {
    /// The same variant for every attention block and for every MLP block, skip for dropped layers.
    pub candidate: Candidate,
    /// Key/value groups of every attention block that stays, at the most.
    pub kv_groups: usize,
    /// Channels of every MLP block that stays, at the most.
    pub channels: usize,
    /// Layers dropped, in the order of dropping.
    pub dropped: Vec<usize>,
    /// What it will cost, with as many sequences running together as leave most room.
    pub prediction: Prediction,
    /// The largest share of a limit that it uses.
    pub fill: f64,
}

/// For each number of key/value groups and of dropped layers the widest MLP inside every limit (timed ones
/// less `margin`): the `most` of these that fill their limits best, the best filled first. A point that
/// another is at least as large as along every axis is left out. Empty when nothing is inside.
///
/// # Errors
/// When the search space does not fit the parent or the cost table lacks a shape.
pub fn grid(
    parent: &Architecture,
    space: &Space,
    depth_order: &[usize],
    model: &mut CostModel,
    limits: &[AbsoluteLimit],
    margin: f64,
    most: usize,
) -> Result<Vec<GridPoint>> {
    let (counts, widths) = axes(parent, space)?;
    let aimed: Vec<AbsoluteLimit> = limits.iter().map(|limit| aim(limit, margin)).collect();
    let mut points: Vec<GridPoint> = Vec::new();
    for dropped in (0..=depth_order.len()).filter_map(|count| depth_order.get(..count)) {
        for &kv_groups in &counts {
            for &channels in &widths {
                let candidate = candidate(parent, kv_groups, channels, dropped);
                let architecture = parent.with_candidate(&candidate)?;
                if model.needs_attention() && !has_attention(&architecture) {
                    continue;
                }
                let Some((_, prediction)) = roomiest(model, &architecture, &aimed)? else {
                    continue;
                };
                let Some(fill) = filled(&prediction, &aimed) else {
                    continue;
                };
                let dropped = dropped.to_vec();
                points.push(GridPoint {
                    candidate,
                    kv_groups,
                    channels,
                    dropped,
                    prediction,
                    fill,
                });
                break;
            }
        }
    }
    let covered = |point: &GridPoint| {
        points.iter().any(|other| {
            other != point
                && other.kv_groups >= point.kv_groups
                && other.channels >= point.channels
                && other.dropped.len() <= point.dropped.len()
        })
    };
    let mut kept: Vec<GridPoint> = points.iter().filter(|point| !covered(point)).cloned().collect();
    kept.sort_by(|a, b| b.fill.total_cmp(&a.fill));
    kept.truncate(most);
    Ok(kept)
}

/// A timed limit with a margin to spare; one that asks for a confidence has its own.
pub fn aim(limit: &AbsoluteLimit, margin: f64) -> AbsoluteLimit {
    if !limit.metric.is_timed() || limit.confidence.is_some() {
        return *limit;
    }
    let value = if limit.metric.more_is_better() {
        limit.value / (1.0 - margin)
    } else {
        limit.value * (1.0 - margin)
    };
    AbsoluteLimit { value, ..*limit }
}

/// The largest share of a limit that is used, when all are kept.
pub(crate) fn filled(prediction: &Prediction, limits: &[AbsoluteLimit]) -> Option<f64> {
    let mut fill: f64 = 0.0;
    for limit in limits {
        let value = prediction.figures.get(limit.metric)?;
        if !limit.admits_prediction(prediction) {
            return None;
        }
        fill = fill.max(limit.use_of(value));
    }
    Some(fill)
}

fn has_attention(architecture: &Architecture) -> bool {
    let mut blocks = architecture.blocks.iter();
    blocks.any(|block| matches!(block.shape, BlockShape::Attention(_)))
}

/// KV counts and MLP widths, each from the whole down.
fn axes(parent: &Architecture, space: &Space) -> Result<(Vec<usize>, Vec<usize>)> {
    let mut counts = Vec::new();
    let mut widths = Vec::new();
    for block in &parent.blocks {
        match &block.shape {
            BlockShape::Attention(attention) => {
                counts.push(attention.kv_groups);
                counts.extend(space.kv_counts(attention)?);
            }
            BlockShape::Mlp(mlp) => {
                widths.push(mlp.channels);
                widths.extend(space.widths(mlp)?);
            }
            BlockShape::Mamba2(_) | BlockShape::Moe(_) => {}
        }
    }
    for axis in [&mut counts, &mut widths] {
        axis.sort_unstable_by(|a, b| b.cmp(a));
        axis.dedup();
        if axis.is_empty() {
            axis.push(0);
        }
    }
    Ok((counts, widths))
}

fn candidate(parent: &Architecture, kv_groups: usize, channels: usize, dropped: &[usize]) -> Candidate {
    let variants = parent.blocks.iter().map(|block| match &block.shape {
        _ if dropped.contains(&block.layer) => Variant::Skip,
        BlockShape::Attention(attention) if kv_groups < attention.kv_groups => {
            Variant::Attention { kv_groups }
        }
        BlockShape::Mlp(mlp) if channels < mlp.channels => Variant::Mlp { channels },
        _ => Variant::Whole,
    });
    Candidate {
        variants: variants.collect(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::Metric;
    use crate::fixtures::{f32, prompts, small};

    /// (KV groups, channels, dropped layers) of each point, when layer 1 may be dropped.
    fn kept(latency_ms: f64, margin: f64, most: usize) -> Vec<(usize, usize, Vec<usize>)> {
        let (workload, table) = prompts();
        let mut model = CostModel::new(&table, &workload, &small(), f32(), None).unwrap();
        let space = Space {
            mlp_grid: Some(32),
            ..Space::default()
        };
        let limits = [AbsoluteLimit::new(Metric::Latency, latency_ms)];
        let points = grid(&small(), &space, &[1], &mut model, &limits, margin, most).unwrap();
        let points = points.into_iter();
        points
            .map(|point| (point.kv_groups, point.channels, point.dropped))
            .collect()
    }

    #[test]
    fn the_grid_holds_the_largest_points_inside_the_limit_the_fullest_first() {
        // 3 · (4 + 3) + 1 = 22 ms, and 2 · (4 + 6) + 1 = 21 ms; each is larger than the other along one axis.
        assert_eq!(kept(22.0, 0.0, 9), [(2, 32, vec![]), (2, 64, vec![1])]);
        assert_eq!(kept(22.0, 0.0, 1), [(2, 32, vec![])]);
    }

    #[test]
    fn a_margin_moves_the_grid_inside() {
        // At most 19.8 ms: 2 · (2 + 6) + 1 = 17, 3 · (2 + 3) + 1 = 16 and 2 · (4 + 3) + 1 = 15.
        assert_eq!(
            kept(22.0, 0.1, 9),
            [(1, 64, vec![1]), (1, 32, vec![]), (2, 32, vec![1])]
        );
    }

    #[test]
    fn nothing_inside_gives_an_empty_grid() {
        assert!(kept(10.0, 0.0, 9).is_empty());
    }

    #[test]
    fn a_margin_raises_a_floor_lowers_a_ceiling_and_leaves_memory_alone() {
        let aimed = |metric| aim(&AbsoluteLimit::new(metric, 100.0), 0.2).value;
        assert_eq!(aimed(Metric::Throughput), 125.0);
        assert_eq!(aimed(Metric::Latency), 80.0);
        assert_eq!(aimed(Metric::Memory), 100.0);
    }
}
