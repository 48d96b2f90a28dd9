//! Steps of one token a sequence: run, then recorded, then replayed.
//!
//! The first step runs as it is: kernels are compiled, products planned. The second is recorded, and from then on a
//! step is one launch; where recording fails, steps go on as the first. Products of up to [`MATVEC_ROWS`] sequences
//! take in the norm before them and the activation after them.

use espalier_arch::Attention;

use super::CudaOperations;
use crate::ops::cuda::decode::{DecodeCache, FewRows};
use crate::ops::cuda::embedding::DeviceTokens;
use crate::ops::cuda::graph::Graph;
use crate::ops::cuda::matmul::MATVEC_ROWS;
use crate::ops::cuda::matrix::{Element, Matrix};
use crate::ops::cuda::rope::RopeAngles;
use crate::ops::cuda::transfer::Landing;
use crate::ops::decoding::{Arriving, Decoding};
use crate::ops::{Head, KvCache, Linear, Operations, RopeTable};
use crate::{Error, Result, Tensor};

/// What a step came to be.
#[derive(Debug)]
enum Step {
    /// There was none yet.
    New,
    /// It ran once, and left its logits.
    Ran(Tensor),
    /// Recorded, with the logits that each replay leaves.
    Recorded(Graph, Tensor),
    /// It could not be recorded.
    Plain(Tensor),
}

/// A session's steps on one GPU.
#[derive(Debug)]
pub(super) struct CudaDecoding {
    step: Step,
    tokens: DeviceTokens,
    /// i32, tokens that each sequence holds, the step's own included.
    lengths: Matrix,
    /// What the lengths are once everything queued has run: the next step's.
    next_length: Option<usize>,
    operations: CudaOperations,
}

impl CudaDecoding {
    pub(super) fn new(operations: &CudaOperations, sequences: usize, vocabulary: usize) -> Result<Self> {
        let none = vec![0; sequences];
        Ok(Self {
            step: Step::New,
            tokens: operations.device.tokens(&none, vocabulary)?,
            lengths: operations.device.upload_i32(&vec![0; sequences])?,
            next_length: None,
            operations: operations.clone(),
        })
    }

    /// What few rows need to be taken with their norm: bf16, no bias.
    fn takes_few(&self, x: &Tensor, layers: &[Linear<'_>]) -> bool {
        x.rows() <= MATVEC_ROWS && layers.iter().all(|layer| layer.bias.is_none())
    }

    fn normed(&self, x: &Tensor, norm: &Tensor, epsilon: f64) -> Result<Tensor> {
        self.operations
            .rms_norm(x, norm, epsilon)
            .map(|(normed, _)| normed)
    }

    /// `output = n · weightᵀ` of few rows, n being x normed.
    fn few_rows(
        &self,
        x: &Tensor,
        (norm, epsilon): (&Tensor, f64),
        weight: &Matrix,
        gate: Option<&Matrix>,
        element: Element,
    ) -> Result<Matrix> {
        let device = &self.operations.device;
        let output = device.matrix(element, x.rows(), weight.rows())?;
        let norm = norm.cuda()?;
        #[allow(clippy::cast_possible_truncation)] // the kernel's own precision
        let what = FewRows {
            norm: Some((&norm, epsilon as f32)),
            gate,
            residual: None,
            // A session's weights were there before its first step.
            early: true,
        };
        device.few_rows(&x.cuda()?, weight, what, &output)?;
        Ok(output)
    }

    /// The step's work, and the choice of the tokens of the next.
    fn queue(&self, step: &dyn Fn(&dyn Decoding) -> Result<Tensor>) -> Result<Tensor> {
        let logits = step(self)?;
        let device = &self.operations.device;
        device.argmax(&logits.cuda()?, self.tokens.ids(), Some(&self.lengths))?;
        Ok(logits)
    }

    fn no_step(&self) -> Error {
        Error::Shape {
            operation: "decoding",
            expected: "a step before its outcome is asked for".to_owned(),
            found: "none".to_owned(),
        }
    }

    /// Brings tokens and lengths to what the next step starts from, where they are not.
    fn set_out(&self, tokens: Option<&[u32]>, held: usize) -> Result<()> {
        let device = &self.operations.device;
        match tokens {
            Some(tokens) => device.replace_ids(&self.tokens, tokens)?,
            None if self.next_length == Some(held + 1) => {}
            None => return Err(self.no_step()),
        }
        if self.next_length != Some(held + 1) {
            let length = i32::try_from(held + 1).unwrap_or(i32::MAX);
            device.overwrite(&self.lengths, &vec![length; self.tokens.len()])?;
        }
        Ok(())
    }

    fn advance(&mut self, step: &dyn Fn(&dyn Decoding) -> Result<Tensor>) -> Result<()> {
        let device = &self.operations.device;
        self.step = match std::mem::replace(&mut self.step, Step::New) {
            Step::New => Step::Ran(self.queue(step)?),
            Step::Recorded(graph, logits) => {
                device.replay(&graph)?;
                Step::Recorded(graph, logits)
            }
            Step::Plain(_) => Step::Plain(self.queue(step)?),
            Step::Ran(_) => match device.record(|| self.queue(step)) {
                Ok((graph, logits)) => {
                    device.replay(&graph)?;
                    Step::Recorded(graph, logits)
                }
                Err(error) => {
                    tracing::warn!(%error, "decoding goes on without a CUDA graph");
                    Step::Plain(self.queue(step)?)
                }
            },
        };
        Ok(())
    }
}

impl Decoding for CudaDecoding {
    fn embedding(&self, table: &Tensor) -> Result<Tensor> {
        let output = self.operations.bf16(self.tokens.len(), table.columns())?;
        let device = &self.operations.device;
        device.embedding(&table.cuda()?, &self.tokens, &output)?;
        self.operations.tensor(output)
    }

