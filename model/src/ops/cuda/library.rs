//! Finding the driver and the toolkit's libraries when they are first needed, without which nothing else may run.
//!
//! cudarc opens libraries by name and panics when one, or a function of it, is not there, so the driver is looked at
//! first. The toolkit's
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

/// The driver's file by the names that cudarc tries, in its order.
const DRIVER: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
/// What finding out its version takes.
const FIRST_FUNCTION: &str = "cuDriverGetVersion";
/// All others of the driver's that are called.
const FUNCTIONS: [&str; 39] = [
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncSetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
];

/// Makes sure that the driver is there, whole and new enough, and gives the CUDA version that it supports.
///
/// # Errors
/// When it is not.
pub(super) fn driver() -> Result<Version> {
    let opened = match open_any(DRIVER.map(PathBuf::from)) {
        Ok(opened) => opened,
        Err(Some(reason)) => return Err(Error::DriverDamaged { reason }),
        Err(None) => return Err(Error::NoDriver),
    };
    expect_function(&opened, FIRST_FUNCTION)?;
    let found = driver::version()?;
    if found < REQUIRED {
        return Err(Error::DriverTooOld {
            found,
            required: REQUIRED,
        });
    }
    FUNCTIONS
        .iter()
        .try_for_each(|function| expect_function(&opened, function))?;
    Ok(found)
}

fn expect_function(driver: &Library, name: &str) -> Result<()> {
    // SAFETY: the symbol is only looked for.
    if unsafe { driver.get::<*const ()>(name.as_bytes()) }.is_ok() {
        return Ok(());
    }
    // What the process has open says which file the loader chose.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files = maps.lines().filter_map(|line| line.get(line.find('/')?..));
    let is_driver = |file: &&str| {
        let name = Path::new(file).file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("libcuda.so"))
    };
    let file = files.find(is_driver).unwrap_or("libcuda.so.1");
    Err(Error::DriverDamaged {
        reason: format!("{file} has no function {name}"),
    })
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
    let purpose = "is a part of the kernels' compiler";
    match open(&format!("libnvrtc-builtins.so.{found}")) {
        Ok(builtins) => std::mem::forget(builtins),
        Err(Some(reason)) => return Err(Error::LibraryDamaged { reason, purpose }),
        Err(None) if found == REQUIRED => return Err(missing("libnvrtc-builtins.so.13.0", purpose)),
        Err(None) => {}
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
/// When neither is found, or what is found is damaged.
pub(super) fn find(library: &'static str, purpose: &'static str) -> Result<Library> {
    let plain = library.trim_end_matches(|last: char| last == '.' || last.is_ascii_digit());
    let either = open(library).or_else(|reason| open(plain).map_err(|other| reason.or(other)));
    either.map_err(|reason| match reason {
        Some(reason) => Error::LibraryDamaged { reason, purpose },
        None => missing(library, purpose),
    })
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
///
/// # Errors
/// As [`open_any`].
fn open(name: &str) -> std::result::Result<Library, Option<String>> {
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
    open_any(candidates)
}

/// The first of these libraries that can be opened.
///
/// # Errors
/// When none can: what is wrong with the first that is there, with its file; none where there is none.
fn open_any(candidates: impl IntoIterator<Item = PathBuf>) -> std::result::Result<Library, Option<String>> {
    let mut damaged = None;
    for candidate in candidates {
        // SAFETY: the libraries are NVIDIA's, whose initialisers only set them up; global, because they look
        // for each other by name.
        let error = match unsafe { Library::open(Some(&candidate), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => return Ok(library),
            Err(error) => error,
        };
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        // A library that it needs in turn may be what is not there.
        let name = candidate.display().to_string();
        let is_absent = reason.contains("No such file or directory") && reason.contains(&name);
        if !is_absent {
            damaged.get_or_insert(reason);
        }
    }
    Err(damaged)
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
