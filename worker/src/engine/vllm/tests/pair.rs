//! Two models measured in turns.

use super::*;

#[test]
fn parent_and_candidate_are_served_in_turns_and_their_memory_is_what_the_engine_holds() {
    let pair = World::new(&[]).pair().unwrap();
    assert_eq!(pair.parent.latency_ms.samples.len(), 4);
    let ratio = pair.candidate.latency_ms.median / pair.parent.latency_ms.median;
    assert!(ratio > 0.4 && ratio < 0.9, "{ratio}");
    // Blocks of 32 tokens: 3 for each of 2 sequences and the null block; 2 × 64 × 2 bytes a token and block.
    let state = |blocks: u64| 7 * 32 * 2 * 64 * 2 * blocks;
    let weights = |architecture: &Architecture| 2 * architecture.parameters().total;
    let mut smaller = parent();
    smaller.blocks.truncate(3);
    let expected = (weights(&parent()) - weights(&smaller)) + state(3) - state(2);
    let found = pair.parent.memory_bytes - pair.candidate.memory_bytes;
    let norms = 2 * 128 * 4;
    assert!(
        found.abs_diff(expected) <= norms + (1 << 20),
        "{found} for {expected}"
    );
    assert!(pair.parent.first_token_ms.median < pair.parent.latency_ms.median);
}