    fn project(&self, x: &Tensor, norm: &Tensor, epsilon: f64, layers: &[Linear<'_>]) -> Result<Vec<Tensor>> {
        let weights = layers
            .iter()
            .map(|layer| layer.weight.cuda())
            .collect::<Result<Vec<_>>>()?;
        let whole = Matrix::over_rows(&weights).filter(|_| self.takes_few(x, layers));
        let Some(weight) = whole else {
            let normed = self.normed(x, norm, epsilon)?;
            return self.operations.linear_many(&normed, layers);
        };
        let output = self.few_rows(x, (norm, epsilon), &weight, None, Element::Bf16)?;
        let mut at = 0;
        let mut part = |columns: usize| {
            let view = output.narrow_columns(at, columns);
            at += columns;
            self.operations.tensor(view?)
        };
        weights.iter().map(|weight| part(weight.rows())).collect()
    }

    fn gated(&self, x: &Tensor, norm: &Tensor, epsilon: f64, layers: [Linear<'_>; 2]) -> Result<Tensor> {
        let [up, gate] = layers;
        let alike = up.weight.leading_dimension() == gate.weight.leading_dimension();
        if !alike || !self.takes_few(x, &layers) {
            let normed = self.normed(x, norm, epsilon)?;
            let outputs = self.operations.linear_many(&normed, &layers)?;
            let [up, gate] = <[Tensor; 2]>::try_from(outputs).map_err(|found| Error::Shape {
                operation: "linear_many",
                expected: "an output for each of 2 layers".to_owned(),
                found: found.len().to_string(),
            })?;
            return self.operations.swiglu(&gate, &up);
        }
        let (up, gate) = (up.weight.cuda()?, gate.weight.cuda()?);
        let output = self.few_rows(x, (norm, epsilon), &up, Some(&gate), Element::Bf16)?;
        self.operations.tensor(output)
    }

    fn attention(
        &self,
        [q, k, v]: [&Tensor; 3],
        cache: &KvCache,
        shape: &Attention,
        rope: Option<&RopeTable>,
    ) -> Result<Tensor> {
        let (keys, values) = (cache.keys.cuda()?, cache.values.cuda()?);
        let held = DecodeCache {
            keys: &keys,
            values: &values,
            capacity: cache.capacity,
            lengths: &self.lengths,
        };
        let tables = rope
            .map(|table| Ok::<_, Error>((table.cosine.cuda()?, table.sine.cuda()?)))
            .transpose()?;
        let angles = tables.as_ref().map(|(cosine, sine)| RopeAngles { cosine, sine });
        let (q, k, v) = (q.cuda()?, k.cuda()?, v.cuda()?);
        let window = shape.sliding_window.unwrap_or(0);
        self.operations.like(&q, |output| {
            // The cache was last written by the step before, many kernels ago.
            self.operations.device.decode_attention(
                &q,
                &k,
                &v,
                held,
                angles,
                output,
                shape.head_dim,
                window,
                true,
            )
        })
    }

    fn logits(&self, x: &Tensor, norm: &Tensor, epsilon: f64, head: &Tensor) -> Result<Tensor> {
        let layer = Linear {
            weight: head,
            bias: None,
        };
        if self.takes_few(x, &[layer]) {
            let logits = self.few_rows(x, (norm, epsilon), &head.cuda()?, None, Element::F32)?;
            return self.operations.tensor(logits);
        }
        let hidden = self.normed(x, norm, epsilon)?;
        self.operations.logits(Head {
            hidden: &hidden,
            weight: head,
        })
    }

    fn run(
        &mut self,
        tokens: Option<&[u32]>,
        held: usize,
        step: &dyn Fn(&dyn Decoding) -> Result<Tensor>,
    ) -> Result<()> {
        self.set_out(tokens, held)?;
        // Until the work is queued nobody knows what the device holds.
        self.next_length = None;
        self.advance(step)?;
        self.next_length = Some(held + 2);
        Ok(())
    }

    fn last_logits(&self) -> Result<Tensor> {
        match &self.step {
            Step::New => Err(self.no_step()),
            Step::Ran(logits) | Step::Plain(logits) => Ok(logits.clone()),
            Step::Recorded(_, logits) => self.operations.contiguous(logits),
        }
    }

    fn likeliest(&self) -> Result<Box<dyn Arriving>> {
        let landing = self.operations.device.land_i32(self.tokens.ids())?;
        Ok(Box::new(Landed(landing)))
    }
}

/// Tokens whose copy to the host is queued.
#[derive(Debug)]
struct Landed(Landing<i32>);

impl Arriving for Landed {
    fn read(self: Box<Self>) -> Result<Vec<u32>> {
        Ok(self.0.read()?.into_iter().map(i32::unsigned_abs).collect())
    }
}
