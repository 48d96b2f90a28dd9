//! Two models measured in turns.

use super::*;

#[test]
fn parent_and_candidate_are_served_in_turns_and_their_memory_is_what_the_engine_holds() {
    let pair = World::new(&[]).pair(None).unwrap();
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

#[test]
fn on_a_gpu_memory_is_also_what_opening_kept_what_serving_took_and_the_process_once() {
    let pair = World::new(&[("FAKE_VLLM_CUDA", "1")]).pair(None).unwrap();
    let mut smaller = parent();
    smaller.blocks.truncate(3);
    for (architecture, measured, attention) in [(parent(), &pair.parent, 3), (smaller, &pair.candidate, 2)] {
        // Blocks of 16 tokens: 5 for each of 2 sequences and the null block.
        let state = 11 * 16 * 2 * 64 * 2 * attention;
        let weights = 2 * architecture.parameters().total;
        // The stand-in's graphs, activations and context.
        let beside = (64 + 32 + 512) << 20;
        let expected = weights + state + beside;
        assert!(
            measured.memory_bytes.abs_diff(expected) < 1 << 16,
            "{} for {expected}",
            measured.memory_bytes
        );
    }
}

#[test]
fn runs_beside_others_are_told_as_such() {
    assert!(World::new(&[]).pair(None).unwrap().disturbed.abs() < f64::EPSILON);
    let waited = World::new(&[("FAKE_VLLM_BUSY", "4-11")]).pair(None).unwrap();
    assert!(waited.disturbed.abs() < f64::EPSILON, "they were waited for");
    let kept = World::new(&[("FAKE_VLLM_BUSY", "4-")]).pair(None).unwrap();
    assert!(kept.disturbed > 0.7, "{}", kept.disturbed);
}
