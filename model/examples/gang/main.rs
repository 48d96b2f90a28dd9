//! Ranks that train one student together, each a process of its own, beside one rank alone: `gang cpu SECONDS` on the
//! CPU over TCP (`make check-gang`), where a rank that is gone must be missed within so many seconds; `gang gpu` on two
//! GPUs over NCCL (part of `make check-gpu-gang`). Each starts its ranks itself, as `gang rank PLAN NUMBER`. The figures
//! come last; exits 0 only where all hold.
#![allow(clippy::print_stdout)] // the figures are the point

mod checks;
mod disturb;
mod gpu;
mod launch;
mod plan;
mod rank;
mod weights;

use std::process::ExitCode;

/// Whatever went wrong, in words.
type Failure = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failure>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match words.as_slice() {
        ["rank", plan, number] => rank::run(plan, number),
        ["cpu", limit] => checks::run(limit),
        ["gpu", parts @ ..] => gpu::run(parts),
        _ => {
            Err("usage: gang cpu SECONDS | gang gpu [scaling] [stages] [replicas] [large] [disturbed]".into())
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}
