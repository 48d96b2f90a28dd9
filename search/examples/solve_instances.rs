//! Solves the seeded instances of `make check-solver` and writes them, with the answers, one JSON line each.
//!
//! 96 groups of 24 items under three limits. A third of the instances have costs independent of uses, a
//! third correlated, a third strongly correlated (cost falls by what is used more, plus little noise), which is
//! the hard kind (Pisinger 2005). `solve_instances [SEED] > lines`
#![allow(clippy::print_stdout, clippy::cast_precision_loss, missing_docs)]

use std::time::Instant;

use espalier_search::solver::{Item, Options, Problem, Solved, solve};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const INSTANCES: u64 = 20;
const GROUPS: usize = 96;
const ITEMS: usize = 24;
const LIMITS: usize = 3;

fn instance(seed: u64, kind: u64) -> Problem {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let noise = [1.0, 0.3, 0.02][usize::try_from(kind % 3).unwrap_or(0)];
    let groups: Vec<Vec<Item>> = (0..GROUPS)
        .map(|_| {
            let weight = random.random_range(0.5..2.0);
            (0..ITEMS)
                .map(|_| {
                    let uses: Vec<f64> = (0..LIMITS)
                        .map(|_| f64::from(random.random_range(1..=1000_u32)))
                        .collect();
                    let mean = uses.iter().sum::<f64>() / LIMITS as f64;
                    let saved = 1000.0 - mean;
                    let cost = (1.0 - noise) * weight * saved + noise * random.random_range(0.0..1000.0);
                    Item { cost, uses }
                })
                .collect()
        })
        .collect();
    let limits = (0..LIMITS)
        .map(|limit| {
            let share = random.random_range(0.3..0.6);
            let range: (f64, f64) = groups.iter().fold((0.0, 0.0), |(low, high), group| {
                let uses = group.iter().map(|item| item.uses[limit]);
                (
                    low + uses.clone().fold(f64::INFINITY, f64::min),
                    high + uses.fold(0.0, f64::max),
                )
            });
            (range.0 + share * (range.1 - range.0)).round()
        })
        .collect();
    Problem { groups, limits }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seed: u64 = std::env::args().nth(1).map_or(Ok(1), |text| text.parse())?;
    // HiGHS is never to find anything better, so the optimum itself is asked for.
    let options = Options {
        relative_gap: 0.0,
        ..Options::default()
    };
    for index in 0..INSTANCES {
        let problem = instance(seed * 1000 + index, index);
        let started = Instant::now();
        let solved = solve(&problem, &options)?;
        let seconds = started.elapsed().as_secs_f64();
        let kind = ["independent", "correlated", "strongly correlated"][usize::try_from(index % 3)?];
        let Solved::Found(solution) = solved else {
            return Err(format!("instance {index} has no solution").into());
        };
        let line = serde_json::json!({
            "instance": index, "kind": kind, "seconds": seconds, "problem": problem, "solution": solution,
        });
        println!("{line}");
    }
    Ok(())
}
