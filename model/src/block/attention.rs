//! Causal grouped-query attention with optional biases, query and key norms, RoPE and sliding window:
//! `x + output(attention(rope(norm(query(n))), rope(norm(key(n))), value(n)))` with `n = norm(x)`.

use espalier_arch::Attention;

use super::Context;
use crate::ops::Operations;
use crate::{AttentionWeights, Result, Tensor};

/// A query or key projection's way to the attention.
#[derive(Debug)]
struct Projected {
    /// Before the norm of each head, with that norm's reciprocals; none without such a norm.
    before_norm: Option<(Tensor, Tensor)>,
    /// After norm and RoPE, `(tokens, width)`.
    rotated: Tensor,
}

/// What attention's backward needs besides the block's input.
#[derive(Debug)]
pub struct Saved {
    normed: Tensor,
    reciprocal: Tensor,
    query: Projected,
    key: Projected,
    value: Tensor,
    attended: Tensor,
    log_sums: Tensor,
}

impl Saved {
    /// What the output projection reads, `(tokens, query_width)`: the heads' outputs side by side.
    pub fn attended(&self) -> &Tensor {
        &self.attended
    }
}

/// Elements of [`Saved`] for one row.
pub(super) fn saved_elements(shape: &Attention, hidden: usize) -> usize {
    let (query, kv, heads) = (shape.query_width(), shape.kv_width(), shape.query_heads());
    let norms = if shape.qk_norm {
        query + kv + heads + shape.kv_groups
    } else {
        0
    };
    hidden + 1 + 2 * query + 2 * kv + heads + norms
}

/// Projects, norms each head and rotates; `first_position` is that of the first row of each sequence.
pub(crate) struct Projection<'a> {
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) norm: Option<&'a Tensor>,
}

impl Projection<'_> {
    fn forward(
        &self,
        context: Context<'_>,
        shape: &Attention,
        normed: &Tensor,
        position: usize,
    ) -> Result<Projected> {
        let operations = context.operations;
        let projected = operations.linear(normed, self.weight, self.bias)?;
        let (before_norm, mut rotated) = match self.norm {
            None => (None, projected),
            Some(weight) => {
                let (output, reciprocal) = operations.rms_norm(&projected, weight, context.epsilon)?;
                (Some((projected, reciprocal)), output)
            }
        };
        if let (Some(_), Some(table)) = (&shape.rope, context.rope) {
            operations.rope(&mut rotated, shape.head_dim, table, context.layout, position)?;
        }
        Ok(Projected { before_norm, rotated })
    }
}

impl AttentionWeights {
    pub(crate) fn query_projection(&self) -> Projection<'_> {
        Projection {
            weight: &self.query,
            bias: self.query_bias.as_ref(),
            norm: self.query_norm.as_ref(),
        }
    }

    pub(crate) fn key_projection(&self) -> Projection<'_> {
        Projection {
            weight: &self.key,
            bias: self.key_bias.as_ref(),
            norm: self.key_norm.as_ref(),
        }
    }
}

/// Queries, keys and values of new tokens that stand at `position` and after, ready for the cache.
pub(crate) fn project(
    context: Context<'_>,
    shape: &Attention,
    weights: &AttentionWeights,
    hidden: &Tensor,
    position: usize,
) -> Result<(Tensor, Tensor, Tensor)> {
    let operations = context.operations;
    let (normed, _) = operations.rms_norm(hidden, &weights.norm, context.epsilon)?;
    let query = weights
        .query_projection()
        .forward(context, shape, &normed, position)?;
    let key = weights
        .key_projection()
        .forward(context, shape, &normed, position)?;
    let value = operations.linear(&normed, &weights.value, weights.value_bias.as_ref())?;
    Ok((query.rotated, key.rotated, value))
}

