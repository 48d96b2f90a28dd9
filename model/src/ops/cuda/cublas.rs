//! cuBLASLt behind safe functions: plans of matrix products, and running them.
//!
//! cuBLASLt is column-major, and a row-major matrix is the transpose of a column-major one of the same bytes. So
//! `out = a · b` is asked for as `outᵀ = bᵀ · aᵀ`: operands change places, nothing is copied.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t as Epilogue, cublasLtHandle_t,
    cublasLtMatmulAlgo_t as Algorithm, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulHeuristicResult_t as Heuristic, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t, cublasStatus_t as Status,
    cudaDataType, cudaStream_t,
};

use super::driver::{Address, Context};
use super::error::{Error, Result, Version};
use super::library;
use super::matrix::Element;
use super::stream::Stream;

library::functions! {
    /// What is used of cuBLASLt.
    Functions {
        cublasLtGetVersion() -> usize;
        cublasLtCreate(*mut cublasLtHandle_t) -> Status;
        cublasLtDestroy(cublasLtHandle_t) -> Status;
        cublasLtMatmulDescCreate(*mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType) -> Status;
        cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t) -> Status;
        cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, Attribute, *const c_void, usize) -> Status;
        cublasLtMatrixLayoutCreate(*mut cublasLtMatrixLayout_t, cudaDataType, u64, u64, i64) -> Status;
        cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t) -> Status;
        cublasLtMatmulPreferenceCreate(*mut cublasLtMatmulPreference_t) -> Status;
        cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) -> Status;
        cublasLtMatmulPreferenceSetAttribute(
            cublasLtMatmulPreference_t, Preference, *const c_void, usize,
        ) -> Status;
        cublasLtMatmulAlgoGetHeuristic(
            cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int, *mut Heuristic,
            *mut c_int,
        ) -> Status;
        cublasLtMatmul(
            cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void, cublasLtMatrixLayout_t,
            *const c_void, cublasLtMatrixLayout_t, *const c_void, *const c_void, cublasLtMatrixLayout_t,
            *mut c_void, cublasLtMatrixLayout_t, *const Algorithm, *mut c_void, usize, cudaStream_t,
        ) -> Status;
    }
}

/// cuBLASLt, opened when it is first asked for.
///
/// # Errors
/// When it is not there.
fn functions() -> Result<&'static Functions> {
    static FOUND: OnceLock<Functions> = OnceLock::new();
    if let Some(functions) = FOUND.get() {
        return Ok(functions);
    }
    let library = "libcublasLt.so.13";
    let functions = Functions::of(library, library::find(library, "multiplies matrices")?)?;
    Ok(FOUND.get_or_init(|| functions))
}

/// The toolkit's version that cuBLASLt is of.
///
/// # Errors
/// When it is not there.
pub(super) fn version() -> Result<Version> {
    // SAFETY: it takes nothing and gives a number.
    let packed = unsafe { (functions()?.cublasLtGetVersion)() };
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    Ok(Version {
        major: number(packed / 10_000),
        minor: number(packed / 100 % 100),
    })
}

/// One operand as cuBLASLt sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    pub(super) element: Element,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) leading: usize,
    /// The largest power of two up to 16 that divides the address.
    pub(super) alignment: u32,
}

/// A product `target = left' · right' (+ source) (+ bias)`, everything row-major, `'` where transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub(super) left: Layout,
    pub(super) right: Layout,
    pub(super) left_transposed: bool,
    pub(super) right_transposed: bool,
    /// What is added; none: nothing is read.
    pub(super) source: Option<Layout>,
    pub(super) target: Layout,
    pub(super) bias: bool,
}

/// Where the operands lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Addresses {
    pub(super) left: Address,
    pub(super) right: Address,
    pub(super) source: Option<Address>,
    pub(super) target: Address,
    pub(super) bias: Option<Address>,
    pub(super) workspace: Address,
}

impl std::fmt::Display for Product {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |layout: &Layout, transposed: bool| {
            let mark = if transposed { "ᵀ" } else { "" };
            let Layout {
                rows,
                columns,
                leading,
                element,
                alignment,
            } = layout;
            format!("({rows} x {columns}, {leading} apart, {element:?} at {alignment}){mark}")
        };
        let (left, right) = (
            show(&self.left, self.left_transposed),
            show(&self.right, self.right_transposed),
        );
        write!(formatter, "{} = {left} · {right}", show(&self.target, false))?;
        if let Some(source) = &self.source {
            write!(formatter, " + {}", show(source, false))?;
        }
        if self.bias {
            formatter.write_str(" + bias")
        } else {
            Ok(())
        }
    }
}

