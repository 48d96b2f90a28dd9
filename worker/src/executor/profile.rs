//! Profile: every block shape and the base at every point, and the whole parent under the workload, all
//! interleaved round by round, so that whatever disturbs the machine disturbs them alike. What earlier jobs measured on
//! this very target is not measured again, save a few shapes that tell whether it still holds, one at least.

use espalier_arch::BlockShape;
use espalier_proto::task::{Profile, Profiled};
use espalier_search::{Kept, Point, merged};

use super::{Caches, Context, measure};
use crate::Result;
use crate::engine::Engine;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Profile) -> Result<Profiled> {
    caches.clear();
    let found = measure::on(task.engine, context, caches, |engine| beyond_kept(engine, task))?;
    match found {
        Some(profiled) => Ok(profiled),
        // In an engine that has nothing open, as memory is measured too.
        None => measure::on(task.engine, context, caches, |engine| engine.profile(task)),
    }
}

/// What earlier jobs measured and, measured now, what they did not; none where what they measured holds no more.
fn beyond_kept(engine: &mut dyn Engine, task: &Profile) -> Result<Option<Profiled>> {
    let key = engine.key(task.architecture.hidden);
    let Some(kept) = task.kept.iter().find(|kept| kept.key == key) else {
        return engine.profile(task).map(Some);
    };
    let missing = kept.missing(&task.shapes, task.architecture.vocab_size, &task.points);
    if missing.len() == task.shapes.len() {
        // All of it is measured now, so that this job does not mind at which pace it was before; others do.
        let (shapes, points) = kept.compared(&task.shapes, &task.points);
        return engine.profile(&anew(task, shapes, points)).map(Some);
    }
    let mut anchors = anchors(kept, task);
    if missing.is_empty() {
        anchors.truncate(1);
    }
    let mut shapes = missing;
    for shape in anchors {
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    tracing::info!(
        shapes = shapes.len(),
        "only what earlier jobs did not measure is measured, and what tells whether theirs still holds"
    );
    let measured = engine.profile(&anew(task, shapes, task.points.clone()))?;
    if let Some(pace) = kept.other_pace(&measured.rows) {
        tracing::warn!(
            pace,
            "what earlier jobs measured takes another time now: everything is measured anew"
        );
        return Ok(None);
    }
    Ok(Some(joined(kept, measured)))
}

/// The task for these shapes at these points, whatever is known of them.
fn anew(task: &Profile, shapes: Vec<BlockShape>, points: Vec<Point>) -> Profile {
    Profile {
        shapes,
        points,
        kept: Vec::new(),
        ..task.clone()
    }
}

/// Shapes to measure again: the parent's own, of which most of its time is; any other that is known where none of them is.
fn anchors(kept: &Kept, task: &Profile) -> Vec<BlockShape> {
    let mut own: Vec<BlockShape> = Vec::new();
    for block in &task.architecture.blocks {
        if !own.contains(&block.shape) {
            own.push(block.shape.clone());
        }
    }
    let mut anchors = kept.anchors(&own, &task.points);
    if anchors.is_empty() {
        anchors = kept.anchors(&task.shapes, &task.points);
        anchors.truncate(1);
    }
    anchors
}

fn joined(kept: &Kept, measured: Profiled) -> Profiled {
    let rows = merged(&kept.rows, &measured.rows);
    Profiled {
        // Those that were measured now come last.
        reused_rows: rows.len().saturating_sub(measured.rows.len()),
        rows,
        memory: measured.memory.or(kept.memory),
        ..measured
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use espalier_arch::{Activation, Architecture, BlockShape, Family, Mlp};
    use espalier_proto::task::Serving;
    use espalier_search::{
        CostKey, CostRow, Measurement, Mode, Shortage, Subject, Summary, WholeParent, Workload,
    };

    use super::*;
    use crate::engine::{Opened, Sample, Subject as Model};

    /// Measures the same for whatever it is asked, a millisecond at first, and remembers which shapes those were.
    struct Counting {
        asked: Vec<BlockShape>,
        milliseconds: f64,
    }

    impl Default for Counting {
        fn default() -> Self {
            Self {
                asked: Vec::new(),
                milliseconds: 1.0,
            }
        }
    }

    fn key() -> CostKey {
        CostKey {
            device: "d".to_owned(),
            engine: "builtin".to_owned(),
            engine_version: "0".to_owned(),
            precision: "f32".to_owned(),
            hidden: 8,
            parallelism: 1,
            mode: Mode::Eager,
            environment: std::collections::BTreeMap::new(),
        }
    }

    fn row(subject: Subject, point: Point, median_ms: f64) -> CostRow {
        CostRow {
            subject,
            point,
            median_ms,
            spread_ms: 0.0,
            repeats: 3,
        }
    }

    impl Engine for Counting {
        fn key(&self, _: usize) -> CostKey {
            key()
        }

        fn profile(&mut self, task: &Profile) -> Result<Profiled> {
            self.asked.extend(task.shapes.clone());
            let base = Subject::Base {
                vocab_size: task.architecture.vocab_size,
            };
            let subjects = task.shapes.iter().cloned().map(Subject::Block).chain([base]);
            let milliseconds = self.milliseconds;
            let rows = subjects.flat_map(|subject| {
                let points = task.points.iter();
                points.map(move |point| row(subject.clone(), *point, milliseconds))
            });
            let once = Summary {
                median: 1.0,
                spread: 0.0,
                samples: vec![1.0],
            };
            Ok(Profiled {
                key: key(),
                rows: rows.collect(),
                parent: WholeParent::Measured(Measurement {
                    latency_ms: once.clone(),
                    first_token_ms: once.clone(),
                    per_token_ms: once.clone(),
                    throughput_tokens_per_second: once,
                    memory_bytes: 1,
                }),
                memory: None,
                reused_rows: 0,
                disturbed: false,
            })
        }

        fn open(&mut self, _: &Model<'_>, _: &Workload, _: usize) -> Result<Opened> {
            panic!("a profile opens what it needs itself")
        }

        fn shortage(&self, _: &Model<'_>, _: &Workload, _: usize) -> Result<Shortage> {
            panic!("there is room for all")
        }

        fn release(&mut self, _: Opened) -> Result<()> {
            panic!("nothing is open")
        }

        fn run(&mut self, _: Opened) -> Result<Sample> {
            panic!("nothing is open")
        }

        fn memory_bytes(&self, _: Opened) -> u64 {
            0
        }

        fn serving(&self, _: Opened) -> Option<Serving> {
            None
        }
    }

    fn mlp(channels: usize) -> BlockShape {
        BlockShape::Mlp(Mlp {
            channels,
            activation: Activation::SwiGlu,
            bias: false,
        })
    }

    fn task(shapes: Vec<BlockShape>, kept: Vec<Kept>) -> Profile {
        let workload = Workload {
            prompt_tokens: 4,
            output_tokens: 2,
            concurrency: 1,
        };
        Profile {
            architecture: Architecture {
                family: Family::Llama,
                vocab_size: 16,
                hidden: 8,
                layers: 0,
                blocks: Vec::new(),
                tied_embedding: true,
                norm_epsilon: 1e-5,
                max_positions: 16,
            },
            shapes,
            points: espalier_search::points(&workload).unwrap(),
            rounds: 3,
            workload,
            engine: espalier_proto::task::Engine::default(),
            kept,
        }
    }

    fn kept_of(profiled: &Profiled) -> Kept {
        Kept {
            key: profiled.key.clone(),
            rows: profiled.rows.clone(),
            parent: profiled.parent.measured().cloned(),
            memory: None,
        }
    }

    #[test]
    fn a_second_profile_of_the_same_target_measures_whether_that_still_holds_and_a_wider_one_what_is_new() {
        let mut engine = Counting::default();
        let first = beyond_kept(&mut engine, &task(vec![mlp(4), mlp(8)], Vec::new()))
            .unwrap()
            .unwrap();
        assert_eq!(engine.asked, [mlp(4), mlp(8)]);
        assert_eq!(first.reused_rows, 0);
        engine.asked.clear();
        let kept = vec![kept_of(&first)];
        let again = task(vec![mlp(4), mlp(8)], kept.clone());
        engine.milliseconds = 1.04;
        let second = beyond_kept(&mut engine, &again).unwrap().unwrap();
        assert_eq!(engine.asked, [mlp(4)], "one shape tells it");
        assert_eq!(second.rows.len(), first.rows.len());
        assert_eq!(second.reused_rows, 2, "of the other shape");
        assert_eq!(second.parent.measured().unwrap().memory_bytes, 1);
        engine.milliseconds = 1.2;
        assert_eq!(beyond_kept(&mut engine, &again).unwrap(), None, "it does not");
        engine.milliseconds = 1.0;
        engine.asked.clear();
        let third = beyond_kept(&mut engine, &task(vec![mlp(4), mlp(6), mlp(8)], kept))
            .unwrap()
            .unwrap();
        assert_eq!(engine.asked, [mlp(6), mlp(4)], "one that is known tells the pace");
        assert_eq!(third.rows.len(), 4 * 2);
        assert_eq!(third.reused_rows, 2, "of one shape");
        let known: Vec<Subject> = third.rows[..2].iter().map(|row| row.subject.clone()).collect();
        assert_eq!(known, [Subject::Block(mlp(8)), Subject::Block(mlp(8))]);
    }

    #[test]
    fn rows_of_a_faster_day_are_not_put_beside_todays() {
        let mut engine = Counting::default();
        let first = beyond_kept(&mut engine, &task(vec![mlp(4), mlp(8)], Vec::new())).unwrap();
        let kept = vec![kept_of(&first.unwrap())];
        let asked = task(vec![mlp(4), mlp(6), mlp(8)], kept);
        engine.milliseconds = 1.2;
        assert_eq!(beyond_kept(&mut engine, &asked).unwrap(), None);
        engine.milliseconds = 1.04;
        assert!(beyond_kept(&mut engine, &asked).unwrap().is_some());
        // The parent's own shapes tell it, where it has any that are known.
        let mut whole = asked.clone();
        whole.architecture.blocks = vec![espalier_arch::Block {
            layer: 0,
            shape: mlp(8),
        }];
        engine.asked.clear();
        beyond_kept(&mut engine, &whole).unwrap();
        assert_eq!(engine.asked, [mlp(6), mlp(8)]);
    }

    #[test]
    fn what_has_to_be_measured_whole_is_measured_once_whatever_pace_was_kept() {
        let mut engine = Counting::default();
        let shorter = Profile {
            points: espalier_search::points(&Workload {
                output_tokens: 1,
                ..task(Vec::new(), Vec::new()).workload
            })
            .unwrap(),
            ..task(vec![mlp(4), mlp(8)], Vec::new())
        };
        let first = beyond_kept(&mut engine, &shorter).unwrap().unwrap();
        engine.asked.clear();
        engine.milliseconds = 1.2;
        let longer = task(vec![mlp(4), mlp(8)], vec![kept_of(&first)]);
        let second = beyond_kept(&mut engine, &longer).unwrap().unwrap();
        assert_eq!(engine.asked, [mlp(4), mlp(8)]);
        assert!(second.rows.iter().all(|row| row.median_ms == 1.2));
        assert_eq!(second.reused_rows, 0);
    }

    #[test]
    fn what_is_measured_whole_beside_rows_of_other_points_tells_whether_those_hold() {
        let mut engine = Counting::default();
        let first = beyond_kept(&mut engine, &task(vec![mlp(4), mlp(8)], Vec::new()));
        let mut kept = kept_of(&first.unwrap().unwrap());
        let elsewhere = Point::Decode {
            context: 1,
            sequences: 1,
        };
        kept.rows.retain(|row| row.subject == Subject::Block(mlp(8)));
        kept.rows.truncate(1);
        kept.rows[0].point = elsewhere;
        engine.milliseconds = 1.2;
        let asked = task(vec![mlp(4), mlp(8)], vec![kept.clone()]);
        let second = beyond_kept(&mut engine, &asked).unwrap().unwrap();
        assert_eq!(second.rows.len(), 3 * (asked.points.len() + 1));
        assert!(second.rows.iter().any(|row| row.point == elsewhere));
        assert_eq!(kept.other_pace(&second.rows), Some(1.2));
        assert_eq!(second.reused_rows, 0);
    }

    #[test]
    fn what_was_measured_on_another_target_counts_for_nothing() {
        let mut engine = Counting::default();
        let first = beyond_kept(&mut engine, &task(vec![mlp(4)], Vec::new()))
            .unwrap()
            .unwrap();
        let mut other = kept_of(&first);
        other.key.device = "another".to_owned();
        engine.asked.clear();
        beyond_kept(&mut engine, &task(vec![mlp(4)], vec![other])).unwrap();
        assert_eq!(engine.asked, [mlp(4)]);
    }
}
