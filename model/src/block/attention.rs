//! Causal grouped-query attention with optional biases, query and key norms, RoPE and sliding window:
//! `x + output(attention(rope(norm(query(n))), rope(norm(key(n))), value(n)))` with `n = norm(x)`.

use espalier_arch::Attention;

use super::{Context, SavedRow};
use crate::ops::decoding::Decoding;
use crate::ops::{KvCache, Linear, LinearGradient};
use crate::{AttentionWeights, Error, Result, Tensor};

/// A query or key projection's way to the attention.
#[derive(Debug)]
struct Projected {
    /// Before the norm of each head, with that norm's reciprocals; none without such a norm.
    before_norm: Option<(Tensor, Tensor)>,
    /// After norm and RoPE, `(tokens, width)`.
    rotated: Tensor,
}

/// What the attention reads, and what of the way there the backward needs.
#[derive(Debug)]
struct Projections {
    normed: Tensor,
    reciprocal: Tensor,
    query: Projected,
    key: Projected,
    value: Tensor,
}

/// What attention's backward needs besides the block's input.
#[derive(Debug)]
pub struct Saved {
    projections: Projections,
    attended: Tensor,
    log_sums: Tensor,
}

impl Saved {
    /// What the output projection reads, `(tokens, query_width)`: the heads' outputs side by side.
    pub fn attended(&self) -> &Tensor {
        &self.attended
    }
}

/// What [`Saved`] holds for one row.
pub(super) fn saved_row(shape: &Attention, hidden: usize) -> SavedRow {
    let (query, kv, heads) = (shape.query_width(), shape.kv_width(), shape.query_heads());
    let (normed_heads, reciprocals) = if shape.qk_norm {
        (query + kv, heads + shape.kv_groups)
    } else {
        (0, 0)
    };
    SavedRow {
        activations: hidden + 2 * query + 2 * kv + normed_heads,
        statistics: 1 + heads + reciprocals,
    }
}

impl AttentionWeights {
    /// Query, key and value projection, in the order in which [`crate::ops::Operations::stack`] lays them.
    pub(crate) fn projections(&self) -> [Linear<'_>; 3] {
        let layer = |weight, bias| Linear { weight, bias };
        [
            layer(&self.query, self.query_bias.as_ref()),
            layer(&self.key, self.key_bias.as_ref()),
            layer(&self.value, self.value_bias.as_ref()),
        ]
    }

    fn output_layer(&self) -> Linear<'_> {
        Linear {
            weight: &self.output,
            bias: self.output_bias.as_ref(),
        }
    }
}

/// Projects, norms each head and rotates; `position` is that of the first row of each sequence.
fn project(
    context: Context<'_>,
    shape: &Attention,
    weights: &AttentionWeights,
    hidden: &Tensor,
    position: usize,
) -> Result<Projections> {
    let operations = context.operations;
    let (normed, reciprocal) = operations.rms_norm(hidden, &weights.norm, context.epsilon)?;
    let projected = operations.linear_many(&normed, &weights.projections())?;
    let [query, key, value] = three(projected)?;
    let norm_heads = |projected: Tensor, weight: Option<&Tensor>| -> Result<Projected> {
        match weight {
            None => Ok(Projected {
                before_norm: None,
                rotated: projected,
            }),
            Some(weight) => {
                let (rotated, reciprocal) = operations.rms_norm(&projected, weight, context.epsilon)?;
                let before_norm = Some((projected, reciprocal));
                Ok(Projected { before_norm, rotated })
            }
        }
    };
    let mut query = norm_heads(query, weights.query_norm.as_ref())?;
    let mut key = norm_heads(key, weights.key_norm.as_ref())?;
    if let (Some(_), Some(table)) = (&shape.rope, context.rope) {
        operations.rope(
            &mut query.rotated,
            &mut key.rotated,
            shape.head_dim,
            table,
            context.layout,
            position,
        )?;
    }
    Ok(Projections {
        normed,
        reciprocal,
        query,
        key,
        value,
    })
}

/// The block's output for new tokens that stand at `position` and after, over a cache to which they are added.
pub(crate) fn forward_cached(
    context: Context<'_>,
    shape: &Attention,
    weights: &AttentionWeights,
    hidden: &Tensor,
    cache: &mut KvCache,
    position: usize,
) -> Result<Tensor> {
    let operations = context.operations;
    let projections = project(context, shape, weights, hidden, position)?;
    let attended = operations.attention_cached(
        &projections.query.rotated,
        &projections.key.rotated,
        &projections.value,
        cache,
        shape,
        context.layout,
    )?;
    operations.linear_residual(&attended, weights.output_layer(), hidden)
}

