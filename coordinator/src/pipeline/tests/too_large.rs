//! Parents that their device has no room for.

use espalier_arch::Block;
use espalier_proto::task::{ArtifactId, TaskOutput, TaskSpec};
use espalier_search::{Metric, Shortage, WholeParent};

use super::world::*;
use crate::pipeline::*;
use crate::spec::{CostTableSource, Strategy};

const SHORTAGE: Shortage = Shortage {
    needed_bytes: 140 << 30,
    free_bytes: 79 << 30,
};

fn world() -> World {
    World {
        shortage: Some(SHORTAGE),
        ..World::default()
    }
}

#[test]
fn an_absolute_limit_is_met_without_the_parents_figure_and_the_outcome_says_why_there_is_none() {
    let mut world = world();
    let limits = r#"{"latency": "200ms", "memory": "2MiB", "block_parameters": "90%"}"#;
    let outcome = world.run(&spec(limits, BOTH)).unwrap();
    assert_eq!(outcome.parent.measurement, WholeParent::TooLarge(SHORTAGE));
    let [latency, memory, parameters] = &outcome.limits[..] else {
        panic!("{:?}", outcome.limits)
    };
    // The made-up worker counts no keys and values.
    for limit in [latency, memory] {
        assert!(
            limit.verified.inside && limit.verified.error.abs() < 0.01,
            "{limit:?}"
        );
        assert_eq!(
            (limit.parent, limit.verified.parent, limit.checked.parent),
            (None, None, None)
        );
    }
    assert_eq!((latency.limit, latency.verified.limit), (200.0, 200.0));
    // Parameters are counted, not measured.
    assert!(parameters.verified.inside && parameters.parent.is_some());

    let predicted = outcome.parent.prediction.figures.latency_ms.unwrap();
    let truly = measurement(&parent(), 1.0).latency_ms.median;
    assert!((predicted - truly).abs() < 1e-9, "{predicted} for {truly}");
    assert_eq!(
        outcome.parent_figure(latency),
        Metric::Latency.display(truly) + " predicted"
    );
    let why = "the parent does not fit this device (needs 140.0 GiB, has 79.0 GiB)";
    assert!(
        outcome.notes.iter().any(|note| note.starts_with(why)),
        "{:?}",
        outcome.notes
    );
    let again: Outcome = serde_json::from_str(&serde_json::to_string(&outcome).unwrap()).unwrap();
    assert_eq!(again, outcome);
}

#[test]
fn a_share_of_what_cannot_be_measured_is_refused_by_its_name_with_what_is_predicted() {
    for (limits, said) in [
        (
            r#"{"latency": "75%"}"#,
            "target.limits.latency: 75% is a share of what the parent measures, and the parent does not fit this device \
             (needs 140.0 GiB, has 79.0 GiB); give an absolute limit (306.0 ms is predicted of the parent)",
        ),
        (
            r#"{"latency": "250ms", "memory": "60%"}"#,
            "target.limits.memory: 60% is a share of what the parent measures",
        ),
    ] {
        let mut world = world();
        let error = world.run(&spec(limits, BOTH)).unwrap_err().to_string();
        assert!(error.starts_with(said), "{error}");
        assert!(!world.log.contains(&Stage::Score), "{:?}", world.log);
    }
}

