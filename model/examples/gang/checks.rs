//! `gang cpu`: gangs over TCP against one rank alone, a rank that is killed in the middle, and what goes on from
//! its checkpoint.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::Result;
use crate::disturb::disturb;
use crate::launch::{apart, whole};
use crate::plan::{Fall, Kind, Plan};

const STEPS: u32 = 20;
/// How far losses may differ from one rank's, relative.
const BOUND: f64 = 1e-5;
/// Which rank falls, in which step, and how often there is a checkpoint.
const VICTIM: usize = 2;
const FALLS_IN: u32 = 13;
const EVERY: u32 = 5;
/// How long a rank may be silent; the sockets of one that was killed break at once.
const SILENCE_MS: u64 = 8000;

fn plan(stages: usize, replicas: usize, distil: bool) -> Plan {
    let shape = |layers: usize, hidden: usize| {
        json!({
            "model_type": "qwen3", "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "vocab_size": 211, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "tie_word_embeddings": true,
        })
    };
    Plan {
        kind: Kind::Cpu,
        stages,
        replicas,
        student: shape(4, 48),
        parent: distil.then(|| shape(5, 64)),
        steps: STEPS,
        learning_rate: 1e-3,
        micro_batches: 6,
        sequences: 2,
        tokens: 24,
        period: 3,
        home: None,
        resume: None,
        generation: 1,
        silence_ms: SILENCE_MS,
        fall: None,
    }
}

/// Whether everything holds is printed as it is found.
struct Verdict {
    holds: bool,
}

impl Verdict {
    fn add(&mut self, what: &str, figure: &str, holds: bool) {
        println!("{} {what}: {figure}", if holds { "ok  " } else { "FAIL" });
        self.holds &= holds;
    }

    fn losses(&mut self, what: &str, found: &[(u32, f64)], expected: &[(u32, f64)]) {
        let apart = apart(found, expected);
        let figure = apart.map_or_else(
            || "a step is missing".to_owned(),
            |(apart, _)| {
                format!(
                    "losses of {} steps within {apart:.1e} of one rank's",
                    expected.len()
                )
            },
        );
        self.add(what, &figure, apart.is_some_and(|(apart, _)| apart <= BOUND));
    }
}

/// Survivors must know of a rank that fell within `limit` seconds.
pub(crate) fn run(limit: &str) -> Result<()> {
    let limit = limit.parse()?;
    let mut verdict = Verdict { holds: true };
    for distil in [false, true] {
        let lesson = if distil { "from a parent" } else { "from text" };
        let alone = whole(&plan(1, 1, distil))?.losses;
        let (first, last) = (loss(&alone, 0), loss(&alone, STEPS - 1));
        let figure = format!("loss {first:.4} to {last:.4}");
        verdict.add(&format!("1 rank, {lesson}"), &figure, last < first);
        for (stages, replicas) in [(1, 2), (1, 4), (2, 1), (2, 2)] {
            let found = whole(&plan(stages, replicas, distil))?.losses;
            let what = format!("{stages} stages x {replicas} replicas, {lesson}");
            verdict.losses(&what, &found, &alone);
        }
    }
    disturbed(&mut verdict, limit)?;
    match verdict.holds {
        true => Ok(()),
        false => Err("check-gang does not hold".into()),
    }
}

fn loss(losses: &[(u32, f64)], step: u32) -> f64 {
    let found = losses.iter().find(|(found, _)| *found == step);
    found.map_or(f64::NAN, |(_, loss)| *loss)
}

/// Ends or stops a rank of 2 x 2 in the middle, and goes on from the last checkpoint with one rank and with three.
fn disturbed(verdict: &mut Verdict, limit: f64) -> Result<()> {
    let alone = whole(&plan(1, 1, true))?.losses;
    for (signal, resumed) in [("KILL", vec![(1, 1), (1, 3)]), ("STOP", vec![(2, 1)])] {
        let home = tempfile::tempdir()?;
        let plan = Plan {
            home: Some((home.path().to_path_buf(), EVERY)),
            ..plan(2, 2, true)
        };
        let fall = Fall {
            rank: VICTIM,
            step: FALLS_IN,
            signal: signal.to_owned(),
        };
        let disturbed = disturb(&plan, fall)?;
        let said = disturbed.said.first().map_or("nobody noticed", String::as_str);
        let figure = format!("the other three ended after {:.2} s: {said}", disturbed.seconds);
        let known = disturbed.is_known(VICTIM, plan.ranks());
        verdict.add(
            &format!("SIG{signal} of a rank of four"),
            &figure,
            known && disturbed.seconds < limit,
        );
        for layers in resumed {
            went_on(verdict, &disturbed.record, layers, &alone)?;
        }
    }
    Ok(())
}

fn went_on(
    verdict: &mut Verdict,
    record: &Path,
    (stages, replicas): (usize, usize),
    alone: &[(u32, f64)],
) -> Result<()> {
    let from: Option<PathBuf> = Some(record.to_path_buf());
    let found = whole(&Plan {
        resume: from,
        generation: 2,
        ..plan(stages, replicas, true)
    })?;
    let first = found.losses.first().map_or(0, |(step, _)| *step);
    let expected: Vec<(u32, f64)> = alone.iter().copied().filter(|(step, _)| *step >= first).collect();
    let what = format!("resumed after step {first} by {stages} stages x {replicas} replicas");
    verdict.losses(&what, &found.losses, &expected);
    verdict.add(
        "its checkpoint",
        &format!("of step {first}"),
        first > 0 && first < STEPS,
    );
    Ok(())
}
