//! A multilayer perceptron: `x + down(silu(gate(n)) · up(n))` or `x + down(relu(up(n))²)` with `n = norm(x)`.

use espalier_arch::Mlp;

use super::{Context, SavedRow};
use crate::ops::decoding::Decoding;
use crate::ops::{Linear, LinearGradient};
use crate::{Error, MlpWeights, Result, Tensor};

/// What the perceptron's backward needs besides the block's input.
#[derive(Debug)]
pub struct Saved {
    normed: Tensor,
    reciprocal: Tensor,
    gate: Option<Tensor>,
    up: Tensor,
    activated: Tensor,
}

impl Saved {
    /// What the down projection reads, `(tokens, channels)`.
    pub fn activated(&self) -> &Tensor {
        &self.activated
    }
}

/// What [`Saved`] holds for one row.
pub(super) fn saved_row(shape: &Mlp, hidden: usize) -> SavedRow {
    SavedRow {
        activations: hidden + shape.channels * shape.activation.matrices(),
        statistics: 1,
    }
}

impl MlpWeights {
    /// Up projection and gate, in the order in which [`crate::ops::Operations::stack`] lays them.
    pub(crate) fn input_layers(&self) -> Vec<Linear<'_>> {
        let up = Linear {
            weight: &self.up,
            bias: self.up_bias.as_ref(),
        };
        let gate = self.gate.as_ref().map(|weight| Linear {
            weight,
            bias: self.gate_bias.as_ref(),
        });
        std::iter::once(up).chain(gate).collect()
    }

    fn down_layer(&self) -> Linear<'_> {
        Linear {
            weight: &self.down,
            bias: self.down_bias.as_ref(),
        }
    }
}

/// The block's output and what its backward needs.
///
/// # Errors
/// When weights and shape disagree.
pub fn forward(
    context: Context<'_>,
    _shape: &Mlp,
    weights: &MlpWeights,
    hidden: &Tensor,
) -> Result<(Tensor, Saved)> {
    let operations = context.operations;
    let (normed, reciprocal) = operations.rms_norm(hidden, &weights.norm, context.epsilon)?;
    let mut outputs = operations
        .linear_many(&normed, &weights.input_layers())?
        .into_iter();
    let (up, gate) = (outputs.next(), outputs.next());
    let up = up.ok_or_else(no_output)?;
    let activated = match &gate {
        Some(gate) => operations.swiglu(gate, &up)?,
        None => operations.relu_squared(&up)?,
    };
    let output = operations.linear_residual(&activated, weights.down_layer(), hidden)?;
    Ok((
        output,
        Saved {
            normed,
            reciprocal,
            gate,
            up,
            activated,
        },
    ))
}

/// As [`forward`] for one token of each sequence.
pub(crate) fn forward_step(
    context: Context<'_>,
    decoding: &dyn Decoding,
    weights: &MlpWeights,
    hidden: &Tensor,
) -> Result<Tensor> {
    let (operations, epsilon) = (context.operations, context.epsilon);
    let activated = match <[Linear<'_>; 2]>::try_from(weights.input_layers()) {
        Ok(up_and_gate) => decoding.gated(hidden, &weights.norm, epsilon, up_and_gate)?,
        Err(up) => {
            let up = decoding.project(hidden, &weights.norm, epsilon, &up)?;
            operations.relu_squared(up.first().ok_or_else(no_output)?)?
        }
    };
    operations.linear_residual(&activated, weights.down_layer(), hidden)
}

fn no_output() -> Error {
    Error::Shape {
        operation: "linear_many",
        expected: "an output for each layer".to_owned(),
        found: "none".to_owned(),
    }
}

/// The gradient of the block's input from that of its output; weights' gradients are added to.
///
/// # Errors
/// When gradients and weights disagree in shape.
pub fn backward(
    context: Context<'_>,
    _shape: &Mlp,
    weights: &MlpWeights,
    hidden: &Tensor,
    saved: Saved,
    grad: Tensor,
    gradients: &mut MlpWeights,
) -> Result<Tensor> {
    let operations = context.operations;
    let Saved {
        normed,
        reciprocal,
        gate,
        up,
        activated,
    } = saved;
    let down = LinearGradient {
        output: &grad,
        weight: &mut gradients.down,
        bias: gradients.down_bias.as_mut(),
    };
    operations.linear_backward_weight(&activated, &mut [down])?;
    drop(activated);
    let grad_activated = operations.linear_backward_input(&[(&grad, &weights.down)])?;
    let (grad_gate, grad_up) = match &gate {
        Some(gate) => {
            let (grad_gate, grad_up) = operations.swiglu_backward(&grad_activated, gate, &up)?;
            (Some(grad_gate), grad_up)
        }
        None => (None, operations.relu_squared_backward(&grad_activated, &up)?),
    };
    drop((grad_activated, gate, up));

    let mut inputs = vec![(&grad_up, &weights.up)];
    let mut layers = vec![LinearGradient {
        output: &grad_up,
        weight: &mut gradients.up,
        bias: gradients.up_bias.as_mut(),
    }];
    if let (Some(output), Some(weight), Some(gradient)) = (&grad_gate, &weights.gate, gradients.gate.as_mut())
    {
        inputs.push((output, weight));
        layers.push(LinearGradient {
            output,
            weight: gradient,
            bias: gradients.gate_bias.as_mut(),
        });
    }
    let grad_normed = operations.linear_backward_input(&inputs)?;
    operations.linear_backward_weight(&normed, &mut layers)?;
    let norm = &mut gradients.norm;
    operations.rms_norm_backward(&grad_normed, hidden, &weights.norm, &reciprocal, Some(grad), norm)
}
