//! `make check-chaos`: the tiny job upset in every way, its checkpoint held against an undisturbed one.

use std::process::ExitCode;

use anyhow::Result;
use espalier_chaos::upset::{Upset, run};

#[allow(clippy::print_stdout)] // the figures
fn main() -> Result<ExitCode> {
    let specs = tempfile::tempdir()?;
    let truth = run(Upset::Nothing, specs.path())?;
    println!("undisturbed: {:.1} s", truth.took.as_secs_f64());
    let mut same = 0;
    for upset in Upset::ALL {
        let outcome = run(upset, specs.path())?;
        let identical = outcome.checkpoint == truth.checkpoint;
        let verdict = if identical { "identical" } else { "DIFFERENT" };
        println!(
            "{}: {} faults, {:.1} s, checkpoint {verdict}",
            upset.name(),
            outcome.faults,
            outcome.took.as_secs_f64()
        );
        same += usize::from(identical && outcome.faults > 0);
    }
    println!(
        "{same} of {} disturbed runs end with the same checkpoint to the bit",
        Upset::ALL.len()
    );
    Ok(if same == Upset::ALL.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
