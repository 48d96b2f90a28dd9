//! What opening a GPU says where there is none, where the driver is too old, where the device is full or too old,
//! and where a library of the toolkit is missing.
//!
//! All but the first play on a `libcuda.so.1` that the test builds with the machine's C compiler. A driver is loaded
//! once in a process, so each case runs this program again, with the false driver first on the loader's path.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::path::Path;
use std::process::Command;

use espalier_model::ops::cuda::{CudaDevice, Options, discover};

/// As much of the driver as opening a device needs; the environment says how it answers.
const FALSE_DRIVER: &str = include_str!("false_driver/cuda.c");

fn build_false_driver(directory: &Path, macros: &[&str]) -> bool {
    let source = directory.join("driver.c");
    std::fs::write(&source, FALSE_DRIVER).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-o"])
        .arg(directory.join("libcuda.so.1"))
        .args(macros)
        .arg(&source)
        .status();
    match built {
        Ok(status) => {
            assert!(status.success(), "{compiler} refuses the false driver");
            true
        }
        Err(error) => {
            eprintln!("skipped: no C compiler ({compiler}: {error}) to build a false driver with");
            false
        }
    }
}

/// Runs `case` below in a process that finds the driver in `directory`, and gives what it printed.
fn run(case: &str, directory: &Path, settings: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", case, "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", directory)
        .env_remove("ESPALIER_CUDA_LIBRARIES")
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn opens_the_first_device() {
    let only = std::env::var("ONLY").ok().map(|only| only.parse().unwrap());
    println!(
        "discovered: {}",
        discover(only).map_or_else(|error| error.to_string(), |found| format!("{:?}", found.devices))
    );
    let index = std::env::var("DEVICE").map_or(0, |index| index.parse().unwrap());
    match CudaDevice::open(index, Options::default()) {
        Ok(device) => println!("opened: {:?}", device.info()),
        Err(error) => println!("refused: {error}"),
    }
}

/// What the child above says on a false driver with these settings; none where none can be built.
fn refused(settings: &[(&str, &str)]) -> Option<String> {
    let directory = tempfile::tempdir().unwrap();
    build_false_driver(directory.path(), &[])
        .then(|| run("opens_the_first_device", directory.path(), settings))
}

#[test]
fn a_machine_without_a_driver_is_told_so_in_one_sentence() {
    if Path::new("/proc/driver/nvidia/version").exists() {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    let empty = tempfile::tempdir().unwrap();
    let said = run("opens_the_first_device", empty.path(), &[]);
    let sentence =
        "no NVIDIA driver was found (libcuda.so.1): install one for CUDA 13 or later, or use the cpu device";
    assert!(said.contains(&format!("discovered: {sentence}\n")), "{said}");
    assert!(said.contains(&format!("refused: {sentence}\n")), "{said}");
}

#[test]
fn a_driver_too_old_is_named_with_what_is_needed() {
    let Some(said) = refused(&[("FALSE_VERSION", "12080"), ("FALSE_DEVICES", "1")]) else {
        return;
    };
    let sentence = "the NVIDIA driver supports CUDA 12.8, and 13.0 is needed: update the driver";
    assert!(said.contains(&format!("refused: {sentence}\n")), "{said}");
    assert!(said.contains(&format!("discovered: {sentence}\n")), "{said}");
}

#[test]
fn a_driver_that_is_damaged_is_named_with_what_is_wrong_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("libcuda.so.1");
    std::fs::write(&file, "no library").unwrap();
    // By the name that is tried first as well, so that a real one is not.
    std::fs::copy(&file, directory.path().join("libcuda.so")).unwrap();
    let said = run("opens_the_first_device", directory.path(), &[]);
    let place = directory.path().display();
    for begins in ["discovered", "refused"] {
        let sentence = format!("{begins}: the NVIDIA driver cannot be used: {place}/libcuda.so: ");
        assert!(said.contains(&sentence), "{said}");
    }
    std::fs::remove_file(directory.path().join("libcuda.so")).unwrap();
    std::fs::remove_file(&file).unwrap();
    if !build_false_driver(directory.path(), &["-DFALSE_IS_DAMAGED"]) {
        return;
    }
    std::fs::copy(&file, directory.path().join("libcuda.so")).unwrap();
    let said = run(
        "opens_the_first_device",
        directory.path(),
        &[("FALSE_VERSION", "13000")],
    );
    let sentence = format!("refused: the NVIDIA driver cannot be used: {place}/libcuda.so");
    assert!(said.contains(&sentence), "{said}");
    assert!(
        said.contains(" has no function cuCtxGetStreamPriorityRange: install it again"),
        "{said}"
    );
}

#[test]
fn a_driver_without_devices_is_no_device_and_discovers_none() {
    let Some(said) = refused(&[("FALSE_VERSION", "13000")]) else {
        return;
    };
    assert!(said.contains("discovered: []\n"), "{said}");
    assert!(said.contains("refused: the NVIDIA driver sees no GPU"), "{said}");
}

#[test]
fn a_look_at_one_device_touches_no_other() {
    let settings = |only| {
        [
            ("FALSE_VERSION", "13000"),
            ("FALSE_DEVICES", "3"),
            ("FALSE_MAJOR", "9"),
            ("FALSE_FREE_MIB", "70000"),
            ("FALSE_TELLS", "1"),
            ("DEVICE", "3"),
            ("ONLY", only),
        ]
    };
    for (only, found) in [("1", &["1"][..]), ("3", &[]), ("", &["0", "1", "2"])] {
        let mut settings = settings(only).to_vec();
        settings.retain(|(_, value)| !value.is_empty());
        let Some(said) = refused(&settings) else { return };
        let contexts: Vec<&str> = said
            .lines()
            .filter_map(|line| line.strip_prefix("a context on "))
            .collect();
        assert_eq!(contexts, found, "{said}");
        assert_eq!(said.matches("name: \"False GPU\"").count(), found.len(), "{said}");
    }
}

#[test]
fn a_device_beyond_the_last_is_refused_with_their_number() {
    let settings = [
        ("FALSE_VERSION", "13000"),
        ("FALSE_DEVICES", "2"),
        ("FALSE_MAJOR", "9"),
        ("FALSE_FREE_MIB", "70000"),
        ("DEVICE", "2"),
    ];
    let Some(said) = refused(&settings) else { return };
    assert!(
        said.contains("refused: there is no GPU 2: this machine has 2, counted from 0"),
        "{said}"
    );
    assert!(
        said.contains("name: \"False GPU\"") && said.contains("multiprocessors: 132"),
        "{said}"
    );
}

#[test]
fn a_device_before_ampere_is_refused_by_name() {
    let settings = [
        ("FALSE_VERSION", "13000"),
        ("FALSE_DEVICES", "1"),
        ("FALSE_MAJOR", "7"),
        ("FALSE_FREE_MIB", "70000"),
    ];
    let Some(said) = refused(&settings) else { return };
    assert!(
        said.contains("refused: GPU 0 (False GPU) has compute capability 7.0, and 8.0"),
        "{said}"
    );
}

#[test]
fn a_full_device_is_refused_with_what_is_free_even_where_no_context_fits() {
    let full = [
        ("FALSE_VERSION", "13000"),
        ("FALSE_DEVICES", "1"),
        ("FALSE_MAJOR", "9"),
        ("FALSE_FREE_MIB", "100"),
    ];
    let Some(said) = refused(&full) else { return };
    let sentence =
        "refused: GPU 0 (False GPU) is full: 100 of 81920 MiB are free, and at least 512 are needed";
    assert!(said.contains(sentence), "{said}");
    let no_room = [
        ("FALSE_VERSION", "13000"),
        ("FALSE_DEVICES", "1"),
        ("FALSE_MAJOR", "9"),
        ("FALSE_NO_ROOM", "1"),
    ];
    let Some(said) = refused(&no_room) else { return };
    assert!(
        said.contains("refused: GPU 0 (False GPU) is full: 0 of 81920 MiB are free"),
        "{said}"
    );
}

#[test]
fn a_missing_library_of_the_toolkit_is_named_with_where_it_was_looked_for() {
    let settings = [
        ("FALSE_VERSION", "13000"),
        ("FALSE_DEVICES", "1"),
        ("FALSE_MAJOR", "9"),
        ("FALSE_FREE_MIB", "70000"),
        ("CUDA_HOME", "/nowhere/cuda"),
    ];
    let Some(said) = refused(&settings) else { return };
    if said.contains("cuStreamCreate failed") {
        eprintln!("skipped: this machine has cuBLASLt");
        return;
    }
    assert!(
        said.contains("refused: libcublasLt.so.13 was not found; it multiplies matrices"),
        "{said}"
    );
    assert!(said.contains("/nowhere/cuda/lib64"), "{said}");
    assert!(said.contains("ESPALIER_CUDA_LIBRARIES"), "{said}");
}
