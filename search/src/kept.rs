//! What earlier jobs measured of a target, so that a later one measures only what is missing.

use espalier_arch::BlockShape;
use serde::{Deserialize, Serialize};

use crate::{CostKey, CostRow, EngineMemory, Measurement, Point, Subject};

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
        let lacks = |subject: &Subject| {
            points.iter().any(|point| {
                let mut rows = self.rows.iter();
                !rows.any(|row| row.point == *point && row.subject == *subject)
            })
        };
        let lacking = shapes
            .iter()
            .filter(|shape| lacks(&Subject::Block((*shape).clone())));
        let mut missing: Vec<BlockShape> = lacking.cloned().collect();
        // A table that tells the host's part has to tell it at every point.
        let hosted = self.rows.iter().any(|row| row.subject == Subject::HostFloor);
        let whole = self.parent.is_some()
            && !lacks(&Subject::Base { vocab_size })
            && !(hosted && lacks(&Subject::HostFloor));
        if missing.is_empty() && !whole {
            missing.extend(shapes.first().cloned());
        }
        missing
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
    fn what_was_measured_again_replaces_what_was_known() {
        let (kept, _) = kept();
        let mut newer = kept.rows[1].clone();
        newer.median_ms = 9.0;
        let rows = merged(&kept.rows, &[newer.clone()]);
        assert_eq!(rows.len(), kept.rows.len());
        assert_eq!(rows.last(), Some(&newer));
    }
}
