//! NVIDIA's run-time compiler: source to machine code. No device and no driver is needed for it.

use std::ffi::{CString, c_char, c_int};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use super::error::{Error, Result, Version};
use super::library;
use super::source::{HEADERS, Specialisation};

fn check(call: &'static str, code: nvrtcResult) -> Result<()> {
    match code {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        code => Err(Error::Driver {
            call,
            code: format!("{code:?}"),
        }),
    }
}

library::functions! {
    /// What is used of the compiler.
    Functions {
        nvrtcVersion(*mut c_int, *mut c_int) -> nvrtcResult;
        nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> nvrtcResult;
        nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char) -> nvrtcResult;
        nvrtcGetProgramLogSize(nvrtcProgram, *mut usize) -> nvrtcResult;
        nvrtcGetProgramLog(nvrtcProgram, *mut c_char) -> nvrtcResult;
        nvrtcGetCUBINSize(nvrtcProgram, *mut usize) -> nvrtcResult;
        nvrtcGetCUBIN(nvrtcProgram, *mut c_char) -> nvrtcResult;
        nvrtcDestroyProgram(*mut nvrtcProgram) -> nvrtcResult;
    }
}

/// The compiler, opened when it is first asked for.
///
/// # Errors
/// When it is not there.
fn functions() -> Result<&'static Functions> {
    static FOUND: OnceLock<Functions> = OnceLock::new();
    if let Some(functions) = FOUND.get() {
        return Ok(functions);
    }
    let library = "libnvrtc.so.13";
    let functions = Functions::of(library, library::find(library, "compiles the kernels")?)?;
    Ok(FOUND.get_or_init(|| functions))
}

/// The compiler's version.
///
/// # Errors
/// When it is not there.
pub(super) fn version() -> Result<Version> {
    let (mut major, mut minor) = (0, 0);
    let functions = functions()?;
    // SAFETY: both pointers are to live integers.
    check("nvrtcVersion", unsafe {
        (functions.nvrtcVersion)(&raw mut major, &raw mut minor)
    })?;
    let number = |value: c_int| u32::try_from(value).unwrap_or(0);
    Ok(Version {
        major: number(major),
        minor: number(minor),
    })
}

/// Machine code, and what the compiler had to say.
#[derive(Debug)]
pub(super) struct Compiled {
    /// For `cuModuleLoadData`.
    pub(super) cubin: Vec<u8>,
    /// Empty unless there are warnings or `--ptxas-options=-v` was asked for.
    pub(super) log: String,
}

/// Compiles one specialisation for devices of `capability`.
///
/// # Errors
/// When the source is refused, with the compiler's messages.
pub(super) fn compile(kernel: &Specialisation, capability: Version, verbose: bool) -> Result<Compiled> {
    let refused = |log: String| Error::Compile {
        kernel: kernel.to_string(),
        log,
    };
    let text =
        |value: &str| CString::new(value).map_err(|_| refused("the source holds a zero byte".to_owned()));
    let source = text(
        kernel
            .text()
            .ok_or_else(|| refused("there is no such source".to_owned()))?,
    )?;
    let name = text(kernel.source())?;
    let mut owned = Vec::new();
    for header in HEADERS {
        owned.push((text(header.name)?, text(header.text)?));
    }
    let texts: Vec<*const c_char> = owned.iter().map(|(_, text)| text.as_ptr()).collect();
    let names: Vec<*const c_char> = owned.iter().map(|(name, _)| name.as_ptr()).collect();
    let mut options = kernel.options(capability);
    if verbose {
        options.push("--ptxas-options=-v".to_owned());
    }
    let option_texts: Vec<CString> = options.iter().map(|option| text(option)).collect::<Result<_>>()?;
    let options: Vec<*const c_char> = option_texts.iter().map(|option| option.as_ptr()).collect();
    let length = |count: usize| c_int::try_from(count).unwrap_or(c_int::MAX);

    let functions = functions()?;
    let mut program = Program {
        functions,
        raw: ptr::null_mut(),
    };
    // SAFETY: every pointer is to a terminated string, or an array of as many as said, that outlives the call.
    check("nvrtcCreateProgram", unsafe {
        (functions.nvrtcCreateProgram)(
            &raw mut program.raw,
            source.as_ptr(),
            name.as_ptr(),
            length(owned.len()),
            texts.as_ptr(),
            names.as_ptr(),
        )
    })?;
    // SAFETY: the program was created above; the options are terminated strings that outlive the call.
    let code =
        unsafe { (functions.nvrtcCompileProgram)(program.raw, length(options.len()), options.as_ptr()) };
    let log = program.log();
    match code {
        nvrtcResult::NVRTC_SUCCESS => Ok(Compiled {
            cubin: program.cubin()?,
            log: log?,
        }),
        nvrtcResult::NVRTC_ERROR_COMPILATION => Err(refused(log?)),
        code => Err(refused(format!("{code:?} {}", log.unwrap_or_default()))),
    }
}

struct Program {
    functions: &'static Functions,
    raw: nvrtcProgram,
}

impl Program {
    fn log(&self) -> Result<String> {
        let mut size = 0;
        // SAFETY: the program is alive, and the pointer is to a live integer.
        check("nvrtcGetProgramLogSize", unsafe {
            (self.functions.nvrtcGetProgramLogSize)(self.raw, &raw mut size)
        })?;
        let mut log = vec![0_u8; size];
        // SAFETY: the buffer is as long as the compiler said.
        check("nvrtcGetProgramLog", unsafe {
            (self.functions.nvrtcGetProgramLog)(self.raw, log.as_mut_ptr().cast())
        })?;
        Ok(String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .trim()
            .to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive, and the pointer is to a live integer.
        check("nvrtcGetCUBINSize", unsafe {
            (self.functions.nvrtcGetCUBINSize)(self.raw, &raw mut size)
        })?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: the buffer is as long as the compiler said.
        check("nvrtcGetCUBIN", unsafe {
            (self.functions.nvrtcGetCUBIN)(self.raw, cubin.as_mut_ptr().cast())
        })?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created once and destroyed once.
            let _ = unsafe { (self.functions.nvrtcDestroyProgram)(&raw mut self.raw) };
        }
    }
}
