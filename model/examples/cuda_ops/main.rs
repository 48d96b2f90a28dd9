//! Every operation of the CUDA backend against float64 on the CPU, on random inputs at odd and aligned sizes, with
//! outputs poisoned first; the whole twice, for the same bits; then a few timings. `make check-gpu-ops` runs it.
//!
//! Prints a line for each comparison, the largest error of each kind of operation, and the seed, which
//! `ESPALIER_SEED` sets. `cuda_ops small` leaves out the large shapes and timings (for compute-sanitizer).
#![allow(clippy::print_stdout)] // the figures are the point

mod attention;
mod behaviour;
mod harness;
mod layers;
mod losses;
mod optimiser;
mod products;
mod timing;

use std::process::ExitCode;

use espalier_model::ops::cuda::{CudaDevice, KernelNeeds, Options, Result};

use harness::Harness;

fn main() -> ExitCode {
    let seed = std::env::var("ESPALIER_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random::<u32>);
    let small = std::env::args().any(|argument| argument == "small");
    println!("seed {seed}");
    match run(u64::from(seed), small) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("FAIL {error}");
            ExitCode::from(2)
        }
    }
}

fn open(plain_attention: bool) -> Result<CudaDevice> {
    let options = Options {
        memory_limit: Some(16 << 30),
        poison: true,
        plain_attention,
        ..Options::default()
    };
    CudaDevice::open(0, options)
}

fn run(seed: u64, small: bool) -> Result<bool> {
    let device = open(false)?;
    let info = device.info();
    println!(
        "{} (compute capability {}, {} multiprocessors), {} of {} MiB free",
        info.name,
        info.capability,
        info.multiprocessors,
        info.free >> 20,
        info.total >> 20
    );
    let begun = std::time::Instant::now();
    device.prepare(&KernelNeeds {
        norm_widths: vec![64, 576],
        head_dims: vec![64, 128],
        decode_groups: vec![3],
    })?;
    println!(
        "kernels of a small Llama ready: {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    let begun = std::time::Instant::now();
    let mut first = Harness::new(device, seed, None);
    every_operation(&mut first, small)?;
    let (device, bits) = first.finish();
    println!(
        "first pass: {:.1} s, {} MiB at most",
        begun.elapsed().as_secs_f64(),
        device.usage().in_use_peak >> 20
    );
    let mut second = Harness::new(device, seed, Some(bits.results));
    every_operation(&mut second, small)?;
    let (device, again) = second.finish();

    let mut plain = Harness::new(open(true)?, seed, None);
    plain.prefix = "plain ";
    attention::check(&mut plain, small)?;
    // Once: the last of it gives a device up.
    behaviour::check(&mut plain)?;
    let (_, plain) = plain.finish();

    if !small {
        timing::report(&device)?;
    }
    let comparisons = bits.comparisons + plain.comparisons;
    let failed = bits.failed + again.failed + plain.failed;
    println!(
        "{comparisons} comparisons with float64, {} repeated for the same bits, {failed} failed (seed {seed})",
        again.comparisons
    );
    Ok(failed == 0)
}

fn every_operation(harness: &mut Harness, small: bool) -> Result<()> {
    layers::check(harness, small)?;
    optimiser::check(harness)?;
    losses::check(harness, small)?;
    products::check(harness, small)?;
    attention::check(harness, small)
}
