//! Workers and their devices.

use espalier_proto::v1::{Worker, WorkerDevice, WorkerState};
use serde_json::{Value, json};

use super::{Listing, seconds};

/// Workers, one a row.
pub(crate) fn workers(workers: &[Worker]) -> Listing {
    let row = |worker: &Worker| {
        let busy = worker.devices.iter().filter(|device| device.attempt != 0).count();
        vec![
            worker.name.clone(),
            state(worker.state()).to_owned(),
            format!("{busy}/{}", worker.devices.len()),
            seconds(worker.silent_ms),
            worker.message.clone(),
            worker.host.clone(),
            worker.version.clone(),
            worker.epoch.to_string(),
            worker.failures_in_a_row.to_string(),
        ]
    };
    Listing {
        heads: vec![
            "WORKER", "STATE", "BUSY", "SILENT", "MESSAGE", "HOST", "VERSION", "EPOCH", "FAILURES",
        ],
        narrow: 5,
        rows: workers.iter().map(row).collect(),
        values: workers.iter().map(worker_json).collect(),
        below: None,
    }
}

/// One worker, its devices below.
pub(crate) fn worker(worker: &Worker) -> Listing {
    let some = |id: u64| if id == 0 { String::new() } else { id.to_string() };
    let row = |device: &WorkerDevice| {
        let described = device.device.clone().unwrap_or_default();
        vec![
            described.id,
            described.kind,
            described.name,
            device.job_id.clone(),
            device.stage.clone(),
            some(device.task),
            some(device.attempt),
        ]
    };
    let devices = Listing {
        heads: vec!["DEVICE", "KIND", "NAME", "JOB", "STAGE", "TASK", "ATTEMPT"],
        narrow: 7,
        rows: worker.devices.iter().map(row).collect(),
        values: Vec::new(),
        below: None,
    };
    Listing {
        below: Some(Box::new(devices)),
        ..workers(std::slice::from_ref(worker))
    }
}

fn worker_json(worker: &Worker) -> Value {
    json!({
        "name": worker.name,
        "state": state(worker.state()),
        "message": worker.message,
        "host": worker.host,
        "version": worker.version,
        "epoch": worker.epoch,
        "silent_ms": worker.silent_ms,
        "failures_in_a_row": worker.failures_in_a_row,
        "devices": worker.devices.iter().map(device_json).collect::<Vec<_>>(),
    })
}

fn device_json(device: &WorkerDevice) -> Value {
    let described = device.device.clone().unwrap_or_default();
    json!({
        "id": described.id,
        "kind": described.kind,
        "name": described.name,
        "memory_bytes": described.memory_bytes,
        "threads": described.threads,
        "attempt": device.attempt,
        "task": device.task,
        "job": device.job_id,
        "stage": device.stage,
    })
}

fn state(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Unspecified => "unknown",
        WorkerState::Ready => "ready",
        WorkerState::Away => "away",
        WorkerState::Cordoned => "cordoned",
        WorkerState::Leaving => "leaving",
        WorkerState::Lost => "lost",
    }
}
