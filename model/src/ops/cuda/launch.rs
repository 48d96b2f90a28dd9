//! Modules on a device and launching what is in them, each argument checked against the kernel's own source.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};

use super::driver::{Context, check};
use super::error::{Error, Result};
use super::matrix::Matrix;
use super::source::{Parameter, Signature};
use super::stream::Stream;

/// The most parameters that a kernel has.
const PARAMETERS: usize = 24;
/// Dynamic shared memory that needs no asking.
const PLAIN_SHARED: u32 = 48 << 10;

/// Machine code on a device.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    handle: sys::CUmodule,
    entries: Vec<Entry>,
    /// Whether the device can start a kernel before the one before it has ended.
    starts_early: bool,
}

/// When a kernel may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// When everything queued before it has ended.
    InOrder,
    /// When the kernel before it lets it, if that and the device can: for a kernel that itself waits (`common.cuh`)
    /// before it reads what the two kernels before it write, or writes anything.
    Early,
}

// SAFETY: modules and functions are handles that any thread may use.
unsafe impl Send for Module {}
// SAFETY: as above; what changes is atomic.
unsafe impl Sync for Module {}

#[derive(Debug)]
struct Entry {
    name: &'static str,
    parameters: Vec<Parameter>,
    function: sys::CUfunction,
    /// Dynamic shared memory allowed so far.
    shared: AtomicU32,
}

/// How many blocks of how many threads, with how many bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: [usize; 3],
    pub(super) threads: u32,
    pub(super) shared: u32,
}

impl Grid {
    /// Blocks along one axis.
    pub(super) fn line(blocks: usize, threads: u32) -> Self {
        Self {
            blocks: [blocks, 1, 1],
            threads,
            shared: 0,
        }
    }
}

/// The arguments of one launch, in order.
#[derive(Debug)]
pub(super) struct Arguments {
    values: [u64; PARAMETERS],
    kinds: [Parameter; PARAMETERS],
    count: usize,
}

impl Arguments {
    pub(super) fn new() -> Self {
        Self {
            values: [0; PARAMETERS],
            kinds: [Parameter::Int; PARAMETERS],
            count: 0,
        }
    }

    fn push(mut self, kind: Parameter, value: u64) -> Self {
        // One too many is found by the count when it is compared with the kernel's.
        if let (Some(place), Some(of)) = (self.values.get_mut(self.count), self.kinds.get_mut(self.count)) {
            *place = value;
            *of = kind;
        }
        self.count += 1;
        self
    }

    /// Where a matrix begins.
    pub(super) fn start(self, matrix: &Matrix) -> Self {
        self.push(Parameter::Pointer, matrix.address())
    }

    /// Where a matrix begins, or null.
    pub(super) fn start_of_any(self, matrix: Option<&Matrix>) -> Self {
        self.push(Parameter::Pointer, matrix.map_or(0, Matrix::address))
    }

    /// Where a matrix begins, and its leading dimension.
    pub(super) fn matrix(self, matrix: &Matrix) -> Self {
        self.start(matrix).long(matrix.leading())
    }

    /// Where a matrix begins, and its leading dimension; null and 0 without one.
    pub(super) fn any_matrix(self, matrix: Option<&Matrix>) -> Self {
        self.start_of_any(matrix).long(matrix.map_or(0, Matrix::leading))
    }

    pub(super) fn long(self, value: usize) -> Self {
        self.push(Parameter::Long, value as u64)
    }

    /// A count; one that does not fit is made the largest, which [`Module::launch`] refuses.
    pub(super) fn int(self, value: usize) -> Self {
        let value = u32::try_from(value).unwrap_or(u32::MAX);
        self.push(Parameter::Int, u64::from(value))
    }

    pub(super) fn float(self, value: f32) -> Self {
        self.push(Parameter::Float, u64::from(value.to_bits()))
    }
}

