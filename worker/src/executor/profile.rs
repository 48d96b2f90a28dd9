//! Profile: every block shape and the base at every point, and the whole parent under the workload, all
//! interleaved round by round, so that whatever disturbs the machine disturbs them alike. What earlier jobs measured on
//! this very target is not measured again.

use espalier_proto::task::{Profile, Profiled};
use espalier_search::{Kept, WholeParent, merged};

use super::{Caches, Context, measure};
use crate::Result;
use crate::engine::Engine;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Profile) -> Result<Profiled> {
    caches.clear();
    measure::on(task.engine, context, caches, |engine| beyond_kept(engine, task))
}

fn beyond_kept(engine: &mut dyn Engine, task: &Profile) -> Result<Profiled> {
    let key = engine.key(task.architecture.hidden);
    let Some(kept) = task.kept.iter().find(|kept| kept.key == key) else {
        return engine.profile(task);
    };
    let missing = kept.missing(&task.shapes, task.architecture.vocab_size, &task.points);
    match &kept.parent {
        Some(parent) if missing.is_empty() => {
            tracing::info!(rows = kept.rows.len(), "everything was measured by earlier jobs");
            Ok(Profiled {
                key,
                rows: kept.rows.clone(),
                parent: WholeParent::Measured(parent.clone()),
                memory: kept.memory,
            })
        }
        _ => {
            tracing::info!(
                shapes = missing.len(),
                "only what earlier jobs did not measure is measured"
            );
            let rest = Profile {
                shapes: missing,
                ..task.clone()
            };
            Ok(joined(kept, engine.profile(&rest)?))
        }
    }
}

fn joined(kept: &Kept, measured: Profiled) -> Profiled {
    Profiled {
        rows: merged(&kept.rows, &measured.rows),
        memory: measured.memory.or(kept.memory),
        ..measured
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use espalier_arch::{Activation, Architecture, BlockShape, Family, Mlp};
    use espalier_proto::task::Serving;
    use espalier_search::{CostKey, CostRow, Measurement, Mode, Point, Shortage, Subject, Summary, Workload};

    use super::*;
    use crate::engine::{Opened, Sample, Subject as Model};

    /// Measures a millisecond for whatever it is asked, and remembers which shapes those were.
    #[derive(Default)]
    struct Counting {
        asked: Vec<BlockShape>,
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
        }
    }

    fn row(subject: Subject, point: Point) -> CostRow {
        CostRow {
            subject,
            point,
            median_ms: 1.0,
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
            let rows = subjects
                .flat_map(|subject| task.points.iter().map(move |point| row(subject.clone(), *point)));
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
            })
        }

        fn open(&mut self, _: &Model<'_>, _: &Workload, _: usize) -> Result<Opened> {
            panic!("a profile opens what it needs itself")
        }

        fn shortage(&self, _: &Model<'_>, _: &Workload) -> Result<Shortage> {
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
    fn a_second_profile_of_the_same_target_measures_nothing_and_a_wider_one_what_is_new() {
        let mut engine = Counting::default();
        let first = beyond_kept(&mut engine, &task(vec![mlp(4), mlp(8)], Vec::new())).unwrap();
        assert_eq!(engine.asked, [mlp(4), mlp(8)]);
        engine.asked.clear();
        let kept = vec![kept_of(&first)];
        let second = beyond_kept(&mut engine, &task(vec![mlp(4), mlp(8)], kept.clone())).unwrap();
        assert!(engine.asked.is_empty());
        assert_eq!(second, first);
        let third = beyond_kept(&mut engine, &task(vec![mlp(4), mlp(6), mlp(8)], kept)).unwrap();
        assert_eq!(engine.asked, [mlp(6)]);
        assert_eq!(third.rows.len(), 4 * 2);
    }

    #[test]
    fn what_was_measured_on_another_target_counts_for_nothing() {
        let mut engine = Counting::default();
        let first = beyond_kept(&mut engine, &task(vec![mlp(4)], Vec::new())).unwrap();
        let mut other = kept_of(&first);
        other.key.device = "another".to_owned();
        engine.asked.clear();
        beyond_kept(&mut engine, &task(vec![mlp(4)], vec![other])).unwrap();
        assert_eq!(engine.asked, [mlp(4)]);
    }
}