/// As [`forward_cached`] for one token of each sequence, where `decoding` knows which and at what position.
pub(crate) fn forward_step(
    context: Context<'_>,
    decoding: &dyn Decoding,
    shape: &Attention,
    weights: &AttentionWeights,
    hidden: &Tensor,
    cache: &KvCache,
) -> Result<Tensor> {
    let (operations, epsilon) = (context.operations, context.epsilon);
    let projected = decoding.project(hidden, &weights.norm, epsilon, &weights.projections())?;
    let [mut query, mut key, value] = three(projected)?;
    for (projected, norm) in [(&mut query, &weights.query_norm), (&mut key, &weights.key_norm)] {
        if let Some(norm) = norm {
            (*projected, _) = operations.rms_norm(projected, norm, epsilon)?;
        }
    }
    let rope = context.rope.filter(|_| shape.rope.is_some());
    let attended = decoding.attention([&query, &key, &value], cache, shape, rope)?;
    operations.linear_residual(&attended, weights.output_layer(), hidden)
}

/// The outputs of query, key and value projection.
fn three(projected: Vec<Tensor>) -> Result<[Tensor; 3]> {
    <[Tensor; 3]>::try_from(projected).map_err(|found| Error::Shape {
        operation: "linear_many",
        expected: "an output for each of 3 layers".to_owned(),
        found: found.len().to_string(),
    })
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
    let projections = project(context, shape, weights, hidden, 0)?;
    let (attended, log_sums) = operations.attention(
        &projections.query.rotated,
        &projections.key.rotated,
        &projections.value,
        shape,
        context.layout,
    )?;
    let output = operations.linear_residual(&attended, weights.output_layer(), hidden)?;
    let saved = Saved {
        projections,
        attended,
        log_sums,
    };
    Ok((output, saved))
}

/// Takes a projection's gradient back through the norm of each head, if there is one.
fn unnorm(
    context: Context<'_>,
    projected: &Projected,
    weight: Option<&Tensor>,
    grad: Tensor,
    grad_weight: Option<&mut Tensor>,
) -> Result<Tensor> {
    match (&projected.before_norm, weight, grad_weight) {
        (Some((before, reciprocal)), Some(weight), Some(grad_weight)) => context
            .operations
            .rms_norm_backward(&grad, before, weight, reciprocal, None, grad_weight),
        _ => Ok(grad),
    }
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
    grad: Tensor,
    gradients: &mut AttentionWeights,
) -> Result<Tensor> {
    let operations = context.operations;
    let Saved {
        projections,
        attended,
        log_sums,
    } = saved;
    let Projections {
        normed,
        reciprocal,
        query,
        key,
        value,
    } = projections;
    let output = LinearGradient {
        output: &grad,
        weight: &mut gradients.output,
        bias: gradients.output_bias.as_mut(),
    };
    operations.linear_backward_weight(&attended, &mut [output])?;
    let grad_attended = operations.linear_backward_input(&[(&grad, &weights.output)])?;
    let (mut grad_query, mut grad_key, grad_value) = operations.attention_backward(
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
    if let (Some(_), Some(table)) = (&shape.rope, context.rope) {
        let (query, key) = (&mut grad_query, &mut grad_key);
        operations.rope_backward(query, key, shape.head_dim, table, context.layout)?;
    }
    let norms = (weights.query_norm.as_ref(), weights.key_norm.as_ref());
    let grad_query = unnorm(
        context,
        &query,
        norms.0,
        grad_query,
        gradients.query_norm.as_mut(),
    )?;
    let grad_key = unnorm(context, &key, norms.1, grad_key, gradients.key_norm.as_mut())?;

    let grad_normed = operations.linear_backward_input(&[
        (&grad_query, &weights.query),
        (&grad_key, &weights.key),
        (&grad_value, &weights.value),
    ])?;
    let layer = |output, weight, bias| LinearGradient { output, weight, bias };
    let mut layers = [
        layer(&grad_query, &mut gradients.query, gradients.query_bias.as_mut()),
        layer(&grad_key, &mut gradients.key, gradients.key_bias.as_mut()),
        layer(&grad_value, &mut gradients.value, gradients.value_bias.as_mut()),
    ];
    operations.linear_backward_weight(&normed, &mut layers)?;
    let norm = &mut gradients.norm;
    operations.rms_norm_backward(&grad_normed, hidden, &weights.norm, &reciprocal, Some(grad), norm)
}