impl Module {
    /// Loads machine code whose entry points are `signatures`.
    pub(super) fn load(context: &Arc<Context>, cubin: &[u8], signatures: Vec<Signature>) -> Result<Self> {
        context.bind()?;
        let mut module = Self {
            context: context.clone(),
            handle: ptr::null_mut(),
            entries: Vec::new(),
            starts_early: context.capability()?.major >= 9,
        };
        // SAFETY: the image is a whole CUBIN, from the compiler or a cache that checks sums; the driver reads
        // its length from its header.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&raw mut module.handle, cubin.as_ptr().cast())
        })?;
        for (name, parameters) in signatures {
            let terminated = std::ffi::CString::new(name).unwrap_or_default();
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded and the name is terminated.
            check("cuModuleGetFunction", unsafe {
                sys::cuModuleGetFunction(&raw mut function, module.handle, terminated.as_ptr())
            })?;
            module.entries.push(Entry {
                name,
                parameters,
                function,
                shared: AtomicU32::new(PLAIN_SHARED),
            });
        }
        Ok(module)
    }

    /// Queues the kernel `name`. Nothing is launched for no blocks.
    ///
    /// # Errors
    /// When the arguments are not those that the kernel declares, a count is too large for it, or the driver
    /// refuses.
    pub(super) fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        stream: &Stream,
        arguments: Arguments,
    ) -> Result<()> {
        self.launch_at(Start::InOrder, name, grid, stream, arguments)
    }

    /// As [`Module::launch`], perhaps before what is queued earlier has ended.
    ///
    /// # Errors
    /// As [`Module::launch`].
    pub(super) fn launch_at(
        &self,
        start: Start,
        name: &'static str,
        grid: Grid,
        stream: &Stream,
        mut arguments: Arguments,
    ) -> Result<()> {
        let entry = self.entries.iter().find(|entry| entry.name == name);
        let entry =
            entry.ok_or_else(|| mismatch(name, "an entry point of the module".to_owned(), &arguments))?;
        if arguments.kinds.get(..arguments.count) != Some(&entry.parameters[..]) {
            return Err(mismatch(name, format!("{:?}", entry.parameters), &arguments));
        }
        let too_large = arguments.kinds[..arguments.count]
            .iter()
            .zip(&arguments.values)
            .any(|(&kind, &value)| kind == Parameter::Int && value > i32::MAX as u64);
        let [x, y, z] = grid.blocks;
        let blocks = [x, y, z].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        if too_large || blocks[0] > i32::MAX as u32 || blocks[1] > 65535 || blocks[2] > 65535 {
            return Err(Error::Operand {
                operation: name,
                expected: "counts below 2^31, and at most 65535 sequences and tiles".to_owned(),
                found: format!(
                    "a grid of {:?} for {:?}",
                    grid.blocks,
                    &arguments.values[..arguments.count]
                ),
            });
        }
        if blocks.contains(&0) {
            return Ok(());
        }
        self.context.bind()?;
        stream.make_room()?;
        entry.allow_shared(grid.shared)?;
        let mut pointers = [ptr::null_mut::<c_void>(); PARAMETERS];
        for (pointer, value) in pointers.iter_mut().zip(&mut arguments.values) {
            *pointer = (&raw mut *value).cast();
        }
        if self.starts_early && start == Start::Early {
            return early(name, entry, blocks, grid, stream, &mut pointers);
        }
        // SAFETY: as many arguments of the kinds that the kernel declares, each in 8 bytes of which it reads the
        // first 4 or 8 (little-endian); what they point to was checked by the typed function that calls this,
        // and is kept by the pool's order until the kernel has run.
        check(name, unsafe {
            sys::cuLaunchKernel(
                entry.function,
                blocks[0],
                blocks[1],
                blocks[2],
                grid.threads,
                1,
                1,
                grid.shared,
                stream.raw().handle(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

/// Launches `entry` so that it may begin before what is queued earlier has ended.
fn early(
    name: &'static str,
    entry: &Entry,
    blocks: [u32; 3],
    grid: Grid,
    stream: &Stream,
    pointers: &mut [*mut c_void; PARAMETERS],
) -> Result<()> {
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: blocks[0],
        gridDimY: blocks[1],
        gridDimZ: blocks[2],
        blockDimX: grid.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared,
        hStream: stream.raw().handle(),
        attrs: &raw mut attribute,
        numAttrs: 1,
    };
    // SAFETY: the configuration and its attribute outlive the call; the arguments are as `launch_at` says.
    check(name, unsafe {
        sys::cuLaunchKernelEx(
            &raw const config,
            entry.function,
            pointers.as_mut_ptr(),
            ptr::null_mut(),
        )
    })
}

impl Entry {
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        if bytes <= self.shared.load(Ordering::Relaxed) {
            return Ok(());
        }
        let wanted = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function is of a loaded module.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(
                self.function,
                Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                wanted,
            )
        })?;
        self.shared.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

fn mismatch(kernel: &'static str, expected: String, arguments: &Arguments) -> Error {
    Error::Operand {
        operation: kernel,
        expected,
        found: format!("{:?}", arguments.kinds.get(..arguments.count)),
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.handle.is_null() || self.context.bind().is_err() {
            return;
        }
        // SAFETY: loaded in `load`; modules live as long as the device, whose end waits for its work.
        let _ = unsafe { sys::cuModuleUnload(self.handle) };
    }
}
