//! Tasks of jobs on a coordinator.

use espalier_coordinator::client::Client;
use espalier_proto::v1::TaskState;

use super::{connect, logs, require_stage, show};
use crate::args::{ListTasks, OneTask, TaskCommand, TaskStateName};
use crate::output;

pub(crate) async fn run(command: TaskCommand) -> anyhow::Result<()> {
    match command {
        TaskCommand::List(arguments) => list(arguments).await,
        TaskCommand::Get(arguments) => get(arguments).await,
        TaskCommand::Logs(arguments) => logs::of_task(arguments).await,
    }
}

async fn list(arguments: ListTasks) -> anyhow::Result<()> {
    let states: Vec<TaskState> = arguments.state.iter().map(|name| state(*name)).collect();
    show(&arguments.listed, async |client: &mut Client| {
        let tasks = client.tasks(&arguments.job, &states, &arguments.stage).await?;
        if tasks.is_empty() && !arguments.listed.watch {
            require_stage(client, &arguments.job, &arguments.stage).await?;
        }
        Ok(output::tasks(&tasks))
    })
    .await
}

fn state(name: TaskStateName) -> TaskState {
    match name {
        TaskStateName::Waiting => TaskState::Waiting,
        TaskStateName::Running => TaskState::Running,
        TaskStateName::Done => TaskState::Done,
        TaskStateName::Failed => TaskState::Failed,
        TaskStateName::Abandoned => TaskState::Abandoned,
    }
}

async fn get(arguments: OneTask) -> anyhow::Result<()> {
    let task = connect(&arguments.remote).await?.task(arguments.task).await?;
    output::task(&task).print_one(arguments.remote.how)
}
