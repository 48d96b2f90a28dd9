//! `make check-lost-coordinator`: a node lost with its disk, a coordinator asleep while its successor serves, and
//! two minutes without any coordinator in the middle of training.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
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
            "{what}: {} results acknowledged before, {} of them done again, none older than {:.1} s, {} missing; the \
             coordinator that was stopped by itself",
            report.acknowledged, report.again, report.reach_seconds, report.missing
        );
        holds &= report.holds();
    }
    let truth = train(None)?;
    let alone = train(Some(AWAY))?;
    let same = truth == alone;
    println!(
        "{} s without a coordinator in the middle of training: the checkpoint is {}",
        AWAY.as_secs(),
        if same { "identical" } else { "DIFFERENT" }
    );
    Ok(if holds && same {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn train(away: Option<Duration>) -> Result<Vec<(String, String)>> {
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
    cluster.checkpoint()
}
