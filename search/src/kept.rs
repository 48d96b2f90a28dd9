//! What earlier jobs measured of a target, so that a later one measures only what is missing.

use espalier_arch::BlockShape;
use serde::{Deserialize, Serialize};

use crate::{CostKey, CostRow, EngineMemory, Measurement, Point, Subject};

/// Tokens that any engine computes and holds together without a thought.
const FEW_TOKENS: usize = 4096;
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

    /// What to time where all of these shapes are, so that it tells whether what is known still holds: where nothing of
    /// theirs is known at any of these points, one of them, or else another shape, at one point more.
    pub fn compared(&self, shapes: &[BlockShape], points: &[Point]) -> (Vec<BlockShape>, Vec<Point>) {
        let (mut all_shapes, mut all_points) = (shapes.to_vec(), points.to_vec());
        let known = self.rows.iter().filter_map(|row| Some((block(row)?, row.point)));
        let own = known.clone().filter(|(shape, _)| shapes.contains(shape));
        if own.clone().any(|(_, point)| points.contains(&point)) {
            return (all_shapes, all_points);
        }
        if let Some((shape, point)) = own.chain(known).next() {
            if !shapes.contains(shape) {
                all_shapes.push(shape.clone());
            }
            if !points.contains(&point) {
                all_points.push(point);
            }
        }
        (all_shapes, all_points)
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

/// Of rows that a profile of these shapes at these points does not ask for, those by which it tells whether they still hold
/// ([`Kept::compared`]): at the least of the points that are no burden beside its own, of its own shapes, or of one other.
pub fn telling(rows: &[CostRow], shapes: &[BlockShape], points: &[Point]) -> Vec<CostRow> {
    let (most_prompts, most_contexts) = tokens(points.iter().copied());
    let is_no_burden = |point: &Point| {
        let (prompts, contexts) = tokens(points.iter().copied().chain([*point]));
        prompts <= most_prompts.max(FEW_TOKENS) && contexts <= most_contexts.max(FEW_TOKENS)
    };
    let blocks = rows
        .iter()
        .filter(|row| block(row).is_some() && is_no_burden(&row.point));
    let own = blocks
        .clone()
        .filter(|row| block(row).is_some_and(|shape| shapes.contains(shape)));
    let weight = |row: &&CostRow| tokens([row.point]);
    if let Some(least) = own.clone().min_by_key(weight) {
        return own.filter(|row| row.point == least.point).cloned().collect();
    }
    blocks.min_by_key(weight).cloned().into_iter().collect()
}

/// Tokens that an engine that is to be timed at all of these points computes in one step, of prompts, and holds.
fn tokens(points: impl IntoIterator<Item = Point>) -> (usize, usize) {
    let (mut prompt, mut context, mut together) = (0, 0, 0);
    for point in points {
        let sequences = match point {
            Point::Prefill { tokens, sequences } => {
                prompt = prompt.max(tokens);
                context = context.max(tokens);
                sequences
            }
            Point::Decode {
                context: found,
                sequences,
            } => {
                context = context.max(found);
                sequences
            }
        };
        together = together.max(sequences);
    }
    (prompt.saturating_mul(together), context.saturating_mul(together))
}

fn block(row: &CostRow) -> Option<&BlockShape> {
    match &row.subject {
        Subject::Block(shape) => Some(shape),
        _ => None,
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
    fn a_profile_that_asks_for_nothing_that_is_known_is_told_what_tells_its_pace() {
        let (mut kept, _) = kept();
        let decode = |context: usize, sequences: usize| Point::Decode { context, sequences };
        let any = kept.rows[0].clone();
        let row = |shape: BlockShape, point: Point| CostRow {
            subject: Subject::Block(shape),
            point,
            ..any.clone()
        };
        let known = [
            row(mlp(64), decode(600, 1)),
            row(mlp(64), decode(200, 4)),
            row(mlp(32), decode(600, 1)),
            row(mlp(96), decode(200, 1)),
        ];
        let asked = [Point::Prefill {
            tokens: 1000,
            sequences: 1,
        }];
        let shapes = [mlp(64), mlp(32)];
        let told = telling(&known, &shapes, &asked);
        assert_eq!(
            told,
            [known[0].clone(), known[2].clone()],
            "all at its least point"
        );
        kept.rows = told;
        let (timed, points) = kept.compared(&shapes, &asked);
        assert_eq!((timed, points), (shapes.to_vec(), vec![asked[0], decode(600, 1)]));
        // Of other shapes one.
        let told = telling(&known, &[mlp(16)], &asked);
        assert_eq!(told, [known[3].clone()]);
        kept.rows = told;
        let (timed, points) = kept.compared(&[mlp(16)], &asked);
        assert_eq!(
            (timed, points),
            (vec![mlp(16), mlp(96)], vec![asked[0], decode(200, 1)])
        );
        // Four prompts of 2,000 tokens would be a burden, and so would a context of 6,000.
        let long = [Point::Prefill {
            tokens: 2000,
            sequences: 1,
        }];
        assert!(telling(&known[1..2], &shapes, &long).is_empty());
        assert!(telling(&[row(mlp(64), decode(6000, 1))], &shapes, &long).is_empty());
        // What is asked for and known at once is compared as it is.
        kept.rows = vec![row(mlp(64), asked[0]), row(mlp(64), decode(600, 1))];
        assert_eq!(kept.compared(&shapes, &asked), (shapes.to_vec(), asked.to_vec()));
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
