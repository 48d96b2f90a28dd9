//! Finding the driver and the toolkit's libraries when they are first needed, without which nothing else may run.
//!
//! cudarc opens libraries by name and panics when one is not there, so the driver is looked for first. The toolkit's
//! are opened here, and their functions taken from what was opened: cudarc would try `libnvrtc.so` before
//! `libnvrtc.so.13`, which an older toolkit may have put where the loader looks. Where the loader does not find one,
//! it is opened by its full path from the places where toolkits and Python wheels put it.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::error::{Error, Result, Version};
use super::{cublas, driver, nvrtc};

/// The least CUDA that the driver must support.
pub const REQUIRED: Version = Version { major: 13, minor: 0 };

/// Directories to search before all others, separated by colons.
pub const SEARCH_VARIABLE: &str = "ESPALIER_CUDA_LIBRARIES";

/// Makes sure that the driver is there and new enough, and gives the CUDA version that it supports.
///
/// # Errors
/// When it is not.
pub(super) fn driver() -> Result<Version> {
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
    Ok(found)
}

/// Makes sure that the run-time compiler is there, and gives its version.
///
/// # Errors
/// When it is not there or too old.
pub(super) fn compiler() -> Result<Version> {
    let found = nvrtc::version()?;
    expect_version("libnvrtc.so.13", found)?;
    // What it opens by name when it compiles; it must be known to the loader by then. Beside a later version it may
    // be found by itself.
    match open(&format!("libnvrtc-builtins.so.{found}")) {
        Some(builtins) => std::mem::forget(builtins),
        None if found == REQUIRED => {
            let library = "libnvrtc-builtins.so.13.0";
            return Err(missing(library, "is a part of the kernels' compiler"));
        }
        None => {}
    }
    Ok(found)
}

/// Makes sure that cuBLASLt is there and new enough.
///
/// # Errors
/// When it is not.
pub(super) fn matmul() -> Result<()> {
    expect_version("libcublasLt.so.13", cublas::version()?)
}

fn expect_version(library: &'static str, found: Version) -> Result<()> {
    if found < REQUIRED {
        return Err(Error::LibraryTooOld {
            library,
            found,
            required: REQUIRED,
        });
    }
    Ok(())
}

/// Opens `library`, or what has its name without the version.
///
/// # Errors
/// When neither is found.
pub(super) fn find(library: &'static str, purpose: &'static str) -> Result<Library> {
    let plain = library.trim_end_matches(|last: char| last == '.' || last.is_ascii_digit());
    open(library)
        .or_else(|| open(plain))
        .ok_or_else(|| missing(library, purpose))
}

/// A table of functions of a library, each with the type that cudarc's of the same name has, which `sys` must name;
/// `without sys`, of one that cudarc does not have, each with the type that its header gives it.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident { $($name:ident($($argument:ty),* $(,)?) -> $answer:ty;)* }) => {
        $(const _: unsafe fn($($argument),*) -> $answer = sys::$name;)*

        library::functions! { $(#[$about])* $table without sys { $($name($($argument),*) -> $answer;)* } }
    };
    ($(#[$about:meta])* $table:ident without sys { $($name:ident($($argument:ty),* $(,)?) -> $answer:ty;)* }) => {
        $(#[$about])*
        #[allow(non_snake_case)] // the library's own names
        struct $table {
            $($name: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        impl $table {
            /// Those of a library that is never closed.
            fn of(library: &'static str, opened: libloading::os::unix::Library) -> $crate::ops::cuda::error::Result<Self> {
                let table = Self {
                    $($name: {
                        // SAFETY: the library's function of this name has this type: it is that of its header.
                        let symbol = unsafe { opened.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| $crate::ops::cuda::error::Error::Driver {
                            call: stringify!($name),
                            code: format!("{library} does not have it"),
                        })?
                    },)*
                };
                std::mem::forget(opened);
                Ok(table)
            }
        }
    };
}
pub(super) use functions;

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

/// Opens `name`. Whoever opens it by this name from then on, while it stays open, gets the same.
fn open(name: &str) -> Option<Library> {
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
            return Some(library);
        }
    }
    None
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
        for version in versions.flatten() {
            let packages = version.path().join("site-packages/nvidia");
            let places = ["cu13/lib", "nccl/lib"].map(|place| packages.join(place));
            found.extend(places.into_iter().filter(|path| path.is_dir()));
        }
    }
    found
}
