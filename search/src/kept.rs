//! What earlier jobs measured of a target, so that a later one measures only what is missing.

use espalier_arch::BlockShape;
use serde::{Deserialize, Serialize};

use crate::{CostKey, CostRow, EngineMemory, Measurement, Point, Subject};

/// Blocks that take longer or shorter by more than this share say that the machine runs at another pace.
const OTHER_PACE: f64 = 0.05;

/// What earlier jobs measured of one target, as far as a profile has use for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// What it is true for.
    pub key: CostKey,
    /// Rows of shapes and points that are asked for.
    pub rows: Vec<CostRow>,
    /// The parent whole under the workload, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Measurement>,
    /// What the engine needs and rounds, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<EngineMemory>,
}

impl Kept {
    /// Shapes that still have to be timed: all that lack a row at any of the points. Where only the base or the parent
    /// is missing, one shape is timed again, because an engine times no base by itself.
    pub fn missing(&self, shapes: &[BlockShape], vocab_size: usize, points: &[Point]) -> Vec<BlockShape> {
        let lacking = shapes.iter().filter(|shape| !self.knows(shape, points));
        let mut missing: Vec<BlockShape> = lacking.cloned().collect();
        // A table that tells the host's part has to tell it at every point.
        let hosted = self.rows.iter().any(|row| row.subject == Subject::HostFloor);
        let whole = self.parent.is_some()
            && self.has(&Subject::Base { vocab_size }, points)
            && (!hosted || self.has(&Subject::HostFloor, points));
        if missing.is_empty() && !whole {
            missing.extend(shapes.first().cloned());
        }
        missing
    }

    /// Those of `shapes` that are known at all of these points: measured again beside what is missing, they tell whether
    /// what is known still holds.
    pub fn anchors(&self, shapes: &[BlockShape], points: &[Point]) -> Vec<BlockShape> {
        let known = shapes.iter().filter(|shape| self.knows(shape, points));
        known.cloned().collect()
    }

    fn knows(&self, shape: &BlockShape, points: &[Point]) -> bool {
        self.has(&Subject::Block(shape.clone()), points)
    }

    fn has(&self, subject: &Subject, points: &[Point]) -> bool {
        points.iter().all(|point| {
            let mut rows = self.rows.iter();
            rows.any(|row| row.point == *point && row.subject == *subject)
        })
    }

    /// How much longer blocks take at some point than was known, where that is beyond doubt another pace: the rows of two
    /// paces make no one table. 1.2 where they take a fifth longer.
    pub fn other_pace(&self, newer: &[CostRow]) -> Option<f64> {
        let mut points: Vec<Point> = newer.iter().map(|row| row.point).collect();
        points.sort();
        points.dedup();
        let paces = points.into_iter().filter_map(|point| {
            let (mut before, mut now, mut variance) = (0.0, 0.0, 0.0);
            let blocks = newer
                .iter()
                .filter(|row| row.point == point && matches!(row.subject, Subject::Block(_)));
            for new in blocks {
                let mut known = self.rows.iter();
                let Some(old) = known.find(|old| old.point == point && old.subject == new.subject) else {
                    continue;
                };
                before += old.median_ms;
                now += new.median_ms;
                variance += old.error_ms().powi(2) + new.error_ms().powi(2);
            }
            let beyond_doubt = (now - before).abs() - 2.0 * variance.sqrt();
            (beyond_doubt > OTHER_PACE * before).then_some((beyond_doubt, now / before))
        });
        let farthest = paces.max_by(|one, other| one.0.total_cmp(&other.0));
        farthest.map(|(_, pace)| pace)
    }
}

