//! Workers and their devices.

use espalier_proto::json;
use espalier_proto::v1::{Worker, WorkerDevice};

use super::{Listing, seconds};

/// Workers, one a row.
pub(crate) fn workers(workers: &[Worker]) -> Listing {
    let row = |worker: &Worker| {
        let busy = worker.devices.iter().filter(|device| device.attempt != 0).count();
        vec![
            worker.name.clone(),
            json::worker_state(worker.state()).to_owned(),
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
        values: workers.iter().map(json::worker).collect(),
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