/// The library's handle.
#[derive(Debug)]
pub(super) struct Handle {
    raw: sys::cublasLtHandle_t,
    context: Arc<Context>,
}

// SAFETY: the library documents its handle as usable from many threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

fn check(call: &'static str, product: Option<&Product>, status: Status) -> Result<()> {
    match status {
        Status::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err(Error::Matmul {
            call,
            product: product.map_or_else(|| "the library".to_owned(), ToString::to_string),
            code: format!("{status:?}"),
        }),
    }
}

impl Handle {
    /// A handle on `context`'s device.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        check("cublasLtCreate", None, unsafe {
            (functions()?.cublasLtCreate)(&raw mut handle)
        })?;
        Ok(Self {
            raw: handle,
            context: context.clone(),
        })
    }

    /// The `wanted` likeliest algorithms for `product` within `workspace` bytes, best first; at least one.
    pub(super) fn plans(
        &self,
        product: &Product,
        workspace: usize,
        wanted: usize,
    ) -> Result<(Plan, Vec<Choice>)> {
        let plan = Plan::new(product)?;
        let preference = PreferenceHandle::new(product, workspace)?;
        // SAFETY: plain data, all zeros is a value of it.
        let mut found: Vec<Heuristic> = vec![unsafe { std::mem::zeroed() }; wanted.max(1)];
        let mut count = 0;
        // SAFETY: every handle was created above and lives; `found` has room for as many as are asked for.
        check("cublasLtMatmulAlgoGetHeuristic", Some(product), unsafe {
            (functions()?.cublasLtMatmulAlgoGetHeuristic)(
                self.raw,
                plan.description,
                plan.first.0,
                plan.second.0,
                plan.source.0,
                plan.target.0,
                preference.0,
                i32::try_from(found.len()).unwrap_or(1),
                found.as_mut_ptr(),
                &raw mut count,
            )
        })?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        found.retain(|one| one.state == Status::CUBLAS_STATUS_SUCCESS && one.workspaceSize <= workspace);
        if found.is_empty() {
            check(
                "cublasLtMatmulAlgoGetHeuristic",
                Some(product),
                Status::CUBLAS_STATUS_NOT_SUPPORTED,
            )?;
        }
        Ok((plan, found.into_iter().map(|one| Choice(one.algo)).collect()))
    }

    /// Queues the product of `plan` by `choice`.
    pub(super) fn run(
        &self,
        plan: &Plan,
        choice: &Choice,
        addresses: Addresses,
        workspace: usize,
        stream: &Stream,
    ) -> Result<()> {
        stream.raw().context().bind()?;
        stream.make_room()?;
        if let Some(bias) = addresses.bias {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let at = |address: Address| address as *const c_void;
        let alpha = 1.0_f32;
        let beta = if addresses.source.is_some() { 1.0_f32 } else { 0.0 };
        // SAFETY: the plan's layouts describe the operands, which `matmul.rs` checked to lie where the addresses
        // say; scalars are read before the call returns; the workspace is as long as said and used on this stream
        // only.
        check("cublasLtMatmul", Some(&plan.product), unsafe {
            (functions()?.cublasLtMatmul)(
                self.raw,
                plan.description,
                (&raw const alpha).cast(),
                at(addresses.right),
                plan.first.0,
                at(addresses.left),
                plan.second.0,
                (&raw const beta).cast(),
                at(addresses.source.unwrap_or(addresses.target)),
                plan.source.0,
                addresses.target as *mut c_void,
                plan.target.0,
                &raw const choice.0,
                addresses.workspace as *mut c_void,
                workspace,
                stream.raw().handle().cast(),
            )
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Destroying it waits for the device, without a deadline: only where `CudaDevice` has waited before.
        if self.context.bind().is_ok() {
            let Ok(functions) = functions() else { return };
            // SAFETY: created once and destroyed once.
            let _ = unsafe { (functions.cublasLtDestroy)(self.raw) };
        }
    }
}

/// One algorithm with its parameters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice(Algorithm);

/// What cuBLASLt must know of a product, whatever the algorithm.
#[derive(Debug)]
pub(super) struct Plan {
    product: Product,
    description: sys::cublasLtMatmulDesc_t,
    first: LayoutHandle,
    second: LayoutHandle,
    source: LayoutHandle,
    target: LayoutHandle,
}

// SAFETY: descriptions are plain data behind pointers; `matmul.rs` locks a plan while it is used.
unsafe impl Send for Plan {}

impl Plan {
    fn new(product: &Product) -> Result<Self> {
        let mut plan = Self {
            product: *product,
            description: ptr::null_mut(),
            first: LayoutHandle::new(&product.right, product)?,
            second: LayoutHandle::new(&product.left, product)?,
            source: LayoutHandle::new(&product.source.unwrap_or(product.target), product)?,
            target: LayoutHandle::new(&product.target, product)?,
        };
        // SAFETY: the pointer is to a live handle.
        check("cublasLtMatmulDescCreate", Some(product), unsafe {
            (functions()?.cublasLtMatmulDescCreate)(
                &raw mut plan.description,
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cudaDataType::CUDA_R_32F,
            )
        })?;
        // cublasOperation_t: 0 as it is, 1 transposed.
        let operation = i32::from;
        plan.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &operation(product.right_transposed),
        )?;
        plan.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            &operation(product.left_transposed),
        )?;
        if product.bias {
            // Of outᵀ a bias is one entry a row, which is one a column of ours.
            plan.set(
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &Epilogue::CUBLASLT_EPILOGUE_BIAS,
            )?;
            plan.set(
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &data_type(product.target.element),
            )?;
        }
        Ok(plan)
    }

    fn set<T: Copy>(&self, attribute: Attribute, value: &T) -> Result<()> {
        // SAFETY: the description lives, and the value is of the size that is given.
        check("cublasLtMatmulDescSetAttribute", Some(&self.product), unsafe {
            (functions()?.cublasLtMatmulDescSetAttribute)(
                self.description,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        if !self.description.is_null() {
            let Ok(functions) = functions() else { return };
            // SAFETY: created once and destroyed once.
            let _ = unsafe { (functions.cublasLtMatmulDescDestroy)(self.description) };
        }
    }
}

fn data_type(element: Element) -> cudaDataType {
    match element {
        Element::Bf16 => cudaDataType::CUDA_R_16BF,
        Element::F32 => cudaDataType::CUDA_R_32F,
        Element::I32 => cudaDataType::CUDA_R_32I,
        Element::F64 => cudaDataType::CUDA_R_64F,
    }
}

#[derive(Debug)]
struct LayoutHandle(sys::cublasLtMatrixLayout_t);

impl LayoutHandle {
    fn new(layout: &Layout, product: &Product) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // Rows of a row-major matrix are columns of its transpose.
        let (rows, columns) = (layout.columns as u64, layout.rows as u64);
        let leading = i64::try_from(layout.leading).unwrap_or(i64::MAX);
        // SAFETY: the pointer is to a live handle.
        check("cublasLtMatrixLayoutCreate", Some(product), unsafe {
            (functions()?.cublasLtMatrixLayoutCreate)(
                &raw mut handle,
                data_type(layout.element),
                rows,
                columns,
                leading,
            )
        })?;
        Ok(Self(handle))
    }
}

impl Drop for LayoutHandle {
    fn drop(&mut self) {
        let Ok(functions) = functions() else { return };
        // SAFETY: created once and destroyed once.
        let _ = unsafe { (functions.cublasLtMatrixLayoutDestroy)(self.0) };
    }
}

struct PreferenceHandle(sys::cublasLtMatmulPreference_t);

impl PreferenceHandle {
    fn new(product: &Product, workspace: usize) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        check("cublasLtMatmulPreferenceCreate", Some(product), unsafe {
            (functions()?.cublasLtMatmulPreferenceCreate)(&raw mut handle)
        })?;
        let preference = Self(handle);
        preference.set(
            product,
            Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &(workspace as u64),
        )?;
        let alignments = [
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                product.right,
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                product.left,
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                product.source.unwrap_or(product.target),
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                product.target,
            ),
        ];
        for (attribute, layout) in alignments {
            preference.set(product, attribute, &layout.alignment)?;
        }
        Ok(preference)
    }

    fn set<T: Copy>(&self, product: &Product, attribute: Preference, value: &T) -> Result<()> {
        // SAFETY: the preference lives, and the value is of the size that is given.
        check("cublasLtMatmulPreferenceSetAttribute", Some(product), unsafe {
            (functions()?.cublasLtMatmulPreferenceSetAttribute)(
                self.0,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        })
    }
}

impl Drop for PreferenceHandle {
    fn drop(&mut self) {
        let Ok(functions) = functions() else { return };
        // SAFETY: created once and destroyed once.
        let _ = unsafe { (functions.cublasLtMatmulPreferenceDestroy)(self.0) };
    }
}
