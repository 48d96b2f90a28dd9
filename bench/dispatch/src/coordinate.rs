//! The coordinator under test, with a planner whose jobs are one stage of tasks without content.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use espalier_coordinator::scheduler::{Needs, StagePlan, TaskPlan};
use espalier_coordinator::service::{Planned, Planner, StageSnapshot};
use espalier_coordinator::{Coordinator, CoordinatorOptions};
use tokio::io::AsyncReadExt;

/// How it runs.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Where its journal lies.
    #[arg(long)]
    data_dir: PathBuf,
    /// Tasks of each job.
    #[arg(long, default_value_t = 20_000)]
    tasks: usize,
}

struct OneStage {
    tasks: usize,
}

impl Planner for OneStage {
    fn plan(&self, _: &str, stages: &[StageSnapshot]) -> Result<Planned, String> {
        let Some(stage) = stages.first() else {
            return Ok(Planned::Stages(vec![self.stage()]));
        };
        Ok(match stage.outputs {
            Some(_) => Planned::Outcome("{}".into()),
            None => Planned::Stages(Vec::new()),
        })
    }

    fn write_report(&self, _: &str, _: &Path) -> Result<(), String> {
        Ok(())
    }

    fn finish(&self, _: &str, _: &Path) -> Result<(), String> {
        Ok(())
    }

    fn remove_partial(&self, _: &Path) -> Result<(), String> {
        Ok(())
    }
}

impl OneStage {
    fn stage(&self) -> StagePlan {
        let task = |index| TaskPlan {
            name: format!("nothing {index}"),
            payload: "{}".into(),
            exclusive: false,
            needs: Needs::default(),
        };
        StagePlan {
            name: "nothing".to_owned(),
            kind: "nothing".to_owned(),
            decision: None,
            note: String::new(),
            in_output: false,
            tasks: (0..self.tasks).map(task).collect(),
        }
    }
}

/// Runs it until standard input closes, in a process that is set up as `espalier coordinator` is.
pub fn run(options: &Options) -> Result<()> {
    espalier_coordinator::memory::stay_small();
    coordinate(options)
}

#[tokio::main]
async fn coordinate(options: &Options) -> Result<()> {
    let mut coordinator = CoordinatorOptions::new(&options.data_dir);
    coordinator.listen = "127.0.0.1:0".parse()?;
    let planner = Arc::new(OneStage { tasks: options.tasks });
    let handle = Coordinator::start_with(coordinator, planner).await?;
    announce(&handle.endpoint());
    let mut stdin = tokio::io::stdin();
    let closed = async { stdin.read(&mut [0; 1]).await };
    tokio::select! {
        _ = closed => {}
        reason = handle.failed() => anyhow::bail!(reason),
    }
    handle.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

#[allow(clippy::print_stdout)] // the answer of this process
fn announce(endpoint: &str) {
    println!("{endpoint}");
}