/// `newer` rows, and those of `older` that they do not say anew.
pub fn merged(older: &[CostRow], newer: &[CostRow]) -> Vec<CostRow> {
    let said = |row: &CostRow| {
        let mut rows = newer.iter();
        rows.any(|new| new.point == row.point && new.subject == row.subject)
    };
    let left = older.iter().filter(|row| !said(row)).cloned();
    left.chain(newer.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{attention, mlp, prompts};
    use crate::{Summary, Workload};

    fn kept() -> (Kept, Workload) {
        let (workload, table) = prompts();
        let summary = Summary {
            median: 1.0,
            spread: 0.0,
            samples: Vec::new(),
        };
        let kept = Kept {
            key: table.key,
            rows: table.rows,
            parent: Some(Measurement {
                latency_ms: summary.clone(),
                first_token_ms: summary.clone(),
                per_token_ms: summary.clone(),
                throughput_tokens_per_second: summary,
                memory_bytes: 1,
            }),
            memory: None,
        };
        (kept, workload)
    }

    #[test]
    fn only_what_lacks_a_row_is_measured_and_nothing_where_all_is_there() {
        let (mut kept, workload) = kept();
        let points = crate::points(&workload).unwrap_or_default();
        let shapes = [attention(2), attention(1), mlp(64), mlp(32)];
        assert!(kept.missing(&shapes, 100, &points).is_empty());
        let more = [&shapes[..], &[mlp(96)]].concat();
        assert_eq!(kept.missing(&more, 100, &points), [mlp(96)]);
        let farther = [
            &points[..],
            &[Point::Decode {
                context: 4,
                sequences: 1,
            }],
        ];
        assert_eq!(kept.missing(&shapes, 100, &farther.concat()), shapes);
        // Another vocabulary is another base, and a parent that was not measured has to be.
        assert_eq!(kept.missing(&shapes, 101, &points), [attention(2)]);
        // One that tells the host's part somewhere has to tell it at these points.
        let floor = |point: Point| CostRow {
            subject: Subject::HostFloor,
            point,
            ..kept.rows[0].clone()
        };
        let (here, elsewhere) = (floor(points[0]), floor(farther[1][0]));
        kept.rows.push(elsewhere);
        assert_eq!(kept.missing(&shapes, 100, &points), [attention(2)]);
        kept.rows.push(here);
        assert!(kept.missing(&shapes, 100, &points).is_empty());
        kept.rows.pop();
        kept.rows.pop();
        kept.parent = None;
        assert_eq!(kept.missing(&shapes, 100, &points), [attention(2)]);
    }

    #[test]
    fn another_pace_is_told_from_scatter_and_from_shapes_that_are_new() {
        let (kept, _) = kept();
        let at = |factor: f64, spread: f64| -> Vec<CostRow> {
            let longer = kept.rows.iter().cloned().map(|mut row| {
                row.median_ms *= factor;
                row.spread_ms = spread * row.median_ms;
                row
            });
            longer.collect()
        };
        assert_eq!(kept.other_pace(&at(1.04, 0.0)), None);
        let pace = kept.other_pace(&at(1.2, 0.0)).unwrap_or_default();
        assert!((pace - 1.2).abs() < 1e-9, "{pace}");
        let pace = kept.other_pace(&at(0.8, 0.0)).unwrap_or_default();
        assert!((pace - 0.8).abs() < 1e-9, "{pace}");
        assert_eq!(kept.other_pace(&at(1.2, 0.5)), None, "it scatters as much");
        let new: Vec<CostRow> = at(1.2, 0.0)
            .into_iter()
            .map(|mut row| {
                row.subject = Subject::Block(mlp(96));
                row
            })
            .collect();
        assert_eq!(kept.other_pace(&new), None);
    }

    #[test]
    fn what_was_measured_again_replaces_what_was_known() {
        let (kept, _) = kept();
        let mut newer = kept.rows[1].clone();
        newer.median_ms = 9.0;
        let rows = merged(&kept.rows, &[newer.clone()]);
        assert_eq!(rows.len(), kept.rows.len());
        assert_eq!(rows.last(), Some(&newer));
    }
}
