//! Attention over a batch, and over a cache.

use espalier_arch::Attention;

use super::{CudaOperations, attention_shape};
use crate::ops::check::{expect, expect_shape};
use crate::ops::cuda::attention::{AttentionGradients, AttentionInputs, CachedKeys};
use crate::ops::cuda::decode::DecodeCache;
use crate::ops::cuda::matrix::Matrix;
use crate::ops::{KvCache, Layout};
use crate::{Result, Tensor};

impl CudaOperations {
    fn expect_heads(
        &self,
        operation: &'static str,
        [q, k, v]: [&Tensor; 3],
        shape: &Attention,
        layout: Layout,
    ) -> Result<[Matrix; 3]> {
        let rows = layout.rows();
        expect_shape(operation, "q", q, rows, shape.query_width())?;
        expect_shape(operation, "k", k, rows, shape.kv_width())?;
        expect_shape(operation, "v", v, rows, shape.kv_width())?;
        Ok([q.cuda()?, k.cuda()?, v.cuda()?])
    }

    pub(super) fn attend(
        &self,
        operands: [&Tensor; 3],
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor)> {
        let [q, k, v] = self.expect_heads("attention", operands, shape, layout)?;
        let log_sums = self.f32(shape.query_heads(), q.rows())?;
        let over = attention_shape(shape, layout);
        let output = self.like(&q, |output| {
            self.device.attention(&q, &k, &v, output, &log_sums, over, None)
        })?;
        Ok((output, self.tensor(log_sums)?))
    }

    pub(super) fn attend_backward(
        &self,
        grad_output: &Tensor,
        operands: [&Tensor; 3],
        (output, log_sums): (&Tensor, &Tensor),
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let [q, k, v] = self.expect_heads("attention_backward", operands, shape, layout)?;
        // Side by side as `linear_many` takes the three, so that their products are one.
        let (query, kv) = (q.columns(), k.columns());
        let all = self.bf16(q.rows(), query + 2 * kv)?;
        let gradients = [
            all.narrow_columns(0, query)?,
            all.narrow_columns(query, kv)?,
            all.narrow_columns(query + kv, kv)?,
        ];
        let inputs = AttentionInputs {
            q: &q,
            k: &k,
            v: &v,
            output: &output.cuda()?,
            log_sums: &log_sums.cuda()?,
            grad_output: &grad_output.cuda()?,
        };
        let targets = AttentionGradients {
            q: &gradients[0],
            k: &gradients[1],
            v: &gradients[2],
        };
        self.device
            .attention_backward(inputs, targets, attention_shape(shape, layout))?;
        let [q, k, v] = gradients;
        Ok((self.tensor(q)?, self.tensor(k)?, self.tensor(v)?))
    }

    pub(super) fn attend_cached(
        &self,
        operands: [&Tensor; 3],
        cache: &mut KvCache,
        shape: &Attention,
        layout: Layout,
    ) -> Result<Tensor> {
        const NAME: &str = "attention_cached";
        let [q, k, v] = self.expect_heads(NAME, operands, shape, layout)?;
        let rows = layout.sequences.saturating_mul(cache.capacity);
        for (name, held) in [("keys", &cache.keys), ("values", &cache.values)] {
            expect_shape(NAME, name, held, rows, shape.kv_width())?;
        }
        let length = cache.length.saturating_add(layout.tokens);
        expect(
            NAME,
            length <= cache.capacity,
            || format!("room for {length} tokens"),
            || cache.capacity.to_string(),
        )?;
        let (keys, values) = (cache.keys.cuda()?, cache.values.cuda()?);
        let over = attention_shape(shape, layout);
        let output = if layout.tokens == 1 && matches!(shape.head_dim, 16 | 32 | 64 | 128) {
            let lengths = vec![i32::try_from(length).unwrap_or(i32::MAX); layout.sequences];
            let lengths = self.device.upload_i32(&lengths)?;
            let held = DecodeCache {
                keys: &keys,
                values: &values,
                capacity: cache.capacity,
                lengths: &lengths,
            };
            self.like(&q, |output| {
                self.device.decode_attention(
                    &q,
                    &k,
                    &v,
                    held,
                    None,
                    output,
                    shape.head_dim,
                    over.window,
                    false,
                )
            })?
        } else {
            for sequence in 0..layout.sequences {
                let from = sequence * layout.tokens;
                let to = sequence * cache.capacity + cache.length;
                for (held, new) in [(&keys, &k), (&values, &v)] {
                    let target = held.narrow_rows(to, layout.tokens)?;
                    self.device
                        .cast(&target, &new.narrow_rows(from, layout.tokens)?)?;
                }
            }
            let log_sums = self.f32(shape.query_heads(), q.rows())?;
            let cached = Some(CachedKeys {
                keys: length,
                capacity: cache.capacity,
            });
            self.like(&q, |output| {
                self.device
                    .attention(&q, &keys, &values, output, &log_sums, over, cached)
            })?
        };
        cache.length = length;
        Ok(output)
    }
}
