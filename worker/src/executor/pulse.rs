//! Whether an attempt is alive, apart from how far it has come: a count of what was done. Who looks at it knows a
//! long silence from a hang.
//!
//! On the host every operation of the backend and every chance to stop raises it. A device that runs behind its
//! host does not answer when it is asked, so there its completed work counts, by marks that are put between the
//! operations and looked at without waiting; and what the host does by itself only while it waits for none of them.
//! So a kernel that hangs is not alive because more work can be queued behind it, and one that takes long is not
//! dead because nothing is queued meanwhile.

mod steps;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use espalier_arch::{Architecture, Attention};
use espalier_model::collective::Gang;
use espalier_model::collective::mesh::Mesh;
use espalier_model::ops::decoding::Decoding;
use espalier_model::ops::{
    Accelerator, AdamWParameter, AdamWStep, Axis, Completion, Head, HeadGradient, KvCache, Layout, Linear,
    LinearGradient, Losses, Operations, Pending, RopeTable, TokenBatch,
};
use espalier_model::{ElementType, Elements, Result, Tensor};

use steps::BeatingSteps;

/// Operations from one mark to the next: a mark costs the host microseconds.
const OPERATIONS_PER_MARK: u32 = 64;

/// The count. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Pulse(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    beats: AtomicU64,
    ahead: Mutex<Ahead>,
}

/// What a device was asked and has not been seen to have done.
#[derive(Debug, Default)]
struct Ahead {
    marks: VecDeque<Box<dyn Completion>>,
    operations_since: u32,
}

impl Ahead {
    /// Drops the marks that the device has passed, and says how many.
    fn passed(&mut self) -> u64 {
        let mut passed = 0;
        while let Some(mark) = self.marks.front() {
            match mark.is_reached() {
                Ok(true) => {
                    passed += 1;
                    self.marks.pop_front();
                }
                Ok(false) => break,
                // Whoever asked for that work is told by the next operation.
                Err(_) => self.marks.clear(),
            }
        }
        passed
    }
}

impl Pulse {
    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        // Its methods leave it whole wherever they could panic.
        self.0.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, done: u64) {
        self.0.beats.fetch_add(done, Ordering::Relaxed);
    }

    /// The host did something.
    pub(crate) fn beat(&self) {
        if self.ahead().marks.is_empty() {
            self.count(1);
        }
    }

    /// A device that runs behind its host was asked for something.
    fn asked(&self, mark: impl FnOnce() -> Result<Option<Box<dyn Completion>>>) {
        let mut ahead = self.ahead();
        ahead.operations_since += 1;
        if !ahead.marks.is_empty() && ahead.operations_since < OPERATIONS_PER_MARK {
            return;
        }
        self.count(ahead.passed());
        ahead.operations_since = 0;
        if let Ok(Some(mark)) = mark() {
            ahead.marks.push_back(mark);
        }
    }

    /// How much was done so far.
    pub fn beats(&self) -> u64 {
        let passed = self.ahead().passed();
        self.count(passed);
        self.0.beats.load(Ordering::Relaxed)
    }
}

/// A backend that tells its pulse what was done. Clones are the same.
#[derive(Debug, Clone)]
pub(super) struct Beating {
    inner: Arc<dyn Operations>,
    pulse: Pulse,
    /// Whether the device runs behind its host.
    behind: bool,
}

impl Beating {
    pub(super) fn new(inner: Box<dyn Operations>, pulse: Pulse) -> Self {
        let behind = inner.accelerator().is_some();
        Self {
            inner: Arc::from(inner),
            pulse,
            behind,
        }
    }

    fn beat(&self) {
        if self.behind {
            self.pulse.asked(|| self.inner.mark());
        } else {
            self.pulse.beat();
        }
    }
}

/// Passes every operation on, and then counts it.
macro_rules! beating {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        impl Operations for Beating {
            fn activation_type(&self) -> ElementType {
                self.inner.activation_type()
            }

            fn accelerator(&self) -> Option<Accelerator> {
                self.inner.accelerator()
            }

            fn mark(&self) -> Result<Option<Box<dyn Completion>>> {
                self.inner.mark()
            }

            fn decoding(
                &self, sequences: usize, architecture: &Architecture
            ) -> Result<Option<Box<dyn Decoding>>> {
                let steps = self.inner.decoding(sequences, architecture)?;
                Ok(steps.map(|steps| BeatingSteps::over(steps, self.clone())))
            }

            $(
                #[allow(clippy::too_many_arguments)] // the operation's own
                fn $name(&self, $($argument: $type),*) -> Result<$answer> {
                    let answer = self.inner.$name($($argument),*);
                    self.beat();
                    answer
                }
            )*
        }
    };
}

