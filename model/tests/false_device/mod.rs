//! Builds a driver, a compiler, a cuBLASLt and an NCCL that compute nothing, or little, with the machine's C compiler,
//! and runs a case with them. Libraries are loaded once in a process, so each case runs the test program again with
//! them first on the loader's path.

use std::path::Path;
use std::process::Command;

const DRIVER: &str = include_str!("cuda.c");
/// The compiler, of version VERSION, which answers RESULT to what it is asked to compile.
pub const COMPILER: &str = include_str!("nvrtc.c");
/// The matrix products, of version VERSION.
pub const PRODUCTS: &str = include_str!("cublaslt.c");

/// Builds a library of `source` under `name`; false where there is no C compiler.
pub fn build(directory: &Path, name: &str, source: &str, macros: &[&str]) -> bool {
    let file = directory.join(name).with_extension("c");
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-o"])
        .arg(directory.join(name))
        .arg(format!("-Wl,-soname,{name}"))
        .args(macros)
        .arg(&file)
        .status();
    match built {
        Ok(status) => {
            assert!(status.success(), "{compiler} refuses {name}");
            true
        }
        Err(error) => {
            eprintln!("skipped: no C compiler ({compiler}: {error}) to build a false device with");
            false
        }
    }
}

/// Everything that one GPU needs.
pub fn build_device(directory: &Path) -> bool {
    // By the name that is tried first as well, so that a real driver is not.
    build(directory, "libcuda.so", DRIVER, &[])
        && build(directory, "libcuda.so.1", DRIVER, &[])
        && build(
            directory,
            "libnvrtc.so.13",
            COMPILER,
            &["-DVERSION=13000", "-DRESULT=0"],
        )
        && build(directory, "libnvrtc-builtins.so.13.0", "", &[])
        && build(directory, "libcublasLt.so.13", PRODUCTS, &["-DVERSION=130000"])
}

/// That `case` of this test program passes in a process that finds the libraries in `directory`.
pub fn passes_with(case: &str, directory: &Path, settings: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", case, "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", directory)
        .env("ESPALIER_CUDA_LIBRARIES", directory)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case}: {}\n{said}", output.status);
    assert!(said.contains("1 passed"), "{said}");
}
