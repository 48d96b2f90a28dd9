//! Which kernels a model needs, and what the compiler makes of each: for having them ready before the first step,
//! and for checking them where there is no device.

use rayon::prelude::*;

use super::attention::{Choice, hopper_choice, plain_choice};
use super::decode::{decode_kernel, few_rows_kernel};
use super::device::CudaDevice;
use super::error::{Result, Version};
use super::matmul::MATVEC_ROWS;
use super::matrix::Element;
use super::norm::norm_kernel;
use super::optimiser::adamw_kernel;
use super::source::Specialisation;
use super::{library, nvrtc};

/// The shapes of a model that decide how its kernels are compiled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelNeeds {
    /// Widths that are normed: hidden states, and heads where they are.
    pub norm_widths: Vec<usize>,
    /// Entries of a head.
    pub head_dims: Vec<usize>,
    /// Query heads of each KV head, for decoding; none: no decoding.
    pub decode_groups: Vec<usize>,
}

impl KernelNeeds {
    /// Everything but attention, aligned or not.
    fn plain_kernels(&self) -> Vec<Specialisation> {
        let mut kernels = vec![adamw_kernel()];
        for vector in [8_u32, 1] {
            let with_vector = |source| Specialisation::new(source, [("VECTOR", vector.into())]);
            kernels.extend(["rope.cu", "activation.cu", "embedding.cu"].map(with_vector));
            kernels.extend(self.norm_widths.iter().map(|&width| norm_kernel(width, vector)));
            let pairs = [
                (Element::Bf16, Element::Bf16),
                (Element::Bf16, Element::F32),
                (Element::F32, Element::Bf16),
                (Element::F32, Element::F32),
            ];
            kernels.extend(pairs.map(|(target, source)| {
                let macros = [
                    ("TARGET", target.kernel_name().into()),
                    ("SOURCE", source.kernel_name().into()),
                    ("VECTOR", vector.into()),
                ];
                Specialisation::new("elementwise.cu", macros)
            }));
            kernels.extend([Element::Bf16, Element::F32].map(|logit| {
                let macros = [("LOGIT", logit.kernel_name().into()), ("VECTOR", vector.into())];
                Specialisation::new("loss.cu", macros)
            }));
            if !self.decode_groups.is_empty() {
                let rows = 1..=MATVEC_ROWS;
                let kinds = [
                    (0, Element::Bf16),
                    (0, Element::F32),
                    (1, Element::Bf16),
                    (1, Element::F32),
                    (2, Element::Bf16),
                ];
                kernels.extend(rows.flat_map(|rows| {
                    kinds.map(|(kind, output)| few_rows_kernel(rows, vector, kind, output))
                }));
            }
        }
        for element in [Element::Bf16, Element::F32] {
            let name = element.kernel_name().into();
            kernels.push(Specialisation::new("columns.cu", [("ELEMENT", name)]));
            kernels.push(Specialisation::new("argmax.cu", [("LOGIT", name)]));
        }
        for &head_dim in self
            .head_dims
            .iter()
            .filter(|dim| matches!(dim, 16 | 32 | 64 | 128))
        {
            kernels.extend(
                self.decode_groups
                    .iter()
                    .map(|&group| decode_kernel(head_dim, group)),
            );
        }
        kernels.sort_unstable();
        kernels.dedup();
        kernels
    }

    /// Attention's, the plain variants and those that this capability alone has.
    fn attention_kernels(&self, capability: Version) -> Vec<Specialisation> {
        let hopper = capability == Version { major: 9, minor: 0 };
        let of = |head_dim: usize, choice: Choice| {
            [
                choice.forward.forward_kernel(head_dim),
                choice.query.query_kernel(head_dim),
                choice.key.key_kernel(head_dim),
            ]
        };
        let of_dim = |&head_dim: &usize| {
            let own = hopper_choice(head_dim)
                .filter(|_| hopper)
                .map(|choice| of(head_dim, choice));
            own.into_iter()
                .flatten()
                .chain(of(head_dim, plain_choice(capability)))
        };
        self.head_dims.iter().flat_map(of_dim).collect()
    }
}

impl CudaDevice {
    /// Has every kernel of a model ready, compiling on all processors what the cache does not hold. Waits for the
    /// device when a variant of attention must be checked.
    ///
    /// # Errors
    /// The first kernel that does not compile, or a head dimension that is not supported.
    pub fn prepare(&self, needs: &KernelNeeds) -> Result<()> {
        self.kernels.prepare(&needs.plain_kernels())?;
        needs
            .head_dims
            .iter()
            .try_for_each(|&head_dim| self.prepare_attention(head_dim))
    }
}

/// What the compiler made of one specialisation.
#[derive(Debug)]
pub struct KernelReport {
    /// Source and macros.
    pub kernel: String,
    /// The most registers that one of its entry points uses.
    pub registers: u32,
    /// The most bytes that one of them spills to memory, stores or loads.
    pub spilled: u32,
    /// Lines that warn, of products made one by one above all.
    pub warnings: Vec<String>,
    /// Seconds that the compilation took.
    pub seconds: f64,
}

/// Compiles every kernel of `needs` for devices of `capability`, without a device or a driver.
///
/// # Errors
/// When the compiler is missing, or refuses one.
pub fn compile_all(needs: &KernelNeeds, capability: Version) -> Result<Vec<KernelReport>> {
    library::compiler()?;
    let mut kernels = needs.plain_kernels();
    kernels.extend(needs.attention_kernels(capability));
    kernels
        .par_iter()
        .map(|kernel| {
            let begun = std::time::Instant::now();
            let compiled = nvrtc::compile(kernel, capability, true)?;
            Ok(report(
                kernel.to_string(),
                &compiled.log,
                begun.elapsed().as_secs_f64(),
            ))
        })
        .collect()
}

fn report(kernel: String, log: &str, seconds: f64) -> KernelReport {
    let most = |after: &str, before: &str| {
        let number = |line: &str| {
            let (head, _) = line.split_once(before)?;
            let word = if after.is_empty() {
                head
            } else {
                head.rsplit_once(after)?.1
            };
            word.rsplit([' ', ',']).next()?.parse::<u32>().ok()
        };
        log.lines().filter_map(number).max().unwrap_or(0)
    };
    let warns = |line: &&str| {
        let line = line.to_lowercase();
        line.contains("warning") || line.contains("serializ") || line.contains("potential")
    };
    KernelReport {
        kernel,
        registers: most("Used ", " registers"),
        spilled: most("", " bytes spill stores").max(most("", " bytes spill loads")),
        warnings: log.lines().filter(warns).map(str::to_owned).collect(),
        seconds,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn the_compilers_log_is_read_for_registers_spills_and_warnings() {
        let log = "ptxas info    : Compiling entry function 'a' for 'sm_90'\n\
            \x20   8 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n\
            ptxas info    : Used 48 registers, used 0 barriers\n\
            \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 168 registers, used 1 barriers\n\
            ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized";
        let report = report("a".to_owned(), log, 0.0);
        assert_eq!((report.registers, report.spilled), (168, 20));
        assert_eq!(report.warnings.len(), 1);
    }

    #[test]
    fn a_hopper_has_variants_of_its_own_and_others_do_not() {
        let needs = KernelNeeds {
            head_dims: vec![64, 80],
            ..KernelNeeds::default()
        };
        let on = |major| needs.attention_kernels(Version { major, minor: 0 });
        assert_eq!(on(9).len(), 9);
        assert_eq!(on(9).iter().filter(|kernel| kernel.is_sm90()).count(), 3);
        assert!(on(8).iter().all(|kernel| !kernel.is_sm90()));
    }
}