/// The block's output and what its backward needs.
///
/// # Errors
/// When weights and shape disagree.
pub fn forward(
    context: Context<'_>,
    shape: &Attention,
    weights: &AttentionWeights,
    hidden: &Tensor,
) -> Result<(Tensor, Saved)> {
    let operations = context.operations;
    let (normed, reciprocal) = operations.rms_norm(hidden, &weights.norm, context.epsilon)?;
    let query = weights.query_projection().forward(context, shape, &normed, 0)?;
    let key = weights.key_projection().forward(context, shape, &normed, 0)?;
    let value = operations.linear(&normed, &weights.value, weights.value_bias.as_ref())?;
    let (attended, log_sums) =
        operations.attention(&query.rotated, &key.rotated, &value, shape, context.layout)?;
    let output =
        operations.linear_residual(&attended, &weights.output, weights.output_bias.as_ref(), hidden)?;
    Ok((
        output,
        Saved {
            normed,
            reciprocal,
            query,
            key,
            value,
            attended,
            log_sums,
        },
    ))
}

/// Takes a rotated projection's gradient back to the projection's output, through RoPE and head norm.
fn unproject(
    context: Context<'_>,
    shape: &Attention,
    projected: &Projected,
    norm: Option<&Tensor>,
    mut grad: Tensor,
    grad_norm: Option<&mut Tensor>,
) -> Result<Tensor> {
    let operations = context.operations;
    if let (Some(_), Some(table)) = (&shape.rope, context.rope) {
        operations.rope_backward(&mut grad, shape.head_dim, table, context.layout)?;
    }
    let (Some((before, reciprocal)), Some(weight)) = (&projected.before_norm, norm) else {
        return Ok(grad);
    };
    let mut grad_before = operations.zeros(before.rows(), before.columns())?;
    operations.rms_norm_backward(&grad, before, weight, reciprocal, &mut grad_before, grad_norm)?;
    Ok(grad_before)
}

/// The gradient of the block's input from that of its output; weights' gradients are added to.
///
/// # Errors
/// When gradients and weights disagree in shape.
pub fn backward(
    context: Context<'_>,
    shape: &Attention,
    weights: &AttentionWeights,
    hidden: &Tensor,
    saved: Saved,
    mut grad: Tensor,
    gradients: &mut AttentionWeights,
) -> Result<Tensor> {
    let operations: &dyn Operations = context.operations;
    let Saved {
        normed,
        reciprocal,
        query,
        key,
        value,
        attended,
        log_sums,
    } = saved;
    operations.linear_backward_weight(
        &grad,
        &attended,
        &mut gradients.output,
        gradients.output_bias.as_mut(),
    )?;
    let mut grad_attended = operations.zeros(attended.rows(), attended.columns())?;
    operations.linear_backward_input(&grad, &weights.output, &mut grad_attended, false)?;
    let (grad_query, grad_key, grad_value) = operations.attention_backward(
        &grad_attended,
        &query.rotated,
        &key.rotated,
        &value,
        &attended,
        &log_sums,
        shape,
        context.layout,
    )?;
    drop((grad_attended, attended, value));
    let query_norm = gradients.query_norm.as_mut();
    let grad_query = unproject(
        context,
        shape,
        &query,
        weights.query_norm.as_ref(),
        grad_query,
        query_norm,
    )?;
    let key_norm = gradients.key_norm.as_mut();
    let grad_key = unproject(
        context,
        shape,
        &key,
        weights.key_norm.as_ref(),
        grad_key,
        key_norm,
    )?;

    let mut grad_normed = operations.zeros(normed.rows(), normed.columns())?;
    operations.linear_backward_input(&grad_query, &weights.query, &mut grad_normed, false)?;
    operations.linear_backward_input(&grad_key, &weights.key, &mut grad_normed, true)?;
    operations.linear_backward_input(&grad_value, &weights.value, &mut grad_normed, true)?;
    for (grad_output, weight, bias) in [
        (&grad_query, &mut gradients.query, gradients.query_bias.as_mut()),
        (&grad_key, &mut gradients.key, gradients.key_bias.as_mut()),
        (&grad_value, &mut gradients.value, gradients.value_bias.as_mut()),
    ] {
        operations.linear_backward_weight(grad_output, &normed, weight, bias)?;
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
