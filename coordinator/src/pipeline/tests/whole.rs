//! Whole jobs, and what is refused on the way.

use espalier_arch::{Storage, Variant, WeightFormat};
use espalier_proto::task::{Profile, TaskOutput, TaskSpec};
use espalier_search::{Corrections, CostModel, CostTable, MemoryModel};

use super::world::*;
use crate::pipeline::*;
use crate::spec::Strategy;

#[test]
fn a_job_with_both_strategies_goes_through_every_stage_to_an_outcome_inside_the_limit() {
    let mut world = World::default();
    let outcome = world
        .run(&spec(r#"{"latency": "75%", "memory": "99%"}"#, BOTH))
        .unwrap();
    assert_eq!(outcome.strategies.len(), 2);
    assert_eq!(outcome.strategies[0].strategy, outcome.winner);
    assert_eq!(
        outcome.strategies[0].recovery_tokens,
        outcome.strategies[1].recovery_tokens
    );
    let latency = &outcome.limits[0];
    assert!(latency.verified.inside && latency.verified.value < 0.75 * latency.parent.unwrap());
    assert!(
        latency.verified.error.abs() < 1e-9,
        "the world is additive: {}",
        latency.verified.error
    );
    assert!(
        latency.predicted <= latency.limit * 0.99 + 1e-9,
        "a margin of at least 1% is kept"
    );
    assert!(!outcome.front.is_empty() && !outcome.grid.is_empty());
    assert!(
        outcome
            .front
            .windows(2)
            .all(|pair| pair[0].value < pair[1].value && pair[0].score > pair[1].score)
    );
    assert_eq!(outcome.stages.len(), world.log.len());
    assert_eq!(outcome.strategies[0].blocks.len(), 8);
    let again: Outcome = serde_json::from_str(&serde_json::to_string(&outcome).unwrap()).unwrap();
    assert_eq!(again, outcome);
}

#[test]
fn a_single_strategy_runs_only_its_own_stages() {
    let mut world = World::default();
    world
        .run(&spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#))
        .unwrap();
    assert!(!world.log.contains(&Stage::DepthOrder) && !world.log.contains(&Stage::Rank { round: 1 }));
    let mut world = World::default();
    world
        .run(&spec(r#"{"latency": "75%"}"#, r#"["uniform"]"#))
        .unwrap();
    assert!(!world.log.contains(&Stage::Score) && world.rounds(Strategy::Uniform) == 1);
}

#[test]
fn no_strategy_leaves_a_block_out_where_none_may_go() {
    let run = |skip: bool| {
        let mut spec = spec(r#"{"block_parameters": "60%"}"#, BOTH);
        spec.search.skip = skip;
        let mut world = World::default();
        let outcome = world.run(&spec).unwrap();
        (world.log.contains(&Stage::DepthOrder), outcome)
    };
    let (ordered, outcome) = run(false);
    assert!(!ordered, "nobody asks for an order");
    assert_eq!(outcome.strategies.len(), 2);
    let chosen = outcome.strategies.iter().map(|report| &report.candidate);
    let ranked = outcome.grid.iter().map(|ranked| &ranked.point.candidate);
    for candidate in chosen.chain(ranked) {
        assert!(!candidate.variants.contains(&Variant::Skip), "{candidate:?}");
    }
    let (ordered, outcome) = run(true);
    let drops = |ranked: &outcome::RankedPoint| !ranked.point.dropped.is_empty();
    assert!(ordered && outcome.grid.iter().any(drops));
}

#[test]
fn a_limit_on_time_that_nothing_meets_is_refused_after_the_profile_with_the_best_that_can_be_reached() {
    let mut world = World::default();
    let error = world
        .run(&spec(r#"{"latency": "1ms"}"#, BOTH))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the best that can be reached is 36.0 ms"),
        "{error}"
    );
    assert!(!world.log.contains(&Stage::Score));
}

#[test]
fn a_limit_on_memory_that_nothing_meets_is_refused_before_anything_is_measured() {
    let mut world = World::default();
    let error = world
        .run(&spec(r#"{"memory": "1KiB"}"#, BOTH))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("memory at most") && error.contains("the best that can be reached"),
        "{error}"
    );
    assert_eq!(world.log, [Stage::Ingest]);
}

#[test]
fn more_stages_than_blocks_are_refused_before_anything_is_measured() {
    let mut asked = spec(r#"{"latency": "75%"}"#, BOTH);
    (asked.recovery.ranks, asked.recovery.pipeline_stages) = (9, 9);
    let mut world = World::default();
    let error = world.run(&asked).unwrap_err().to_string();
    assert!(
        error.starts_with("recovery.pipeline_stages: found 9, expected at most 8, the blocks of the parent"),
        "{error}"
    );
    assert_eq!(world.log, [Stage::Ingest]);
    asked.budget.recovery_tokens = 0;
    World::default().run(&asked).expect("nothing is cut into stages");
    // As many as the parent has blocks, of which the choices keep fewer.
    let mut asked = spec(r#"{"latency": "40%"}"#, BOTH);
    (asked.recovery.ranks, asked.recovery.pipeline_stages) = (8, 8);
    let mut world = World::default();
    let error = world.run(&asked).unwrap_err().to_string();
    assert!(error.contains("choice: a stage needs one of its own"), "{error}");
    assert!(!world.log.contains(&Stage::Recover));
}

#[test]
fn without_recovery_tokens_the_untrained_choice_is_exported() {
    let mut job = spec(r#"{"latency": "75%"}"#, BOTH);
    job.budget.recovery_tokens = 0;
    let mut world = World::default();
    let outcome = world.run(&job).unwrap();
    assert!(!world.log.contains(&Stage::Recover));
    assert!(
        outcome
            .strategies
            .iter()
            .all(|strategy| strategy.after.is_none() && strategy.weights.is_none())
    );
}

#[test]
fn a_recovery_that_is_worse_on_held_out_text_is_neither_exported_nor_shown_as_what_was() {
    let mut exported_trained = None;
    let outcome = World::default()
        .run_with(&spec(r#"{"latency": "75%"}"#, BOTH), |world, task, exported| {
            if let TaskSpec::Export(export) = task {
                exported_trained = Some(export.student.weights.is_some());
            }
            let mut output = world.answer(task, exported);
            if let (TaskSpec::Evaluate(evaluate), TaskOutput::Evaluate(quality)) = (task, &mut output)
                && evaluate.student.as_ref().is_some_and(|it| it.weights.is_some())
            {
                quality.divergence = 0.7;
            }
            output
        })
        .unwrap();
    assert_eq!(exported_trained, Some(false));
    let winner = &outcome.strategies[0];
    assert!(winner.kept_untrained && winner.after.is_some());
    assert_eq!(winner.quality().divergence, 0.6);
    assert!(
        outcome.notes.iter().any(|note| note.contains("KL 0.7000")),
        "{:?}",
        outcome.notes
    );
    assert!(crate::report::html(&outcome).contains("<dt>KL to the parent</dt><dd>0.600<small>"));
}

#[test]
fn every_stage_reads_back_from_its_name() {
    let mut stages = vec![
        Stage::Ingest,
        Stage::DepthOrder,
        Stage::Rank { round: 2 },
        Stage::Verify { round: 3 },
    ];
    stages.extend(
        [Strategy::Heterogeneous, Strategy::Uniform].map(|strategy| Stage::Check { strategy, round: 12 }),
    );
    for stage in stages {
        assert_eq!(stage.to_string().parse(), Ok(stage));
    }
    assert!("check-diagonal-1".parse::<Stage>().is_err());
}

#[test]
fn the_parents_own_prediction_is_the_sum_of_its_blocks() {
    let profile = Profile {
        architecture: parent(),
        shapes: espalier_search::Space::default().shapes(&parent()).unwrap(),
        points: espalier_search::points(&WORKLOAD).unwrap(),
        rounds: 7,
        workload: WORKLOAD,
        engine: espalier_proto::task::Engine::Builtin,
        kept: Vec::new(),
    };
    let table = CostTable {
        key: key(),
        rows: rows(&profile),
        memory: None,
    };
    let memory = MemoryModel::unpaged(Storage::all(WeightFormat::F32));
    let model = CostModel::new(&table, &WORKLOAD, &parent(), memory, None)
        .unwrap()
        .corrected(&Corrections::default(), &parent())
        .unwrap();
    let skipped = espalier_arch::Candidate {
        variants: [vec![Variant::Skip], vec![Variant::Whole; 7]].concat(),
    };
    let whole = model.predict(&parent()).unwrap().figures.latency_ms.unwrap();
    let less = model
        .predict(&parent().with_candidate(&skipped).unwrap())
        .unwrap()
        .figures
        .latency_ms
        .unwrap();
    assert!((whole - measurement(&parent(), 1.0).latency_ms.median).abs() < 1e-9);
    assert!((whole - less - 9.0 * 3.0).abs() < 1e-9);
}
