//! What a device does at its limits: memory, operands that do not fit, a damaged cache, work that takes too long.

use std::time::Duration;

use espalier_model::ops::cuda::{CudaDevice, Element, Error, Onto, Options, Result};

use crate::harness::Harness;

pub(crate) fn check(harness: &mut Harness) -> Result<()> {
    memory(harness)?;
    operands(harness)?;
    recordings(harness)?;
    damaged_cache(harness)?;
    deadline(harness)
}

fn memory(harness: &mut Harness) -> Result<()> {
    let limit = 64 << 20;
    let options = Options {
        memory_limit: Some(limit),
        ..Options::default()
    };
    let device = CudaDevice::open(0, options)?;
    let columns = 10 << 20;
    let first = device.matrix(Element::F32, 1, columns)?;
    let refused = matches!(
        device.matrix(Element::F32, 1, columns),
        Err(Error::OutOfMemory {
            limit: 67_108_864,
            in_use: 41_943_040,
            ..
        })
    );
    harness.record(
        "memory",
        "limit",
        refused,
        "a second 40 MiB were given where 64 are allowed",
    );
    drop(first);
    let second = device.matrix(Element::F32, 1, columns + 1024)?;
    let usage = device.usage();
    let counted = usage.in_use_peak == (40 << 20) + 4096 && usage.held <= limit && usage.held_peak <= limit;
    harness.record("memory", "usage", counted, &format!("is counted as {usage:?}"));
    drop(second);
    device.trim()?;
    harness.record(
        "memory",
        "trim",
        device.usage().held == 0,
        "does not give everything back",
    );
    Ok(())
}

/// Work that is recorded: its memory is its own, it runs when it is replayed, and what cannot be replayed is refused.
fn recordings(harness: &mut Harness) -> Result<()> {
    let device = &harness.device;
    let (sum, one) = (
        device.upload_bf16(&[0.0; 64], 1, 64)?,
        device.upload_bf16(&[1.0; 64], 1, 64)?,
    );
    let before = device.usage().in_use;
    let (graph, copy) = device.record(|| {
        // Zeros and a copy in memory that the recording takes anew; the first's is the second's again.
        drop(device.zeros(Element::Bf16, 1, 64)?);
        device.add_assign(&sum, &one)?;
        let copy = device.matrix(Element::Bf16, 1, 64)?;
        device.cast(&copy, &sum)?;
        Ok::<_, Error>(copy)
    })?;
    let unused = device.download(&sum)?;
    // What others allocate and write between replays is none of the recording's.
    let mut held = Vec::new();
    for _ in 0..3 {
        device.replay(&graph)?;
        held.push(device.upload_bf16(&[7.0; 64], 1, 64)?);
    }
    let (added, copied) = (device.download(&sum)?, device.download(&copy)?);
    let good = unused == [0.0; 64] && added == [3.0; 64] && copied == added;
    let refused = device.record(|| device.download(&sum));
    let refused = matches!(refused, Err(Error::Recording { .. }));
    device.replay(&graph)?;
    let after = device.download(&sum)?;
    drop((graph, copy, held));
    let freed = device.usage().in_use == before;
    harness.record("recording", "replays", good, "did not give the sum and its copy");
    harness.record(
        "recording",
        "of a download",
        refused && after == [4.0; 64],
        "was not refused, or ended the device",
    );
    harness.record("recording", "memory", freed, "is not given back");
    Ok(())
}

fn operands(harness: &mut Harness) -> Result<()> {
    let device = &harness.device;
    let new = |rows, columns| device.matrix(Element::Bf16, rows, columns);
    let (x, weight, output) = (new(16, 32)?, new(8, 32)?, new(16, 8)?);
    let refused = |result: Result<()>| matches!(result, Err(Error::Operand { .. }));
    let wide = device.linear(&x, &new(8, 33)?, None, Onto::Nothing, &output);
    let f32_output = device.matrix(Element::F32, 16, 32)?;
    let mixed = device.swiglu(&x, &x, &f32_output);
    let heads = device.prepare_attention(72);
    let token = device.tokens(&[0, 9], 9).map(|_| ());
    let other = CudaDevice::open(0, Options::default())?;
    let elsewhere = device.linear(
        &x,
        &weight,
        None,
        Onto::Nothing,
        &other.matrix(Element::Bf16, 16, 8)?,
    );
    let all = [wide, mixed, heads, token, elsewhere].map(refused);
    harness.record(
        "operands",
        "that do not fit",
        all == [true; 5],
        &format!("are refused as {all:?}"),
    );
    Ok(())
}

fn damaged_cache(harness: &mut Harness) -> Result<()> {
    let directory = std::env::temp_dir().join(format!("espalier-cuda-ops-{}", std::process::id()));
    let sum = || -> Result<Vec<f32>> {
        let options = Options {
            cache: Some(directory.clone()),
            memory_limit: Some(64 << 20),
            ..Options::default()
        };
        let device = CudaDevice::open(0, options)?;
        let (a, b) = (
            device.upload_f32(&[1.0, 2.0], 1, 2)?,
            device.upload_f32(&[0.5, 0.25], 1, 2)?,
        );
        device.add_assign(&a, &b)?;
        device.download(&a)
    };
    let files = || -> std::io::Result<Vec<(std::path::PathBuf, Vec<u8>)>> {
        let entries = std::fs::read_dir(&directory)?;
        entries
            .map(|entry| entry.and_then(|entry| Ok((entry.path(), std::fs::read(entry.path())?))))
            .collect()
    };
    let right = sum()? == [1.5, 2.25];
    let whole = files().unwrap_or_default();
    let mut damaged = whole.clone();
    for (path, content) in &mut damaged {
        if let Some(byte) = content.last_mut() {
            *byte ^= 1;
        }
        // An error shows in the comparison below.
        let _ = std::fs::write(path, content);
    }
    let harmed = files().is_ok_and(|found| found == damaged) && whole.len() == 1;
    let again = sum()? == [1.5, 2.25];
    let mended = files().is_ok_and(|found| found == whole);
    let _ = std::fs::remove_dir_all(&directory);
    harness.record(
        "cache",
        "damaged",
        right && harmed && again && mended,
        "was not compiled again",
    );
    Ok(())
}

fn deadline(harness: &mut Harness) -> Result<()> {
    let options = Options {
        deadline: Duration::from_millis(2),
        memory_limit: Some(1 << 30),
        ..Options::default()
    };
    let device = CudaDevice::open(0, options)?;
    let new = |rows, columns| device.zeros(Element::Bf16, rows, columns);
    let (x, weight, output) = (new(8192, 2048)?, new(8192, 2048)?, new(8192, 8192)?);
    for _ in 0..300 {
        device.linear(&x, &weight, None, Onto::Nothing, &output)?;
    }
    let begun = std::time::Instant::now();
    let late = matches!(device.wait(), Err(Error::Deadline { .. }));
    let waited = begun.elapsed();
    let given_up = matches!(device.add_assign(&x, &x), Err(Error::Lost));
    drop((x, weight, output, device));
    // The work takes about 100 ms on an H200; longer elsewhere.
    let closed = begun.elapsed();
    let soon = closed < Duration::from_millis(50);
    let said = format!("is late {late}, given up {given_up}, waited {waited:?}, closed after {closed:?}");
    harness.record("deadline", "of 2 ms", late && given_up && soon, &said);
    Ok(())
}
