//! Runs seeds side by side and says what they showed.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Parser;
use espalier_simulation::disk::Figures;
use espalier_simulation::plan::Plan;
use espalier_simulation::run::{Report, Violation, run};
use espalier_simulation::trace::Trace;

/// Lines before a violation that are shown.
const LAST_STEPS: u64 = 80;

#[derive(Debug, Parser)]
#[command(about = "Runs the cluster under virtual time with seeded faults")]
struct Arguments {
    /// Short seeds, from the first to before the last.
    #[arg(long, default_value = "0..100")]
    seeds: String,
    /// How many full seeds besides, from the same first one.
    #[arg(long, default_value_t = 0)]
    full: u64,
    /// Only this seed.
    #[arg(long)]
    seed: Option<u64>,
    /// That seed is a full one.
    #[arg(long)]
    is_full: bool,
    /// Shows every step of that seed.
    #[arg(long)]
    trace: bool,
    /// Plants each bug and says which of so many short seeds finds it.
    #[cfg(feature = "planted-bugs")]
    #[arg(long, default_value_t = 0)]
    planted: u64,
    /// Runs at once.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

#[derive(Debug, Clone, Copy)]
struct Seed {
    number: u64,
    full: bool,
}

impl Seed {
    fn plan(self) -> Plan {
        if self.full {
            Plan::full(self.number)
        } else {
            Plan::short(self.number)
        }
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    if let Some(number) = arguments.seed {
        let seed = Seed {
            number,
            full: arguments.is_full,
        };
        return Ok(one(seed, arguments.trace));
    }
    #[cfg(feature = "planted-bugs")]
    if !all_planted_are_caught(arguments.planted) {
        return Ok(ExitCode::FAILURE);
    }
    let (first, end) = arguments.seeds.split_once("..").with_context(|| {
        format!(
            "--seeds is {:?}, expected two numbers as in 0..100",
            arguments.seeds
        )
    })?;
    let (first, end): (u64, u64) = (first.parse()?, end.parse()?);
    if end < first {
        bail!(
            "--seeds is {:?}, expected the first number to be the lower",
            arguments.seeds
        );
    }
    // The long ones first, so that no thread is left with one at the end.
    let full = (0..arguments.full).map(|number| Seed {
        number: first + number,
        full: true,
    });
    let short = (first..end).map(|number| Seed { number, full: false });
    Ok(all(&full.chain(short).collect::<Vec<_>>(), arguments.threads))
}

fn show(line: &str) {
    // Whoever reads may have gone.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn one(seed: Seed, trace: bool) -> ExitCode {
    let lines: Option<fn(&str)> = trace.then_some(show as fn(&str));
    match run(seed.plan(), Trace::new(lines, 0)) {
        Ok(report) => {
            show(&format!("{report:#?}"));
            ExitCode::SUCCESS
        }
        Err(violation) => {
            show(&format!("{violation:#?}"));
            ExitCode::FAILURE
        }
    }
}

/// Whether each planted bug is found by one of so many seeds.
#[cfg(feature = "planted-bugs")]
fn all_planted_are_caught(seeds: u64) -> bool {
    use espalier_simulation::planted::{Planted, caught};
    if seeds == 0 {
        return true;
    }
    let mut all = true;
    for bug in Planted::ALL {
        match caught(bug, 0..seeds) {
            Some((seed, violation)) => show(&format!("{bug:?}: seed {seed} shows that {}", violation.broken)),
            None => {
                show(&format!("{bug:?}: none of {seeds} seeds shows it"));
                all = false;
            }
        }
    }
    all
}

/// Replays a seed that showed something, with its last steps.
fn replay(seed: Seed, violation: &Violation) {
    let kind = if seed.full { "full" } else { "short" };
    let from = violation.steps.saturating_sub(LAST_STEPS);
    show(&format!(
        "{kind} seed {} at {}: {}",
        seed.number, violation.at, violation.broken
    ));
    let _ = run(seed.plan(), Trace::new(Some(show), from));
    let flag = if seed.full { " --is-full" } else { "" };
    show(&format!(
        "{kind} seed {} broke: {}\nreplay it with: simulate --seed {}{flag} --trace",
        seed.number, violation.broken, seed.number
    ));
}

fn all(seeds: &[Seed], threads: usize) -> ExitCode {
    let began = Instant::now();
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(Seed, Result<Report, Violation>)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run(seed.plan(), Trace::new(None, 0));
                    results
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner)
                        .push((*seed, result));
                }
            });
        }
    });
    let results = results
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut broken: Vec<_> = Vec::new();
    let mut reports = Vec::new();
    for (seed, result) in results {
        match result {
            Ok(report) => reports.push(report),
            Err(violation) => broken.push((seed, violation)),
        }
    }
    broken.sort_by_key(|(seed, _)| (seed.full, seed.number));
    if let Some((seed, violation)) = broken.first() {
        replay(*seed, violation);
    }
    for (seed, violation) in &broken {
        show(&format!(
            "seed {} (full: {}): {}",
            seed.number, seed.full, violation.broken
        ));
    }
    summary(&reports);
    show(&format!(
        "{} seeds, {} broke an invariant, in {:.1} s",
        seeds.len(),
        broken.len(),
        began.elapsed().as_secs_f64()
    ));
    if broken.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn summary(reports: &[Report]) {
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    let mut jobs: BTreeMap<&str, u64> = BTreeMap::new();
    let mut disks = Figures::default();
    for report in reports {
        disks += report.disks;
        for (kind, count) in &report.faults {
            *faults.entry(kind).or_default() += count;
        }
        for (ended, count) in &report.jobs {
            *jobs.entry(ended).or_default() += count;
        }
    }
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    show(&format!("faults: {faults:?}"));
    show(&format!("jobs: {jobs:?}"));
    show(&format!("disks: {disks:?}"));
    show(&format!(
        "gangs: {} ranks told that another was gone, {} were not waited for, {} gangs were smaller than asked for, {} \
         went further than ever",
        sum(|report| report.losses_told),
        sum(|report| report.let_go),
        sum(|report| report.smaller_gangs),
        sum(|report| report.went_on)
    ));
    show(&format!(
        "{} steps, {} durable events, {} acknowledged completions",
        sum(|report| report.steps),
        sum(|report| report.events),
        sum(|report| report.acknowledged)
    ));
}
