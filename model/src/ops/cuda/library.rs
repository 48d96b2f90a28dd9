//! Finding the driver and the toolkit's libraries when they are first needed, without which nothing else may run.
//!
//! cudarc opens libraries by name and panics when one is not there, so each is looked for first. Where the
//! dynamic loader does not find one of the toolkit's by itself, it is opened by its full path from the places
//! where toolkits and Python wheels put it; the loader then knows the name.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::driver;
use super::error::{Error, Result, Version};

/// The least CUDA that the driver must support.
pub const REQUIRED: Version = Version { major: 13, minor: 0 };

/// Directories to search before all others, separated by colons.
pub const SEARCH_VARIABLE: &str = "ESPALIER_CUDA_LIBRARIES";

/// Makes sure that the driver is there and new enough.
///
/// # Errors
/// When it is not.
pub(super) fn driver() -> Result<()> {
    // SAFETY: opening the driver's library runs its initialisers, which is what the name promises.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    let found = driver::version()?;
    if found < REQUIRED {
        return Err(Error::DriverTooOld {
            found,
            required: REQUIRED,
        });
    }
    Ok(())
}

/// Makes sure that the run-time compiler is there, and gives its version.
///
/// # Errors
/// When it is not there or too old.
pub(super) fn compiler() -> Result<Version> {
    // What libnvrtc opens by name when it compiles; it must be known to the loader by then.
    let builtins = open("libnvrtc-builtins.so.13.0");
    let library = "libnvrtc.so.13";
    // SAFETY: opening the library runs its initialisers, which only set it up.
    if !open(library) && !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(missing(library, "compiles the kernels"));
    }
    let found = super::nvrtc::version()?;
    if found < REQUIRED {
        return Err(Error::LibraryTooOld {
            library,
            found,
            required: REQUIRED,
        });
    }
    // Later versions bring their own builtins, found beside them.
    if !builtins && found == REQUIRED {
        return Err(missing(
            "libnvrtc-builtins.so.13.0",
            "is a part of the kernels' compiler",
        ));
    }
    Ok(found)
}

/// Makes sure that cuBLASLt is there.
///
/// # Errors
/// When it is not.
pub(super) fn matmul() -> Result<()> {
    let library = "libcublasLt.so.13";
    // SAFETY: as above.
    if open(library) || unsafe { cudarc::cublaslt::sys::is_culib_present() } {
        return Ok(());
    }
    Err(missing(library, "multiplies matrices"))
}

fn missing(library: &'static str, purpose: &'static str) -> Error {
    let directories: Vec<String> = directories()
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    Error::LibraryMissing {
        library,
        purpose,
        searched: format!("the loader's own places, {}", directories.join(", ")),
    }
}

/// Libraries stay open as long as the process: cudarc keeps pointers into them.
static OPENED: Mutex<Vec<Library>> = Mutex::new(Vec::new());

/// Opens `name`, so that opening it by name finds it from then on.
fn open(name: &str) -> bool {
    let explicit = explicit_directories()
        .into_iter()
        .map(|directory| directory.join(name));
    let usual = usual_directories()
        .into_iter()
        .map(|directory| directory.join(name));
    let candidates = explicit
        .filter(|path| path.exists())
        .chain([PathBuf::from(name)])
        .chain(usual.filter(|path| path.exists()));
    for candidate in candidates {
        // SAFETY: the libraries are NVIDIA's, whose initialisers only set them up; global, because they look
        // for each other by name.
        if let Ok(library) = unsafe { Library::open(Some(&candidate), RTLD_NOW | RTLD_GLOBAL) } {
            if let Ok(mut opened) = OPENED.lock() {
                opened.push(library);
            } else {
                std::mem::forget(library);
            }
            return true;
        }
    }
    false
}

fn directories() -> Vec<PathBuf> {
    let mut all = explicit_directories();
    all.extend(usual_directories());
    all
}

fn explicit_directories() -> Vec<PathBuf> {
    std::env::var_os(SEARCH_VARIABLE)
        .map(|value| {
            std::env::split_paths(&value)
                .filter(|path| path.is_absolute())
                .collect()
        })
        .unwrap_or_default()
}

/// Where toolkits, distributions and the wheels of a Python environment put the libraries.
fn usual_directories() -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from("/usr/local/cuda/lib64")];
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        found.extend(std::env::var_os(variable).map(|home| Path::new(&home).join("lib64")));
    }
    for environment in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = std::env::var_os(environment) else {
            continue;
        };
        let Ok(versions) = std::fs::read_dir(Path::new(&root).join("lib")) else {
            continue;
        };
        let packages = versions
            .flatten()
            .map(|version| version.path().join("site-packages/nvidia/cu13/lib"));
        found.extend(packages.filter(|path| path.is_dir()));
    }
    found
}