beating! {
    wait() -> ();
    prepare(architecture: &Architecture) -> ();
    gang(mesh: Arc<Mesh>) -> Arc<dyn Gang>;
    zeros(rows: usize, columns: usize, element_type: ElementType) -> Tensor;
    upload(data: &[f32], rows: usize, columns: usize) -> Tensor;
    upload_elements(elements: &Elements, rows: usize, columns: usize) -> Tensor;
    download(tensor: &Tensor) -> Vec<f32>;
    copy_as(tensor: &Tensor, element_type: ElementType) -> Tensor;
    concatenate(tensors: &[&Tensor]) -> Tensor;
    stack(tensors: Vec<Tensor>) -> Vec<Tensor>;
    flatten(
        parts: &[(usize, &Tensor)], rows: usize, columns: usize, element_type: ElementType
    ) -> Tensor;
    clear(tensors: &mut [&mut Tensor]) -> ();
    gather(tensor: &Tensor, indices: &[usize], axis: Axis) -> Tensor;
    tokens(ids: &[u32], targets: Option<&[Option<u32>]>) -> TokenBatch;
    embedding(table: &Tensor, tokens: &TokenBatch) -> Tensor;
    embedding_backward(grad_output: &Tensor, tokens: &TokenBatch, grad_table: &mut Tensor) -> ();
    linear(x: &Tensor, layer: Linear<'_>) -> Tensor;
    linear_many(x: &Tensor, layers: &[Linear<'_>]) -> Vec<Tensor>;
    linear_residual(x: &Tensor, layer: Linear<'_>, residual: &Tensor) -> Tensor;
    linear_backward_input(layers: &[(&Tensor, &Tensor)]) -> Tensor;
    linear_backward_weight(x: &Tensor, layers: &mut [LinearGradient<'_>]) -> ();
    rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> (Tensor, Tensor);
    rms_norm_backward(
        grad_output: &Tensor, x: &Tensor, weight: &Tensor, reciprocal: &Tensor, residual: Option<Tensor>,
        grad_weight: &mut Tensor
    ) -> Tensor;
    rope(
        q: &mut Tensor, k: &mut Tensor, head_dim: usize, table: &RopeTable, layout: Layout,
        first_position: usize
    ) -> ();
    rope_backward(
        grad_q: &mut Tensor, grad_k: &mut Tensor, head_dim: usize, table: &RopeTable, layout: Layout
    ) -> ();
    attention(q: &Tensor, k: &Tensor, v: &Tensor, shape: &Attention, layout: Layout) -> (Tensor, Tensor);
    attention_backward(
        grad_output: &Tensor, q: &Tensor, k: &Tensor, v: &Tensor, output: &Tensor, log_sums: &Tensor,
        shape: &Attention, layout: Layout
    ) -> (Tensor, Tensor, Tensor);
    attention_cached(
        q: &Tensor, k: &Tensor, v: &Tensor, cache: &mut KvCache, shape: &Attention, layout: Layout
    ) -> Tensor;
    swiglu(gate: &Tensor, up: &Tensor) -> Tensor;
    swiglu_backward(grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> (Tensor, Tensor);
    relu_squared(x: &Tensor) -> Tensor;
    relu_squared_backward(grad_output: &Tensor, x: &Tensor) -> Tensor;
    logits(head: Head<'_>) -> Tensor;
    likeliest(logits: &Tensor) -> Vec<u32>;
    cross_entropy(head: Head<'_>, targets: &TokenBatch, gradient: Option<HeadGradient<'_>>) -> Losses;
    distillation(student: Head<'_>, parent: Head<'_>, gradient: Option<HeadGradient<'_>>) -> Losses;
    distillation_many(students: &[Head<'_>], parent: Head<'_>) -> Vec<Tensor>;
    column_squares(x: &Tensor) -> Vec<f64>;
    tile_products(a: &Tensor, b: &Tensor, tile: usize) -> Vec<f64>;
    measure(gradients: &[&Tensor], losses: &[Tensor]) -> Tensor;
    update(parameters: &mut [AdamWParameter<'_>], step: AdamWStep, measured: &Tensor) -> Box<dyn Pending>;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::sync::atomic::AtomicBool;

    use espalier_model::Error;

    use super::*;

    #[derive(Debug, Clone, Default)]
    struct Point {
        reached: Arc<AtomicBool>,
        failed: Arc<AtomicBool>,
    }

    impl Completion for Point {
        fn is_reached(&self) -> Result<bool> {
            if self.failed.load(Ordering::SeqCst) {
                return Err(Error::SharedTensor);
            }
            Ok(self.reached.load(Ordering::SeqCst))
        }
    }

    fn ask(pulse: &Pulse, point: &Point) {
        pulse.asked(|| Ok(Some(Box::new(point.clone()))));
    }

    #[test]
    fn a_device_that_hangs_does_not_beat_however_much_is_asked_of_it_and_one_that_goes_on_does() {
        let pulse = Pulse::default();
        let (first, second) = (Point::default(), Point::default());
        pulse.beat();
        assert_eq!(
            pulse.beats(),
            1,
            "nothing is under way: what the host does counts"
        );
        ask(&pulse, &first);
        for _ in 0..3 * OPERATIONS_PER_MARK {
            ask(&pulse, &second);
            pulse.beat();
        }
        assert_eq!(pulse.beats(), 1, "it was only asked");
        first.reached.store(true, Ordering::SeqCst);
        assert_eq!(pulse.beats(), 2);
        assert_eq!(pulse.beats(), 2, "each mark counts once");
        second.reached.store(true, Ordering::SeqCst);
        assert_eq!(pulse.beats(), 5, "a mark each so many operations");
        pulse.beat();
        assert_eq!(pulse.beats(), 6, "nothing is under way again");
    }

    #[test]
    fn work_that_failed_is_no_sign_of_life_and_holds_none_back() {
        let pulse = Pulse::default();
        let point = Point::default();
        ask(&pulse, &point);
        point.failed.store(true, Ordering::SeqCst);
        assert_eq!(pulse.beats(), 0);
        pulse.beat();
        assert_eq!(pulse.beats(), 1);
    }
}
