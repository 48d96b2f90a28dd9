//! Devices: which there are, what is free on them, and opening one.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::arena::Usage;
use super::attention::Variants;
use super::beside::Beside;
use super::driver::{self, Context};
use super::error::{Error, Result, Version};
use super::graph::Recorder;
use super::kernel::Kernels;
use super::matmul::Matmuls;
use super::matrix::{Element, Matrix, bytes_of};
use super::memory::Pool;
use super::stream::Stream;
use super::transfer::{Landing, Plain, Staging};
use super::{cache, library};
use crate::collective::mesh;
use crate::tensor::to_bf16;

/// The least compute capability that the kernels run on: bf16 and asynchronous copies (Ampere).
const LEAST_CAPABILITY: Version = Version { major: 8, minor: 0 };
/// Free memory without which nothing useful can begin.
const LEAST_FREE: u64 = 512 << 20;
/// What is left to the driver and the libraries when no limit is given: modules, local memory, NCCL's buffers.
const RESERVE: u64 = 1 << 30;

/// What is known of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Counted from 0, in the driver's order.
    pub index: u32,
    /// The driver's name for it.
    pub name: String,
    /// Which instructions it has.
    pub capability: Version,
    /// Processors that run blocks.
    pub multiprocessors: u32,
    /// Bytes of the cache that all of them share.
    pub cache: u64,
    /// Bytes of memory.
    pub total: u64,
    /// Bytes that nobody has taken.
    pub free: u64,
}

impl DeviceInfo {
    /// Bytes that somebody has taken, whoever it is; the driver keeps a few hundred MiB for each process.
    pub fn in_use(&self) -> u64 {
        self.total.saturating_sub(self.free)
    }

    /// Whether the kernels run on it.
    pub fn is_supported(&self) -> bool {
        self.capability >= LEAST_CAPABILITY
    }
}

/// What a machine has for this backend.
#[derive(Debug)]
pub struct Survey {
    /// The CUDA version that the driver supports.
    pub driver: Version,
    /// Every device that the driver shows.
    pub devices: Vec<Surveyed>,
}

/// One device of a [`Survey`].
#[derive(Debug)]
pub struct Surveyed {
    /// What is known of it.
    pub info: DeviceInfo,
    /// Why it cannot be opened now.
    pub unusable: Option<Error>,
}

/// Every device that the driver shows, those that cannot be opened too; or `only` the one of this number, if it is there.
///
/// Asking what is free takes a context on each device that is asked about, which takes memory until the process ends:
/// call it in a process that ends soon.
///
/// # Errors
/// When there is no driver, it is too old, or it fails.
pub fn discover(only: Option<u32>) -> Result<Survey> {
    let driver = library::driver()?;
    let mut devices = Vec::new();
    for index in (0..driver::count()?).filter(|index| only.is_none_or(|only| only == *index)) {
        let device = driver::Device::get(index)?;
        let mut info = describe(index, device)?;
        let unusable = match ready(&mut info, device) {
            Ok(_) => library::matmul()
                .and_then(|()| library::compiler().map(|_| ()))
                .err(),
            Err(error) => Some(error),
        };
        devices.push(Surveyed { info, unusable });
    }
    Ok(Survey { driver, devices })
}

fn describe(index: u32, device: driver::Device) -> Result<DeviceInfo> {
    Ok(DeviceInfo {
        index,
        name: device.name()?,
        capability: device.capability()?,
        multiprocessors: device.multiprocessors()?,
        cache: device.cache()?,
        total: device.total_memory()?,
        free: 0,
    })
}

/// A context on a device on which work can begin; fills in what is free.
fn ready(info: &mut DeviceInfo, device: driver::Device) -> Result<Arc<Context>> {
    let (index, name) = (info.index, info.name.clone());
    let context = Context::new(device)?;
    if let Some(context) = &context {
        (info.free, info.total) = context.memory()?;
    }
    if !info.is_supported() {
        let capability = info.capability;
        return Err(Error::DeviceTooOld {
            index,
            name,
            capability,
        });
    }
    context
        .filter(|_| info.free >= LEAST_FREE)
        .ok_or(Error::DeviceFull {
            index,
            name,
            free: info.free,
            total: info.total,
            needed: LEAST_FREE,
        })
}

