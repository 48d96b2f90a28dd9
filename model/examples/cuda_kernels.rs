//! Compiles every kernel of the CUDA backend, where NVIDIA's run-time compiler is and no device has to be, and
//! says what the compiler made of it. `make check-kernels` runs it.
//!
//! `quick` compiles the commonest for Hopper alone.
//!
//! Fails when a kernel is refused, spills more than 16 bytes, or has its matrix products made one by one.
#![allow(clippy::print_stdout)] // the figures are the point

use std::process::ExitCode;

use espalier_model::ops::cuda::{Error, KernelNeeds, Version, compile_all};

/// The most bytes that a kernel may spill: a loop counter or two.
const SPILLED: u32 = 16;

fn main() -> ExitCode {
    let quick = std::env::args().any(|argument| argument == "quick");
    let needs = if quick {
        KernelNeeds {
            norm_widths: vec![576],
            head_dims: vec![64, 128],
            decode_groups: vec![3],
        }
    } else {
        KernelNeeds {
            norm_widths: vec![64, 333, 576, 577, 2048, 8192],
            head_dims: vec![16, 64, 80, 128],
            decode_groups: vec![1, 3, 4],
        }
    };
    // Ampere, Ada and Hopper; later ones run what the first two do.
    let capabilities: &[(u32, u32)] = if quick {
        &[(9, 0)]
    } else {
        &[(8, 0), (8, 9), (9, 0)]
    };
    let mut sound = true;
    for &(major, minor) in capabilities {
        match check(&needs, Version { major, minor }) {
            Ok(good) => sound &= good,
            Err(error @ Error::LibraryMissing { .. }) => {
                println!("{error}");
                return ExitCode::from(2);
            }
            Err(error) => {
                println!("FAIL {error}");
                sound = false;
            }
        }
    }
    if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn check(needs: &KernelNeeds, capability: Version) -> Result<bool, Error> {
    let reports = compile_all(needs, capability)?;
    let mut failed = 0;
    for report in &reports {
        let good = report.spilled <= SPILLED && report.warnings.is_empty();
        failed += usize::from(!good);
        println!(
            "{} sm_{}{} {:74} {:3} registers {:4} bytes spilled {:5.2} s",
            if good { "ok  " } else { "FAIL" },
            capability.major,
            capability.minor,
            report.kernel,
            report.registers,
            report.spilled,
            report.seconds,
        );
        for line in &report.warnings {
            println!("     {line}");
        }
    }
    println!(
        "compute capability {capability}: {} kernels, {failed} failed",
        reports.len()
    );
    Ok(failed == 0)
}
