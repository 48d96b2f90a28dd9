//! Answers a hundred plans from one recorded table and prints how long it took: `make check-plan`.
//!
//! Each is a whole answer: the choice inside its limits, what relaxing each of them would buy, and a front of fifteen
//! points.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use espalier_arch::{Architecture, Storage, WeightFormat};
use espalier_search::plan::{Known, Target, answer};
use espalier_search::solver::Options;
use espalier_search::{CostTable, Limits, MemoryModel, Score, Workload};
use serde::Deserialize;

const FRONT: usize = 15;
const WORKLOAD: Workload = Workload {
    prompt_tokens: 128,
    output_tokens: 2,
    concurrency: 1,
};

/// What was measured once.
#[derive(Deserialize)]
struct Recorded {
    parent: Architecture,
    scores: Vec<Score>,
    table: CostTable,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/plans/smollm2.json");
    let recorded: Recorded = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let known = Known::new(recorded.parent, recorded.scores);
    let mut questions = Vec::new();
    for latency in 60..85 {
        for memory in [
            "",
            r#", "memory": "95%""#,
            r#", "memory": "90%""#,
            r#", "memory": "85%""#,
        ] {
            questions.push(format!(r#"{{"latency": "{latency}%"{memory}}}"#));
        }
    }
    let begun = Instant::now();
    let (mut chosen, mut points, mut worst_gap) = (0, 0, 0.0_f64);
    for question in &questions {
        let limits: Limits = serde_json::from_str(question)?;
        let target = Target {
            table: &recorded.table,
            memory: MemoryModel::unpaged(Storage::all(WeightFormat::Bf16)),
            whole: None,
            workload: WORKLOAD,
            limits: &limits,
            extrapolate: false,
        };
        let found = answer(&known, &target, FRONT, &Options::default())?;
        let Some(choice) = found.chosen else {
            return Err(format!("{question}: no candidate is inside").into());
        };
        if !choice
            .limits
            .iter()
            .all(|standing| standing.limit.admits(standing.value))
        {
            return Err(format!("{question}: the choice is outside").into());
        }
        chosen += 1;
        points += choice.front.len();
        worst_gap = worst_gap.max(choice.score - choice.score_bound);
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{points} points of fronts, worst gap to a proven bound {worst_gap:.1e} nats a token");
    println!("{chosen} plans in {seconds:.3} s");
    Ok(())
}
