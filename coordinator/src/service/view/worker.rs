//! Workers as their keepers see them.

use std::time::Duration;

use espalier_proto::v1;

use crate::scheduler::{Device, EngineInfo, Standing, State, Worker};

/// A worker; `silent` since it was last heard.
pub fn worker(
    state: &State,
    worker: &Worker,
    connected: bool,
    silent: Option<Duration>,
    version: String,
) -> v1::Worker {
    let cordon = worker.cordon.as_ref();
    let (shown, message) = match (worker.standing, cordon) {
        (Standing::Lost, _) => (
            v1::WorkerState::Lost,
            "nothing was heard from it: its attempts were handed on".to_owned(),
        ),
        (Standing::Left, _) => (v1::WorkerState::Left, worker.drain.clone().unwrap_or_default()),
        (Standing::Leaving, _) => (v1::WorkerState::Leaving, worker.drain.clone().unwrap_or_default()),
        (Standing::Present, Some(cordon)) => (v1::WorkerState::Cordoned, cordon.reason.clone()),
        (Standing::Present, None) if connected => (v1::WorkerState::Ready, String::new()),
        (Standing::Present, None) => (v1::WorkerState::Away, "it is not connected".to_owned()),
    };
    let silent = silent.unwrap_or_default().as_millis();
    v1::Worker {
        name: worker.name.clone(),
        state: shown.into(),
        message,
        host: worker.host.to_string(),
        version,
        epoch: worker.epoch.0,
        silent_ms: u64::try_from(silent).unwrap_or(u64::MAX),
        devices: worker.devices.iter().map(|held| device(state, held)).collect(),
        failures_in_a_row: u32::try_from(worker.failed_in_a_row.len()).unwrap_or(u32::MAX),
    }
}

fn engine(announced: &EngineInfo) -> v1::Engine {
    v1::Engine {
        name: announced.name.to_string(),
        version: announced.version.to_string(),
    }
}

fn device(state: &State, device: &Device) -> v1::WorkerDevice {
    let attempt = device.attempt.and_then(|attempt| state.attempt(attempt));
    let task = attempt.and_then(|attempt| state.task(attempt.task));
    let stage = task.and_then(|task| state.job(task.job)?.stages.get(task.stage));
    v1::WorkerDevice {
        device: Some(v1::Device {
            id: device.info.id.to_string(),
            kind: device.info.kind.to_string(),
            name: device.info.name.to_string(),
            memory_bytes: device.info.memory_bytes,
            threads: device.info.threads,
            engines: device.info.engines.iter().map(engine).collect(),
        }),
        attempt: attempt.map_or(0, |attempt| attempt.lease.attempt.0),
        task: task.map_or(0, |task| task.id.0),
        job_id: task.map(|task| task.job.to_string()).unwrap_or_default(),
        stage: stage.map(|stage| stage.name.clone()).unwrap_or_default(),
    }
}
