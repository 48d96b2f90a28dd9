//! `make check-lost-coordinator`: a node lost with its disk, a coordinator asleep while its successor serves, and
//! two minutes without any coordinator in the middle of training.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use espalier_chaos::lost;
use espalier_chaos::tiny::{Cluster, write_long_spec};
use espalier_chaos::upset::wait_for_training;

/// How long there is no coordinator.
const AWAY: Duration = Duration::from_secs(120);

#[allow(clippy::print_stdout)] // the figures
fn main() -> Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new().context("no runtime can be started")?;
    let mut holds = true;
    for asleep in [false, true] {
        let report = runtime.block_on(lost::run(asleep))?;
        let what = if asleep {
            "asleep while its successor serves"
        } else {
            "killed, its disk gone"
        };
        println!(
            "{what}: {} results acknowledged before the loss; {} done again, acknowledged within {:.1} s; {} missing; of \
             those that the successor acknowledged, {} done again and {} twice; the coordinator that was stopped by \
             itself",
            report.acknowledged,
            report.again,
            report.reach_seconds,
            report.missing,
            report.late,
            report.twice
        );
        holds &= report.holds();
    }
    let truth = train(None)?;
    let alone = train(Some(AWAY))?;
    let same = truth.checkpoint == alone.checkpoint;
    println!(
        "{} s without a coordinator in the middle of training: the checkpoint is {}, recovery took {} attempts for {} \
         tasks and went on from a checkpoint {} times",
        AWAY.as_secs(),
        if same { "identical" } else { "DIFFERENT" },
        alone.attempts,
        alone.tasks,
        alone.resumed
    );
    Ok(if holds && same && alone.kept_training() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What became of the training.
struct Trained {
    checkpoint: Vec<(String, String)>,
    /// Recovery tasks.
    tasks: usize,
    /// Attempts at them.
    attempts: usize,
    /// How often one of them went on from what another had left.
    resumed: usize,
}

impl Trained {
    /// Whether the workers went on by themselves: nothing was begun again.
    fn kept_training(&self) -> bool {
        self.tasks > 0 && self.attempts == self.tasks && self.resumed == 0
    }
}

fn train(away: Option<Duration>) -> Result<Trained> {
    let specs = tempfile::tempdir()?;
    let spec = write_long_spec(specs.path())?;
    let mut cluster = Cluster::start(1)?;
    cluster.submit(&spec)?;
    if let Some(away) = away {
        wait_for_training(&mut cluster)?;
        drop(cluster.coordinator.take());
        let start = Instant::now();
        std::thread::sleep(away.saturating_sub(start.elapsed()));
        cluster.start_coordinator()?;
    }
    cluster.follow(|_, _| Ok(()))?;
    let mut trained = Trained {
        checkpoint: cluster.checkpoint()?,
        tasks: 0,
        attempts: 0,
        resumed: 0,
    };
    for task in cluster.tasks_of("recover")? {
        trained.tasks += 1;
        trained.attempts += task["attempts"].as_array().map_or(0, Vec::len);
        let id = task["id"].to_string();
        let log = cluster.client(&["task", "logs", &id])?;
        ensure!(log.status.success(), "the log of task {id} cannot be read");
        let log = String::from_utf8_lossy(&log.stdout);
        trained.resumed += log.matches("going on from a checkpoint").count();
    }
    Ok(trained)
}
