//! Answers a hundred plans from one recorded table and prints how long it took: `make check-plan`.
//!
//! Each is a whole answer: the choice inside its limits, what relaxing each of them would buy, and a front of fifteen
//! points. A quarter each are of the latency alone, of latency and memory, of a latency to be kept with a confidence, and
//! of throughput and memory.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use espalier_arch::{Architecture, Storage, WeightFormat};
use espalier_search::plan::{Answer, Known, Target, answer};
use espalier_search::solver::Options;
use espalier_search::{Corrections, CostTable, Limits, Measurement, MemoryModel, Score, Whole, Workload};
use serde::Deserialize;

const FRONT: usize = 15;

/// What was measured once.
#[derive(Deserialize)]
struct Recorded {
    parent: Architecture,
    workload: Workload,
    measurement: Measurement,
    table: CostTable,
    scores: Vec<Score>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/plans/smollm2.json");
    let recorded: Recorded = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let begun = Instant::now();
    let known = Known::new(recorded.parent.clone(), recorded.scores.clone());
    let (mut chosen, mut points, mut prices, mut worst_gap) = (0, 0, 0, 0.0_f64);
    for question in questions() {
        let found = ask(&recorded, &known, &question)?;
        let Some(choice) = found.chosen else {
            return Err(format!("{question}: no candidate is inside").into());
        };
        let is_inside = |standing: &espalier_search::plan::Standing| standing.limit.admits(standing.value);
        if !choice.limits.iter().all(is_inside) {
            return Err(format!("{question}: the choice is outside").into());
        }
        chosen += 1;
        points += choice.front.len();
        prices += choice
            .limits
            .iter()
            .filter(|standing| standing.price.is_some())
            .count();
        worst_gap = worst_gap.max(choice.score - choice.score_bound);
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{points} points of fronts, {prices} prices, worst gap to a proven bound {worst_gap:.1e} nats a token"
    );
    println!("{chosen} plans in {seconds:.3} s");
    Ok(())
}

/// A hundred, no two alike.
fn questions() -> Vec<String> {
    let each = (60..85).flat_map(|share| {
        [
            format!(r#"{{"latency": "{share}%"}}"#),
            format!(r#"{{"latency": "{share}%", "memory": "{}%"}}"#, share + 10),
            format!(r#"{{"latency": "{share}% at 95%", "first_token": "90%"}}"#),
            format!(r#"{{"throughput": "{}%", "memory": "90%"}}"#, 200 - share),
        ]
    });
    each.collect()
}

fn ask(recorded: &Recorded, known: &Known, question: &str) -> Result<Answer, Box<dyn std::error::Error>> {
    let limits: Limits = serde_json::from_str(question)?;
    let target = Target {
        table: &recorded.table,
        memory: MemoryModel::unpaged(Storage::all(WeightFormat::F32)),
        whole: Some(Whole {
            measurement: &recorded.measurement,
            workload: &recorded.workload,
        }),
        workload: recorded.workload,
        limits: &limits,
        extrapolate: false,
        corrections: Corrections::default(),
        disturbed: false,
    };
    Ok(answer(known, &target, FRONT, &Options::default())?)
}
