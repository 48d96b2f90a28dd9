//! `make check-chaos`: the tiny job upset in every way at every stage, its checkpoint held against an undisturbed one.

use std::process::ExitCode;

use anyhow::Result;
use espalier_chaos::upset::{Upset, run};

#[allow(clippy::print_stdout)] // the figures
fn main() -> Result<ExitCode> {
    let specs = tempfile::tempdir()?;
    let truth = run(Upset::Nothing, specs.path())?;
    println!("undisturbed: {:.1} s", truth.took.as_secs_f64());
    let mut held = 0;
    for upset in Upset::ALL {
        let outcome = run(upset, specs.path())?;
        let identical = outcome.checkpoint == truth.checkpoint;
        let verdict = if identical { "identical" } else { "DIFFERENT" };
        println!(
            "{}: {} faults in {} of {} stages ({} more were over too soon), spared {:?}, {:.1} s, checkpoint {verdict}",
            upset.name(),
            outcome.faults,
            outcome.stages - outcome.spared.len() - outcome.too_short,
            outcome.stages,
            outcome.too_short,
            outcome.spared,
            outcome.took.as_secs_f64()
        );
        held += usize::from(outcome.holds(&truth));
    }
    println!(
        "{held} of {} runs, disturbed at every stage, end with the same checkpoint to the bit",
        Upset::ALL.len()
    );
    Ok(if held == Upset::ALL.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
