//! Profile: every block shape and the base at every point, and the whole parent under the workload, all
//! interleaved round by round, so that whatever disturbs the machine disturbs them alike.

use espalier_proto::task::{Profile, Profiled};

use super::{Caches, Context};
use crate::Result;
use crate::engine::builtin::{Bench, cost_key, dummy};
use crate::engine::quiet::Quiet;
use crate::engine::stacks::Stacks;

/// Rounds at the least: fewer give no spread worth the name.
const LEAST_ROUNDS: usize = 3;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Profile) -> Result<Profiled> {
    caches.clear();
    let rounds = task.rounds.max(LEAST_ROUNDS);
    context.progress(0, rounds + 1, "rounds", || {
        "building stacks of every block shape".to_owned()
    })?;
    let operations = &context.operations;
    let mut stacks = Stacks::new(operations, &task.architecture, &task.shapes, &task.points)?;
    let parent = dummy(operations, &task.architecture, 1)?;
    let mut bench = Bench::new(operations, &parent, &task.workload)?;
    bench.warm_up()?;
    let quiet = Quiet::watch()?;
    // The first round warms pools and tables up and is thrown away.
    stacks.round(&quiet)?;
    stacks.forget();
    for round in 0..rounds {
        context.progress(round + 1, rounds + 1, "rounds", || {
            format!("{} shapes at {} points", task.shapes.len(), task.points.len())
        })?;
        bench.run(&quiet)?;
        stacks.round(&quiet)?;
    }
    context.progress(rounds + 1, rounds + 1, "rounds", String::new)?;
    Ok(Profiled {
        key: cost_key(&**operations, task.architecture.hidden),
        rows: stacks.rows(),
        parent: bench.measurement(),
        memory: None,
    })
}
