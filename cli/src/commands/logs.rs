//! Logs of tasks: as they were kept, and as they come.
//!
//! The coordinator ends a log with its attempt. What follows a task goes on to its next attempt, what follows a job
//! to every attempt that begins; a coordinator that is restarted meanwhile is waited for.

mod follow;

use espalier_coordinator::Error;
use espalier_proto::v1::{TaskDetail, TaskState};
use serde_json::{Value, json};

use super::{connect, require_stage};
use crate::args::{Format, JobLogs, Remote, TaskLogs};
use crate::{failure, output};

/// A task that its lines are named by.
#[derive(Debug, Clone)]
struct Named {
    task: u64,
    stage: String,
    name: String,
}

impl Named {
    fn of(task: &TaskDetail) -> Self {
        Self {
            task: task.id,
            stage: task.stage.clone(),
            name: task.name.clone(),
        }
    }

    /// One line among those of other tasks.
    fn print(&self, attempt: u64, line: &str, format: Format) -> anyhow::Result<()> {
        match format {
            Format::Table | Format::Wide => output::print(&format!("{}/{}: {line}\n", self.stage, self.name)),
            Format::Json | Format::Yaml => {
                let value = json!({"task": self.task, "stage": self.stage, "name": self.name,
                    "attempt": attempt, "line": line});
                output::print_value(&value, format)
            }
        }
    }
}

/// Of each task that has begun, the newest attempt's; followed, every attempt's that runs or begins.
pub(crate) async fn of_job(arguments: JobLogs) -> anyhow::Result<()> {
    if arguments.follow {
        let printed = follow::job(&arguments);
        return within(&arguments.remote, &arguments.job, printed).await;
    }
    let mut client = connect(&arguments.remote).await?;
    let begun = [
        TaskState::Running,
        TaskState::Done,
        TaskState::Failed,
        TaskState::Abandoned,
    ];
    let format = arguments.remote.how.format;
    let tasks = client.tasks(&arguments.job, &begun, &arguments.stage).await?;
    if tasks.is_empty() {
        require_stage(&mut client, &arguments.job, &arguments.stage).await?;
    }
    for task in tasks {
        let mut lines = match client.logs(task.id, 0, arguments.tail, false).await {
            // An abandoned task may never have been tried.
            Err(Error::NotFound(_)) => continue,
            opened => opened?,
        };
        let named = Named::of(&task);
        while let Some(part) = lines.next().await? {
            for line in part.lines {
                named.print(part.attempt, &line, format)?;
            }
        }
    }
    Ok(())
}

/// Of one attempt; followed, of the attempts after it too.
pub(crate) async fn of_task(arguments: TaskLogs) -> anyhow::Result<()> {
    if arguments.follow {
        let printed = follow::task(&arguments);
        let what = format!("task {}", arguments.task);
        return within(&arguments.remote, &what, printed).await;
    }
    let mut client = connect(&arguments.remote).await?;
    let TaskLogs {
        task, attempt, tail, ..
    } = arguments;
    let mut following = client.logs(task, attempt, tail, false).await?;
    while let Some(part) = following.next().await? {
        if part.lagged {
            output::say("lines before these were left out");
        }
        for line in part.lines {
            print(part.attempt, &line, arguments.remote.how.format)?;
        }
    }
    Ok(())
}

/// One line of the only task.
fn print(attempt: u64, line: &str, format: Format) -> anyhow::Result<()> {
    match format {
        Format::Table | Format::Wide => output::print(&format!("{line}\n")),
        Format::Json | Format::Yaml => {
            let value: Value = json!({"attempt": attempt, "line": line});
            output::print_value(&value, format)
        }
    }
}

async fn within(
    remote: &Remote,
    what: &str,
    printed: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    match remote.timeout {
        None => printed.await,
        Some(timeout) => tokio::time::timeout(timeout, printed)
            .await
            .map_err(|_| failure::timed_out(format!("{what} has not ended in time")))?,
    }
}
