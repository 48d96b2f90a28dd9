//! The tasks that look after the devices, one each. One that ends though nobody told it to is begun anew, and what
//! ran there is told to have crashed: its lease is never kept alive with nobody at work.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use espalier_model::Device;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{sleep, timeout};

use super::core::DeviceEvent;
use super::device::{Command, Runner};
use super::leftover::Mark;
use super::memory::{DeviceMemory, HostMemory, RECLAIM_TIMEOUT};
use super::options::{DeviceOptions, WorkerOptions};
use crate::discovery::GpuMemory;

/// Commands waiting for one device: more than it is given while it does anything.
const COMMANDS: usize = 64;
/// Events of all devices waiting for the loop.
const EVENTS: usize = 1024;
/// The pause before a device is begun anew.
const PAUSE: Duration = Duration::from_secs(1);
/// How long all devices together may take to end their children: longer than one that is killed takes.
const END_PATIENCE: Duration = Duration::from_secs(20);

/// All devices of a worker.
#[derive(Debug)]
pub(super) struct Devices {
    options: WorkerOptions,
    commands: HashMap<String, (mpsc::Sender<Command>, AbortHandle)>,
    tasks: JoinSet<()>,
    names: HashMap<Id, String>,
    to_events: mpsc::Sender<DeviceEvent>,
    events: mpsc::Receiver<DeviceEvent>,
}

impl Devices {
    pub(super) fn start(options: &WorkerOptions) -> Self {
        let (to_events, events) = mpsc::channel(EVENTS);
        let mut devices = Self {
            options: options.clone(),
            commands: HashMap::new(),
            tasks: JoinSet::new(),
            names: HashMap::new(),
            to_events,
            events,
        };
        for device in &options.devices {
            devices.begin(device.clone(), Duration::ZERO);
        }
        devices
    }

    fn begin(&mut self, device: DeviceOptions, pause: Duration) {
        let (sender, commands) = mpsc::channel(COMMANDS);
        let (id, coordinator) = (device.id.clone(), &self.options.coordinator);
        let mark = Mark::new(coordinator, &self.options.name, &id);
        let child = self.options.child.clone();
        let memory: Arc<dyn DeviceMemory> = match device.device() {
            Device::Cpu => Arc::new(HostMemory),
            Device::Cuda(index) => Arc::new(GpuMemory {
                program: child.program.clone(),
                index,
            }),
        };
        let runner = Runner::new(device, child, coordinator, mark, self.to_events.clone())
            .with_memory(memory, RECLAIM_TIMEOUT);
        let handle = self.tasks.spawn(async move {
            sleep(pause).await;
            runner.run(commands).await;
        });
        self.names.insert(handle.id(), id.clone());
        self.commands.insert(id, (sender, handle));
    }

    /// News of a device. Safe to drop and call again.
    pub(super) async fn next(&mut self) -> DeviceEvent {
        loop {
            tokio::select! {
                // What a device has said counts before its end.
                biased;
                Some(event) = self.events.recv() => return event,
                Some(ended) = self.tasks.join_next_with_id() => {
                    let (task, how) = match ended {
                        Ok((task, ())) => (task, "it returned".to_owned()),
                        Err(error) => (error.id(), error.to_string()),
                    };
                    let device = self.names.remove(&task);
                    let device = self.options.devices.iter().find(|known| Some(&known.id) == device.as_ref());
                    let Some(device) = device.cloned() else { continue };
                    tracing::error!(device = device.id, how, "a device's task has ended and is begun anew");
                    let id = device.id.clone();
                    self.begin(device, PAUSE);
                    return DeviceEvent::Gone { device: id };
                }
            }
        }
    }

    /// Gives a device a command. One that takes none is given up, which [`Devices::next`] tells.
    pub(super) fn command(&self, device: &str, command: Command) {
        if let Some((sender, task)) = self.commands.get(device)
            && let Err(error) = sender.try_send(command)
        {
            tracing::error!(device, %error, "a device takes no commands and is given up");
            task.abort();
        }
    }

    /// Ends every task, and with it every child; waits for all of them, but not for ever.
    pub(super) async fn stop(&mut self) {
        self.events.close();
        self.commands.clear();
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        if timeout(END_PATIENCE, ended).await.is_err() {
            tracing::error!("devices do not end: their children are killed");
            // A child is killed with its group when its task is dropped.
            self.tasks.shutdown().await;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::path::PathBuf;

    use espalier_proto::v1::{Assign, Lease};

    use super::*;
    use crate::agent::core::{Ended, Run};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn devices(script: &str) -> Devices {
        let name = format!("devices-{}", std::process::id());
        let mut options = WorkerOptions::cpu("http://127.0.0.1:1", &name, 1);
        options.child.program = Some(PathBuf::from("/bin/sh"));
        options.child.arguments = vec!["-c".to_owned(), script.to_owned()];
        Devices::start(&options)
    }

    #[tokio::test]
    async fn a_device_whose_task_ends_is_told_once_and_serves_again() {
        let mut devices = devices("exit 0");
        let (_, task) = devices.commands.get("cpu").unwrap();
        task.abort();
        let gone = DeviceEvent::Gone {
            device: "cpu".to_owned(),
        };
        assert_eq!(timeout(PATIENCE, devices.next()).await.unwrap(), gone);
        let lease = Lease::default();
        // A task that cannot be decoded is answered by whoever looks after the device.
        let run = Run {
            lease,
            assign: Assign {
                spec_json: b"{}".to_vec().into(),
                ..Assign::default()
            },
            artifact_store: String::new(),
            artifact_store_id: String::new(),
        };
        devices.command("cpu", Command::Run(Box::new(run)));
        let answer = timeout(PATIENCE, devices.next()).await.unwrap();
        let DeviceEvent::Ended {
            ended: Ended::Failure(_),
            ..
        } = answer
        else {
            panic!("{answer:?}")
        };
        devices.stop().await;
    }

    #[tokio::test]
    async fn a_device_that_takes_no_commands_is_given_up_rather_than_waited_for() {
        let mut devices = devices("exit 0");
        // Nothing runs between two commands: the runtime has one thread, and nobody waits.
        for _ in 0..=COMMANDS {
            devices.command("cpu", Command::Replace);
        }
        let answer = timeout(PATIENCE, devices.next()).await.unwrap();
        assert!(matches!(answer, DeviceEvent::Gone { .. }), "{answer:?}");
        devices.stop().await;
    }
}
