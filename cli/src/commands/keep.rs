//! Looking after the workers of a coordinator.

use espalier_coordinator::client::Client;

use super::{confirm, connect, show};
use crate::args::{DrainWorker, KeepWorker, Listed, NamedWorker};
use crate::output;

pub(crate) async fn list(arguments: Listed) -> anyhow::Result<()> {
    show(&arguments, async |client: &mut Client| {
        Ok(output::workers(&client.workers().await?))
    })
    .await
}

pub(crate) async fn get(arguments: NamedWorker) -> anyhow::Result<()> {
    let worker = connect(&arguments.remote)
        .await?
        .worker(&arguments.worker)
        .await?;
    output::worker(&worker).print_one(arguments.remote.how)
}

pub(crate) async fn cordon(arguments: KeepWorker) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let worker = client.cordon(&arguments.worker, &arguments.reason).await?;
    output::worker(&worker).print_one(arguments.remote.how)
}

pub(crate) async fn uncordon(arguments: NamedWorker) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let worker = client.uncordon(&arguments.worker).await?;
    output::worker(&worker).print_one(arguments.remote.how)
}

pub(crate) async fn drain(arguments: DrainWorker) -> anyhow::Result<()> {
    let DrainWorker { keep, yes } = arguments;
    confirm(
        &format!("this has {} hand back what it runs, and leave", keep.worker),
        yes,
    )?;
    let mut client = connect(&keep.remote).await?;
    let worker = client.drain(&keep.worker, &keep.reason).await?;
    output::worker(&worker).print_one(keep.remote.how)
}

pub(crate) async fn restart(arguments: KeepWorker) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let worker = client.restart(&arguments.worker, &arguments.reason).await?;
    output::worker(&worker).print_one(arguments.remote.how)
}