/// How a device is used.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes that tensors may take; none: what is free when the device is opened, less a reserve.
    pub memory_limit: Option<u64>,
    /// How long any single wait for the device may take; it may be for a slower rank, as long as a mesh's calls may
    /// take.
    pub deadline: Duration,
    /// Where compiled kernels are kept; none: nowhere.
    pub cache: Option<PathBuf>,
    /// Whether matrix products are timed when they are first met, and the best of several algorithms kept.
    pub tune: bool,
    /// Whether attention runs its plain variants even where the device has quicker ones.
    pub plain_attention: bool,
    /// Whether fresh memory is filled with NaN, to find reads of what nobody wrote.
    pub poison: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            memory_limit: None,
            deadline: mesh::Options::default().call,
            cache: cache::default_directory(),
            tune: false,
            plain_attention: false,
            poison: false,
        }
    }
}

/// An open device: its memory, its streams, its kernels. Operations are methods, in files by what they compute;
/// each queues work on the compute stream and returns. They check shapes, element types and leading dimensions,
/// not whether operands overlap: each says where they may.
#[derive(Debug)]
pub struct CudaDevice {
    // Dropped in this order: what holds memory before the pool, the pool before the context.
    pub(super) matmuls: Matmuls,
    pub(super) variants: Variants,
    pub(super) kernels: Kernels,
    staging: Staging,
    pool: Arc<Pool>,
    recorder: Arc<Recorder>,
    context: Arc<Context>,
    pub(super) info: DeviceInfo,
    pub(super) options: Options,
}

impl CudaDevice {
    /// Opens the `index`th device.
    ///
    /// # Errors
    /// When there is no driver or it is too old, the device is not there, too old or full, or a library of the
    /// toolkit is missing.
    pub fn open(index: u32, options: Options) -> Result<Self> {
        library::driver()?;
        let count = driver::count()?;
        if count == 0 {
            return Err(Error::NoDevice);
        }
        if index >= count {
            return Err(Error::DeviceNotThere { index, count });
        }
        let device = driver::Device::get(index)?;
        let mut info = describe(index, device)?;
        let context = ready(&mut info, device)?;
        library::matmul()?;
        let compute = Arc::new(Stream::new(&context, options.deadline)?);
        let room = info.free.saturating_sub(RESERVE).max(LEAST_FREE / 2);
        let limit = options.memory_limit.map_or(room, |limit| limit.min(room));
        if let Some(asked) = options.memory_limit.filter(|asked| *asked > room) {
            tracing::warn!(
                device = index,
                asked,
                free = info.free,
                "more memory was allowed than is free: {room} bytes are used"
            );
        }
        let recorder = Arc::new(Recorder::new(&context, &compute));
        let pool = Pool::new(&context, &recorder, limit, options.deadline, options.poison);
        Ok(Self {
            matmuls: Matmuls::new(&context, options.tune)?,
            variants: Variants::default(),
            kernels: Kernels::new(&context, info.capability, options.cache.clone()),
            staging: Staging::new(&context, &compute, options.deadline),
            pool: Arc::new(pool),
            recorder,
            context,
            info,
            options,
        })
    }

    /// What was known of the device when it was opened.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The stream that this thread's operations are queued on: the compute stream, unless it records.
    pub fn compute(&self) -> &Stream {
        self.recorder.stream()
    }

    pub(super) fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// A share of the device for work beside the compute stream.
    pub(crate) fn beside(&self) -> Beside {
        Beside {
            pool: self.pool.clone(),
            compute: self.recorder.compute().clone(),
            context: self.context.clone(),
            index: self.info.index,
            deadline: self.options.deadline,
        }
    }

