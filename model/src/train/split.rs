//! Where the block list is cut into stages: arithmetic on an architecture.
//!
//! A stage costs what its slowest step costs all of them, so the largest cost is made as small as can be, and
//! then, at nearly that cost, the largest memory. Cost is multiply-adds a token: a parameter that a token uses is
//! one, attention over a causal sequence of `n` tokens adds `n` for each query channel (`n/2` for the scores, as
//! many for what they weigh). The embedding costs nothing but memory, the head both.

use std::ops::Range;

use espalier_arch::{Architecture, BlockShape};

use crate::{Error, Result};

/// How much dearer than the best split one may be that needs less memory.
const SLACK: f64 = 1.02;

/// What a stretch of blocks costs, and what it holds.
#[derive(Debug, Clone, Copy)]
struct Weight {
    cost: f64,
    parameters: f64,
}

/// Blocks of each of `stages` stages over sequences of `tokens` tokens: all blocks, in order, at least one each. A
/// model without a block is one stage.
///
/// # Errors
/// When there are fewer blocks than stages, or no stage.
pub fn cut(architecture: &Architecture, stages: usize, tokens: usize) -> Result<Vec<Range<usize>>> {
    let blocks = architecture.blocks.len();
    if stages == 1 {
        return Ok(std::iter::once(0..blocks).collect());
    }
    if stages == 0 || blocks < stages {
        return Err(Error::OutOfRange {
            what: "pipeline stages",
            value: stages,
            expected: format!("1 to {blocks}, the blocks of the model"),
        });
    }
    let weights = weights(architecture, tokens);
    let cheapest = partition(&weights, stages, |weight| weight.cost, |_| true);
    let bound = SLACK
        * cheapest
            .iter()
            .map(|range| sum(&weights, range).cost)
            .fold(0.0, f64::max);
    Ok(partition(
        &weights,
        stages,
        |weight| weight.parameters,
        |weight| weight.cost <= bound,
    ))
}

/// Of each block, with what stands before the first and after the last.
fn weights(architecture: &Architecture, tokens: usize) -> Vec<Weight> {
    let hidden = architecture.hidden;
    let block = |shape: &BlockShape| {
        let scores = match shape {
            BlockShape::Attention(attention) => {
                let seen = attention.sliding_window.unwrap_or(tokens).min(tokens);
                attention.query_width() as f64 * seen as f64
            }
            _ => 0.0,
        };
        Weight {
            cost: shape.active_parameters(hidden) as f64 + scores,
            parameters: shape.parameters(hidden) as f64,
        }
    };
    let mut weights: Vec<Weight> = architecture.blocks.iter().map(|it| block(&it.shape)).collect();
    let table = architecture.vocab_size as f64 * hidden as f64;
    if let Some(first) = weights.first_mut() {
        first.parameters += table;
    }
    if let Some(last) = weights.last_mut() {
        last.cost += table;
        last.parameters += table;
    }
    weights
}

fn sum(weights: &[Weight], range: &Range<usize>) -> Weight {
    let mut total = Weight {
        cost: 0.0,
        parameters: 0.0,
    };
    for weight in weights.get(range.clone()).unwrap_or_default() {
        total.cost += weight.cost;
        total.parameters += weight.parameters;
    }
    total
}

/// The cut whose largest `measure` is least among those whose every stage is `allowed`. One must be.
fn partition(
    weights: &[Weight],
    stages: usize,
    measure: impl Fn(Weight) -> f64,
    allowed: impl Fn(Weight) -> bool,
) -> Vec<Range<usize>> {
    let blocks = weights.len();
    // best[end]: the least largest measure of the first `stage + 1` stages over the first `end` blocks, and where
    // the last of them begins.
    let mut table: Vec<Vec<(f64, usize)>> = Vec::with_capacity(stages);
    for stage in 0..stages {
        let mut best = vec![(f64::INFINITY, stage); blocks + 1];
        for end in stage + 1..=blocks {
            for start in stage..end {
                let own = sum(weights, &(start..end));
                let before = match table.last() {
                    Some(before) => before.get(start).map_or(f64::INFINITY, |(largest, _)| *largest),
                    None if start == 0 => 0.0,
                    None => f64::INFINITY,
                };
                let largest = before.max(measure(own));
                if let Some(known) = best.get_mut(end)
                    && largest < known.0
                    && allowed(own)
                {
                    *known = (largest, start);
                }
            }
        }
        table.push(best);
    }
    let mut ranges = Vec::with_capacity(stages);
    let mut end = blocks;
    for best in table.iter().rev() {
        let start = best.get(end).map_or(0, |(_, start)| *start);
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn architecture(layers: usize, vocabulary: usize) -> Architecture {
        let config = json!({
            "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 172,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": vocabulary, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        });
        Architecture::from_config(&config).unwrap()
    }

    #[test]
    fn a_large_head_leaves_the_last_stage_fewer_blocks() {
        let even = cut(&architecture(8, 16), 2, 128).unwrap();
        assert_eq!(even, [0..8, 8..16]);
        let headed = cut(&architecture(8, 2000), 2, 128).unwrap();
        assert!(headed[1].len() < headed[0].len(), "{headed:?}");
    }

    #[test]
    fn more_stages_than_blocks_and_none_are_refused() {
        let error = cut(&architecture(1, 16), 3, 8).unwrap_err().to_string();
        assert!(error.contains("stages is 3, expected 1 to 2"), "{error}");
        assert!(cut(&architecture(1, 16), 0, 8).is_err());
        let mut bare = architecture(1, 16);
        bare.blocks.clear();
        let whole: Vec<_> = std::iter::once(0..0).collect();
        assert_eq!(cut(&bare, 1, 8).unwrap(), whole);
        assert!(cut(&bare, 2, 8).is_err());
    }

    proptest! {
        #[test]
        fn the_largest_stage_is_the_least_there_is(
            costs in prop::collection::vec(1_u32..50, 1..9), stages in 1_usize..5,
        ) {
            prop_assume!(stages <= costs.len());
            let weights: Vec<Weight> = costs.iter()
                .map(|&cost| Weight { cost: f64::from(cost), parameters: 1.0 }).collect();
            let ranges = partition(&weights, stages, |weight| weight.cost, |_| true);
            prop_assert_eq!(ranges.len(), stages);
            let mut next = 0;
            for range in &ranges {
                prop_assert!(range.start == next && range.end > range.start);
                next = range.end;
            }
            prop_assert_eq!(next, costs.len());
            let largest = |ranges: &[Range<usize>]| ranges.iter()
                .map(|range| sum(&weights, range).cost).fold(0.0, f64::max);
            // Every cut there is, by the places that bits name.
            for bits in 0_u32..1 << (costs.len() - 1) {
                if bits.count_ones() as usize != stages - 1 {
                    continue;
                }
                let mut cut = Vec::new();
                let mut start = 0;
                for end in 1..costs.len() {
                    if bits >> (end - 1) & 1 == 1 {
                        cut.push(start..end);
                        start = end;
                    }
                }
                cut.push(start..costs.len());
                prop_assert!(largest(&ranges) <= largest(&cut));
            }
        }
    }
}
