//! The update of every parameter, and what comes of it.

use super::CudaOperations;
use crate::ops::cuda::optimiser::{CudaParameter, CudaStep};
use crate::ops::cuda::transfer::Landing;
use crate::ops::{AdamWParameter, AdamWStep, Pending, Updated};
use crate::{Result, Tensor};

/// An update whose loss and norm are on their way to the host.
#[derive(Debug)]
struct Landed(Landing<f64>);

impl Pending for Landed {
    fn is_ready(&self) -> bool {
        self.0.is_there()
    }

    fn read(self: Box<Self>) -> Result<Updated> {
        let report = self.0.read()?;
        let number = |index: usize| report.get(index).copied().unwrap_or(f64::NAN);
        Ok(Updated {
            loss: number(0),
            gradient_norm: number(1),
        })
    }
}

impl CudaOperations {
    pub(super) fn updated(
        &self,
        parameters: &mut [AdamWParameter<'_>],
        step: AdamWStep,
        measured: &Tensor,
    ) -> Result<Box<dyn Pending>> {
        let mut list = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            list.push(CudaParameter {
                value: parameter.value.cuda()?,
                gradient: parameter.gradient.cuda()?,
                first_moment: parameter.first_moment.cuda()?,
                second_moment: parameter.second_moment.cuda()?,
                working: parameter
                    .working
                    .as_ref()
                    .map(|working| working.cuda())
                    .transpose()?,
                decay: step.weight_decay,
            });
        }
        // Its tables go again after the step: kept, they would keep the parameters of whoever trained last.
        let optimiser = self.device.optimiser(list)?;
        #[allow(clippy::cast_possible_truncation)] // the kernel's own precision
        let clip = step.clip as f32;
        let step = CudaStep {
            rate: step.learning_rate,
            beta1: step.beta1,
            beta2: step.beta2,
            epsilon: step.epsilon,
            step: step.step,
            gradient_scale: 1.0,
            clip,
        };
        self.device.set_step(&optimiser, step)?;
        self.device.update(&optimiser, &measured.cuda()?)?;
        Ok(Box::new(Landed(self.device.land(optimiser.report())?)))
    }
}