    /// A stream beside the compute stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new_stream(&self) -> Result<Stream> {
        Stream::new(&self.context, self.options.deadline)
    }

    /// Bytes free on the device now, and in all.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.context.memory()
    }

    /// Memory of this process's tensors.
    pub fn usage(&self) -> Usage {
        self.pool.usage()
    }

    /// Bytes that tensors may take.
    pub fn memory_limit(&self) -> u64 {
        self.pool.limit()
    }

    /// Forgets the high-water marks of [`CudaDevice::usage`].
    pub fn reset_peaks(&self) {
        self.pool.reset_peaks();
    }

    /// Gives memory that nothing uses back to the device.
    ///
    /// # Errors
    /// When the work queued before does not end.
    pub fn trim(&self) -> Result<()> {
        self.pool.trim()
    }

    /// Waits until everything queued so far has ended.
    ///
    /// # Errors
    /// When it fails or takes longer than the deadline; the device is then given up.
    pub fn wait(&self) -> Result<()> {
        self.recorder.expect_none("a wait")?;
        self.recorder
            .compute()
            .wait(self.options.deadline, "the work queued so far")
    }

    /// A contiguous matrix that nobody has written yet.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn matrix(&self, element: Element, rows: usize, columns: usize) -> Result<Matrix> {
        self.padded_matrix(element, rows, columns, columns)
    }

    /// As [`CudaDevice::matrix`], with `leading` elements from row to row.
    ///
    /// # Errors
    /// When there is no memory, or rows would overlap.
    pub fn padded_matrix(
        &self,
        element: Element,
        rows: usize,
        columns: usize,
        leading: usize,
    ) -> Result<Matrix> {
        let bytes = bytes_of(element, rows, leading).unwrap_or(u64::MAX);
        Matrix::new(self.pool.allocate(bytes)?, element, rows, columns, leading)
    }

    /// A contiguous matrix of zeros.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn zeros(&self, element: Element, rows: usize, columns: usize) -> Result<Matrix> {
        let bytes = bytes_of(element, rows, columns).unwrap_or(u64::MAX);
        let buffer = self.pool.allocate(bytes)?;
        buffer.fill(0)?;
        Matrix::new(buffer, element, rows, columns, columns)
    }

    /// Sets every element of a contiguous matrix to 0, in the order of the compute stream.
    ///
    /// # Errors
    /// When it has gaps or the driver refuses.
    pub(super) fn clear(&self, matrix: &Matrix) -> Result<()> {
        self.expect_row("clear", "the matrix", matrix, matrix.element(), matrix.len())?;
        let bytes = bytes_of(matrix.element(), 1, matrix.len()).and_then(|bytes| usize::try_from(bytes).ok());
        match bytes.unwrap_or_default() {
            0 => Ok(()),
            bytes => self
                .context
                .fill(matrix.address(), 0, bytes, self.compute().raw()),
        }
    }

    /// A contiguous f32 matrix with `data`, row by row.
    ///
    /// # Errors
    /// When `data` does not hold `rows * columns` elements, or there is no memory.
    pub fn upload_f32(&self, data: &[f32], rows: usize, columns: usize) -> Result<Matrix> {
        self.upload(Element::F32, data, rows, columns)
    }

    /// A contiguous bf16 matrix with `data`, rounded to the nearest, ties to even.
    ///
    /// # Errors
    /// As [`CudaDevice::upload_f32`].
    pub fn upload_bf16(&self, data: &[f32], rows: usize, columns: usize) -> Result<Matrix> {
        self.upload(Element::Bf16, &to_bf16(data), rows, columns)
    }

    /// A row of i32.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn upload_i32(&self, data: &[i32]) -> Result<Matrix> {
        self.upload(Element::I32, data, 1, data.len())
    }

    pub(super) fn upload<T: Plain>(
        &self,
        element: Element,
        data: &[T],
        rows: usize,
        columns: usize,
    ) -> Result<Matrix> {
        if rows.checked_mul(columns) != Some(data.len()) {
            return Err(Error::Operand {
                operation: "upload",
                expected: format!("{rows} x {columns} elements"),
                found: format!("{} elements", data.len()),
            });
        }
        self.recorder.expect_none("a copy to the device")?;
        let matrix = self.matrix(element, rows, columns)?;
        self.staging.upload(data, matrix.address())?;
        Ok(matrix)
    }

    /// Overwrites the elements of a contiguous f32 or i32 `row`, in the order of the compute stream.
    pub(super) fn overwrite<T: Plain>(&self, target: &Matrix, data: &[T]) -> Result<()> {
        if !target.is_contiguous()
            || target.len() != data.len()
            || target.element().bytes() != size_of::<T>() as u64
        {
            return Err(Error::Operand {
                operation: "overwrite",
                expected: target.to_string(),
                found: format!("{} elements of {} bytes", data.len(), size_of::<T>()),
            });
        }
        self.recorder.expect_none("a copy to the device")?;
        self.staging.upload(data, target.address())
    }

    /// The elements of a bf16 or f32 matrix, row by row, after everything queued so far.
    ///
    /// # Errors
    /// When that work fails or does not end in time.
    pub fn download(&self, matrix: &Matrix) -> Result<Vec<f32>> {
        self.recorder.expect_none("a copy from the device")?;
        // Another device's work is not queued here: nothing would say that it has been done.
        self.expect_float("download", "the matrix", matrix)?;
        let gapless = if matrix.is_contiguous() {
            matrix.clone()
        } else {
            let copy = self.matrix(matrix.element(), matrix.rows(), matrix.columns())?;
            self.cast(&copy, matrix)?;
            copy
        };
        match gapless.element() {
            Element::Bf16 => {
                let bits: Vec<u16> = self.staging.download(gapless.address(), gapless.len())?;
                Ok(bits
                    .into_iter()
                    .map(|bits| half::bf16::from_bits(bits).to_f32())
                    .collect())
            }
            _ => self.staging.download(gapless.address(), gapless.len()),
        }
    }

    /// Begins to bring a row of at most 8 f64 to the host; does not wait.
    pub(super) fn land(&self, row: &Matrix) -> Result<Landing<f64>> {
        self.recorder.expect_none("a copy from the device")?;
        self.expect_row("land", "the row", row, Element::F64, row.len())?;
        self.staging.land(row.address(), row.len())
    }

    /// Begins to bring a row of at most 16,384 i32 to the host; does not wait.
    pub(super) fn land_i32(&self, row: &Matrix) -> Result<Landing<i32>> {
        self.recorder.expect_none("a copy from the device")?;
        self.expect_row("land", "the row", row, Element::I32, row.len())?;
        self.staging.land(row.address(), row.len())
    }

    /// The elements of an i32 row.
    ///
    /// # Errors
    /// As [`CudaDevice::download`].
    pub fn download_i32(&self, row: &Matrix) -> Result<Vec<i32>> {
        self.recorder.expect_none("a copy from the device")?;
        self.expect_row("download", "the row", row, Element::I32, row.len())?;
        self.staging.download(row.address(), row.len())
    }

    /// An error that names one operand of an operation.
    pub(super) fn wrong(&self, operation: &'static str, what: &str, expected: &str, found: &Matrix) -> Error {
        Error::Operand {
            operation,
            expected: format!("{what}: {expected}"),
            found: found.to_string(),
        }
    }

    /// Checks one operand's type and shape, and that it lies on this device.
    pub(super) fn expect(
        &self,
        operation: &'static str,
        what: &str,
        found: &Matrix,
        element: Element,
        (rows, columns): (usize, usize),
    ) -> Result<()> {
        let same = found.element() == element && found.rows() == rows && found.columns() == columns;
        if !same || !found.is_of(&self.pool) {
            let expected = format!("{rows} x {columns} {} on this device", element.kernel_name());
            return Err(self.wrong(operation, what, &expected, found));
        }
        Ok(())
    }

    /// As [`CudaDevice::expect`], for `count` elements without gaps, whatever their shape.
    pub(super) fn expect_row(
        &self,
        operation: &'static str,
        what: &str,
        found: &Matrix,
        element: Element,
        count: usize,
    ) -> Result<()> {
        if !found.is_contiguous() {
            return Err(self.wrong(operation, what, "no gaps between rows", found));
        }
        if found.element() != element || found.len() != count || !found.is_of(&self.pool) {
            let expected = format!("{count} elements of {} on this device", element.kernel_name());
            return Err(self.wrong(operation, what, &expected, found));
        }
        Ok(())
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Kernels must not be unloaded under their work. When this fails the device is given up, and they are not.
        let _ = self.wait();
    }
}
