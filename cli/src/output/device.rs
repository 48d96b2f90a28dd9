//! The devices of this machine.

use espalier_worker::agent::options::DeviceOptions;
use espalier_worker::discovery::{Gpu, Machine};
use serde_json::json;

use super::Listing;

/// The processor and every GPU, one a row.
pub(crate) fn devices(processor: &DeviceOptions, machine: &Machine) -> Listing {
    let mut listing = Listing {
        heads: vec![
            "DEVICE",
            "NAME",
            "MEMORY",
            "FREE",
            "IN USE",
            "CAPABILITY",
            "DRIVER",
            "USABLE",
        ],
        narrow: 8,
        rows: vec![vec![
            processor.id.clone(),
            processor.name.clone(),
            gibibytes(processor.memory_bytes),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
            "yes".to_owned(),
        ]],
        values: vec![json!({
            "id": processor.id,
            "kind": processor.kind,
            "name": processor.name,
            "memory_bytes": processor.memory_bytes,
            "threads": processor.threads,
            "usable": true,
        })],
        below: None,
    };
    let cuda = machine.cuda.clone().unwrap_or_default();
    let driver = match &machine.driver {
        Some(driver) => format!("{driver}, CUDA {cuda}"),
        None => format!("CUDA {cuda}"),
    };
    for gpu in &machine.gpus {
        listing.rows.push(row(gpu, &driver));
        listing.values.push(json!({
            "id": id(gpu),
            "kind": "cuda",
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "free_bytes": gpu.free_bytes,
            "in_use_bytes": in_use(gpu),
            "compute_capability": gpu.capability,
            "cuda_version": cuda,
            "driver_version": machine.driver,
            "usable": gpu.unusable.is_none(),
            "reason": gpu.unusable,
        }));
    }
    listing
}

fn row(gpu: &Gpu, driver: &str) -> Vec<String> {
    vec![
        id(gpu),
        gpu.name.clone(),
        gibibytes(gpu.memory_bytes),
        gibibytes(gpu.free_bytes),
        gibibytes(in_use(gpu)),
        gpu.capability.clone(),
        driver.to_owned(),
        gpu.unusable.clone().unwrap_or_else(|| "yes".to_owned()),
    ]
}

fn id(gpu: &Gpu) -> String {
    format!("cuda:{}", gpu.index)
}

/// By whoever it is, the driver itself and the process that looked among them.
fn in_use(gpu: &Gpu) -> u64 {
    gpu.memory_bytes.saturating_sub(gpu.free_bytes)
}

/// `139.8 GiB`.
fn gibibytes(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10) >> 30;
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_shown_with_what_is_in_use_and_why_it_cannot_be_used() {
        let gpu = Gpu {
            index: 1,
            name: "NVIDIA H200".to_owned(),
            capability: "9.0".to_owned(),
            memory_bytes: 140 << 30,
            free_bytes: 41 << 29,
            unusable: Some("GPU 1 is full".to_owned()),
        };
        let machine = Machine {
            cuda: Some("13.0".to_owned()),
            driver: Some("580.159.04".to_owned()),
            gpus: vec![gpu],
            ..Machine::default()
        };
        let listing = devices(&DeviceOptions::cpu(1), &machine);
        let row = listing.rows.get(1).cloned().unwrap_or_default();
        let shown: Vec<&str> = row.iter().map(String::as_str).collect();
        let expected = [
            "cuda:1",
            "NVIDIA H200",
            "140.0 GiB",
            "20.5 GiB",
            "119.5 GiB",
            "9.0",
            "580.159.04, CUDA 13.0",
            "GPU 1 is full",
        ];
        assert_eq!(shown, expected);
        assert_eq!(listing.heads.len(), expected.len());
        assert_eq!(
            listing.values.get(1).map(|value| &value["usable"]),
            Some(&json!(false))
        );
    }
}
