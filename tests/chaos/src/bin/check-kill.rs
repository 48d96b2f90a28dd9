//! `make check-kill`: prints what the kills have shown, exits 0 only where it holds.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use espalier_chaos::kill::{Plan, run_blocking};

#[derive(Debug, Parser)]
struct Arguments {
    /// How often the coordinator is killed.
    #[arg(long, default_value_t = 300)]
    kills: usize,
    /// Seeds the moments.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[allow(clippy::print_stdout)] // the figure
fn main() -> Result<ExitCode> {
    let Arguments { kills, seed } = Arguments::parse();
    let shown = std::io::stderr().is_terminal();
    let report = run_blocking(Plan { kills, seed }, |done| {
        if shown {
            eprint!("\r{done} of {kills} kills");
        }
    })?;
    println!("{report}");
    Ok(if report.holds() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
