//! Steps of decoding that beat: a backend that replays them is asked for no operation meanwhile.

use espalier_arch::Attention;
use espalier_model::ops::decoding::{Arriving, Decoding};
use espalier_model::ops::{KvCache, Linear, RopeTable};
use espalier_model::{Result, Tensor};

use super::Beating;

/// A session's steps, of which each counts as an operation.
#[derive(Debug)]
pub(super) struct BeatingSteps {
    inner: Box<dyn Decoding>,
    beating: Beating,
}

impl BeatingSteps {
    pub(super) fn over(inner: Box<dyn Decoding>, beating: Beating) -> Box<dyn Decoding> {
        Box::new(Self { inner, beating })
    }
}

impl Decoding for BeatingSteps {
    fn embedding(&self, table: &Tensor) -> Result<Tensor> {
        self.inner.embedding(table)
    }

    fn project(&self, x: &Tensor, norm: &Tensor, epsilon: f64, layers: &[Linear<'_>]) -> Result<Vec<Tensor>> {
        self.inner.project(x, norm, epsilon, layers)
    }

    fn gated(&self, x: &Tensor, norm: &Tensor, epsilon: f64, layers: [Linear<'_>; 2]) -> Result<Tensor> {
        self.inner.gated(x, norm, epsilon, layers)
    }

    fn attention(
        &self,
        qkv: [&Tensor; 3],
        cache: &KvCache,
        shape: &Attention,
        rope: Option<&RopeTable>,
    ) -> Result<Tensor> {
        self.inner.attention(qkv, cache, shape, rope)
    }

    fn logits(&self, x: &Tensor, norm: &Tensor, epsilon: f64, head: &Tensor) -> Result<Tensor> {
        self.inner.logits(x, norm, epsilon, head)
    }

    fn run(
        &mut self,
        tokens: Option<&[u32]>,
        held: usize,
        step: &dyn Fn(&dyn Decoding) -> Result<Tensor>,
    ) -> Result<()> {
        let ran = self.inner.run(tokens, held, step);
        self.beating.beat();
        ran
    }

    fn last_logits(&self) -> Result<Tensor> {
        self.inner.last_logits()
    }

    fn likeliest(&self) -> Result<Box<dyn Arriving>> {
        self.inner.likeliest()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use espalier_model::Error;
    use espalier_model::ops::cpu::CpuOperations;

    use super::*;
    use crate::executor::pulse::Pulse;

    /// Replays, and asks no backend for anything.
    #[derive(Debug)]
    struct Replays;

    impl Decoding for Replays {
        fn embedding(&self, _: &Tensor) -> Result<Tensor> {
            Err(Error::SharedTensor)
        }

        fn project(&self, _: &Tensor, _: &Tensor, _: f64, _: &[Linear<'_>]) -> Result<Vec<Tensor>> {
            Err(Error::SharedTensor)
        }

        fn gated(&self, _: &Tensor, _: &Tensor, _: f64, _: [Linear<'_>; 2]) -> Result<Tensor> {
            Err(Error::SharedTensor)
        }

        fn attention(
            &self,
            _: [&Tensor; 3],
            _: &KvCache,
            _: &Attention,
            _: Option<&RopeTable>,
        ) -> Result<Tensor> {
            Err(Error::SharedTensor)
        }

        fn logits(&self, _: &Tensor, _: &Tensor, _: f64, _: &Tensor) -> Result<Tensor> {
            Err(Error::SharedTensor)
        }

        fn run(
            &mut self,
            _: Option<&[u32]>,
            _: usize,
            _: &dyn Fn(&dyn Decoding) -> Result<Tensor>,
        ) -> Result<()> {
            Ok(())
        }

        fn last_logits(&self) -> Result<Tensor> {
            Err(Error::SharedTensor)
        }

        fn likeliest(&self) -> Result<Box<dyn Arriving>> {
            Err(Error::SharedTensor)
        }
    }

    #[test]
    fn steps_that_are_only_replayed_are_signs_of_life() {
        let pulse = Pulse::default();
        let beating = Beating::new(Box::new(CpuOperations::new()), pulse.clone());
        let mut steps = BeatingSteps::over(Box::new(Replays), beating);
        for held in 0..3 {
            steps.run(None, held, &|steps| steps.last_logits()).unwrap();
        }
        assert_eq!(pulse.beats(), 3);
    }
}
