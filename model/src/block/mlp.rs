//! A multilayer perceptron: `x + down(silu(gate(n)) · up(n))` or `x + down(relu(up(n))²)` with `n = norm(x)`.

use espalier_arch::Mlp;

use super::Context;
use crate::{MlpWeights, Result, Tensor};

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

/// Elements of [`Saved`] for one row.
pub(super) fn saved_elements(shape: &Mlp, hidden: usize) -> usize {
    hidden + 1 + shape.channels * shape.activation.matrices()
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
    let up = operations.linear(&normed, &weights.up, weights.up_bias.as_ref())?;
    let gate = match &weights.gate {
        Some(gate) => Some(operations.linear(&normed, gate, weights.gate_bias.as_ref())?),
        None => None,
    };
    let activated = match &gate {
        Some(gate) => operations.swiglu(gate, &up)?,
        None => operations.relu_squared(&up)?,
    };
    let output = operations.linear_residual(&activated, &weights.down, weights.down_bias.as_ref(), hidden)?;
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
    mut grad: Tensor,
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
    operations.linear_backward_weight(
        &grad,
        &activated,
        &mut gradients.down,
        gradients.down_bias.as_mut(),
    )?;
    let mut grad_activated = operations.zeros(activated.rows(), activated.columns())?;
    drop(activated);
    operations.linear_backward_input(&grad, &weights.down, &mut grad_activated, false)?;
    let (grad_gate, grad_up) = match &gate {
        Some(gate) => {
            let (grad_gate, grad_up) = operations.swiglu_backward(&grad_activated, gate, &up)?;
            (Some(grad_gate), grad_up)
        }
        None => (None, operations.relu_squared_backward(&grad_activated, &up)?),
    };
    drop((grad_activated, gate, up));

    let mut grad_normed = operations.zeros(normed.rows(), normed.columns())?;
    operations.linear_backward_input(&grad_up, &weights.up, &mut grad_normed, false)?;
    operations.linear_backward_weight(&grad_up, &normed, &mut gradients.up, gradients.up_bias.as_mut())?;
    if let (Some(grad_gate), Some(weight), Some(gradient)) =
        (&grad_gate, &weights.gate, gradients.gate.as_mut())
    {
        operations.linear_backward_input(grad_gate, weight, &mut grad_normed, true)?;
        operations.linear_backward_weight(grad_gate, &normed, gradient, gradients.gate_bias.as_mut())?;
    }
    operations.rms_norm_backward(
        &grad_normed,
        hidden,
        &weights.norm,
        &reciprocal,
        &mut grad,
        Some(&mut gradients.norm),
    )?;
    Ok(grad)
}