#[test]
fn a_miss_corrects_the_table_and_drift_of_the_candidates_own_time_is_noise() {
    let mut world = World {
        bias: 1.2,
        drifts: vec![0.5, 0.0],
        ..world()
    };
    let outcome = world
        .run(&spec(r#"{"latency": "200ms"}"#, r#"["heterogeneous"]"#))
        .unwrap();
    assert!(outcome.limits[0].verified.inside, "{:?}", outcome.limits);
    assert_eq!(world.rounds(Strategy::Heterogeneous), 3);
    let noted = |part: &str| outcome.notes.iter().any(|note| note.contains(part));
    assert!(noted("was noisy and was measured again") && noted("the cost table was corrected"));
}

/// The blocks that each task of scoring is asked for, of a parent of five layers.
fn scored_together(mut world: World) -> Vec<Vec<usize>> {
    let mut asked = Vec::new();
    let job = spec(r#"{"latency": "200ms"}"#, r#"["heterogeneous"]"#);
    let ended = world.run_with(&job, |world, task, exported| match task {
        TaskSpec::Ingest(_) => {
            let TaskOutput::Ingest(mut ingested) = world.answer(task, exported) else {
                panic!("another output")
            };
            let fifth: Vec<Block> = ingested.architecture.blocks[..2]
                .iter()
                .map(|block| Block {
                    layer: 4,
                    ..block.clone()
                })
                .collect();
            ingested.architecture.blocks.extend(fifth);
            ingested.architecture.layers = 5;
            TaskOutput::Ingest(ingested)
        }
        TaskSpec::Score(score) => {
            let blocks = score.blocks().into_iter();
            asked.push(blocks.map(|(block, _)| block).collect());
            // It need not go on.
            TaskOutput::Sort {
                permutation: ArtifactId("s".to_owned()),
            }
        }
        _ => world.answer(task, exported),
    });
    let ended = ended.unwrap_err().to_string();
    assert!(ended.contains("another kind of output"), "{ended}");
    asked
}

#[test]
fn blocks_of_a_parent_that_is_streamed_are_scored_together_and_those_of_one_that_is_held_each_for_itself() {
    let streamed: [Vec<usize>; 2] = [(0..8).collect(), (8..10).collect()];
    assert_eq!(scored_together(world()), streamed);
    let held: Vec<Vec<usize>> = (0..10).map(|block| vec![block]).collect();
    assert_eq!(scored_together(World::default()), held);
    // The report counts what was scored, not by how many tasks.
    let tokens = |mut world: World| {
        let job = spec(r#"{"latency": "200ms"}"#, r#"["heterogeneous"]"#);
        let costs = world.run(&job).unwrap().stages.into_iter();
        let of_scores = costs.filter(|cost| cost.stage == Stage::Score);
        of_scores
            .map(|cost| (cost.tasks, cost.tokens))
            .collect::<Vec<_>>()
    };
    assert_eq!(tokens(world()), [(1, 8 * 4 * 512)]);
    assert_eq!(tokens(World::default()), [(8, 8 * 4 * 512)]);
}

#[test]
fn its_table_is_imported_by_another_job_with_absolute_limits() {
    let table = world()
        .run(&spec(r#"{"latency": "200ms"}"#, BOTH))
        .unwrap()
        .cost_table
        .unwrap();
    for (limits, meets) in [
        (r#"{"latency": "220ms"}"#, true),
        (r#"{"latency": "75%"}"#, false),
    ] {
        let mut job = spec(limits, BOTH);
        job.target.cost_table = Some(CostTableSource::Table(Box::new(table.clone())));
        let ended = world().run(&job);
        assert_eq!(ended.is_ok(), meets, "{limits}: {:?}", ended.err());
    }
}

#[test]
fn a_share_stands_by_the_profile_where_the_parent_has_no_room_beside_the_candidate() {
    let mut job = spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#);
    let mut world = World {
        beside: Some(SHORTAGE),
        ..World::default()
    };
    let outcome = world.run(&job).unwrap();
    let latency = &outcome.limits[0];
    let truly = measurement(&parent(), 1.0).latency_ms.median;
    assert!(latency.verified.inside && (latency.verified.limit - 0.75 * truly).abs() < 1e-9);
    assert_eq!((latency.parent, latency.verified.parent), (Some(truly), None));
    let why = "the parent does not fit beside the candidate (needs 140.0 GiB, has 79.0 GiB)";
    assert!(
        outcome.notes.iter().any(|note| note.starts_with(why)),
        "{:?}",
        outcome.notes
    );
    // What is timed elsewhere than when it was profiled is read as it is.
    job.target.limits = spec(r#"{"latency": "80%"}"#, BOTH).target.limits;
    world.pace = 1.05;
    let slower = world.run(&job).unwrap();
    assert!(
        slower.limits[0].verified.value <= 0.8 * truly,
        "{:?}",
        slower.limits
    );
}
