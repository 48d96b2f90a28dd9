//! Two models measured in turns.

use super::*;

#[test]
fn parent_and_candidate_are_served_in_turns() {
    if !has_python() {
        return;
    }
    let pair = World::new(&[]).pair(None).unwrap();
    let of_parent = pair.parent.measured().unwrap();
    assert_eq!(of_parent.latency_ms.samples.len(), 4);
    let ratio = pair.candidate.latency_ms.median / of_parent.latency_ms.median;
    assert!(ratio > 0.4 && ratio < 0.9, "{ratio}");
    assert!(of_parent.first_token_ms.median < of_parent.latency_ms.median);
}

#[test]
fn on_a_processor_memory_is_also_what_the_process_takes_while_it_serves() {
    if !has_python() {
        return;
    }
    let wide = Architecture {
        hidden: 1024,
        ..parent()
    };
    let pair = World::new(&[]).pair_of(&wide, None).unwrap();
    for (architecture, measured, attention) in [
        (&wide, pair.parent.measured().unwrap(), 3),
        (&smaller_than(&wide), &pair.candidate, 2),
    ] {
        // Blocks of 32 tokens: 3 for each of 2 sequences and the null block; 2 × 64 × 2 bytes a token and block.
        let state = 7 * 32 * 2 * 64 * 2 * attention;
        let weights = 2 * architecture.parameters().total;
        let activations = 32 << 20;
        let expected = weights + state + activations;
        assert!(
            measured.memory_bytes.abs_diff(expected) < 2 << 20,
            "{} for {expected}",
            measured.memory_bytes
        );
    }
}

#[test]
fn on_a_gpu_memory_is_also_what_opening_kept_what_serving_took_and_the_process_once() {
    if !has_python() {
        return;
    }
    let pair = World::new(&[("FAKE_VLLM_CUDA", "1")]).pair(None).unwrap();
    for (architecture, measured, attention) in [
        (parent(), pair.parent.measured().unwrap(), 3),
        (smaller_than(&parent()), &pair.candidate, 2),
    ] {
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
fn memory_without_the_context_that_others_hide_is_told_as_such() {
    if !has_python() {
        return;
    }
    let alone = World::new(&[("FAKE_VLLM_CUDA", "1")]).pair(None).unwrap();
    assert!(!alone.without_context);
    let shared = World::new(&[("FAKE_VLLM_CUDA", "1"), ("FAKE_VLLM_SHARED", "1")]);
    let shared = shared.pair(None).unwrap();
    assert!(shared.without_context);
    let hidden = alone.candidate.memory_bytes - shared.candidate.memory_bytes;
    assert_eq!(hidden, 512 << 20);
    assert!(
        !World::new(&[]).pair(None).unwrap().without_context,
        "a processor has none"
    );
}

#[test]
fn runs_beside_others_are_told_as_such() {
    if !has_python() {
        return;
    }
    assert!(World::new(&[]).pair(None).unwrap().disturbed.abs() < f64::EPSILON);
    let waited = World::new(&[("FAKE_VLLM_BUSY", "4-11")]).pair(None).unwrap();
    assert!(waited.disturbed.abs() < f64::EPSILON, "they were waited for");
    let kept = World::new(&[("FAKE_VLLM_BUSY", "4-")]).pair(None).unwrap();
    assert!(kept.disturbed > 0.7, "{}", kept.disturbed);
}

#[test]
fn fewer_running_together_take_less_room_and_the_others_wait() {
    if !has_python() {
        return;
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let world = World::new(&[("FAKE_VLLM_LOG", &log.path().display().to_string())]);
    let (both, one) = (world.pair(None).unwrap(), world.pair(Some(1)).unwrap());
    // Alone a prompt takes less than two together, but the median of two has waited for half of the other's course.
    let waited = one.candidate.first_token_ms.median / both.candidate.first_token_ms.median;
    assert!(waited > 1.1, "{waited}");
    let asked = fs::read_to_string(log.path()).unwrap();
    let asked = asked.lines().map(|line| serde_json::from_str(line).unwrap());
    let asked: Vec<serde_json::Value> = asked.collect();
    let opened: Vec<(u64, u64)> = asked
        .iter()
        .filter_map(|line| line.get("open"))
        .map(|open| {
            (
                open["max_sequences"].as_u64().unwrap(),
                open["kv_bytes"].as_u64().unwrap(),
            )
        })
        .collect();
    // Blocks of 32 tokens, 3 for each sequence and the null block; 2 × 64 × 2 bytes a token in each block of attention.
    let state =
        |sequences: u64, attention: u64| (sequences, (3 * sequences + 1) * 32 * 2 * 64 * 2 * attention);
    assert_eq!(opened, [state(2, 3), state(2, 2), state(2, 3), state(1, 2)]);
    let offered = asked.iter().filter_map(|line| line.get("serve"));
    for serve in offered {
        assert_eq!(
            serve["workload"]["concurrency"], 2,
            "the workload offers all requests"
        );
    }
}

#[test]
fn a_model_is_told_as_anybody_can_serve_it_and_its_memory_is_looked_at_once_it_has_run() {
    if !has_python() {
        return;
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let world = World::new(&[("FAKE_VLLM_LOG", &log.path().display().to_string())]);
    let serving = world.pair(Some(1)).unwrap().serving.unwrap();
    assert_eq!(
        serving.arguments,
        ["--max-num-seqs", "1", "--no-enable-prefix-caching"]
    );
    assert_eq!(serving.environment["OMP_NUM_THREADS"], "1");
    let asked = fs::read_to_string(log.path()).unwrap();
    let verbs = asked.lines().filter_map(|line| {
        let verbs = ["open", "serve", "memory"].into_iter();
        verbs
            .into_iter()
            .find(|verb| line.contains(&format!("\"{verb}\"")))
    });
    let verbs: Vec<&str> = verbs.collect();
    // Once before it is looked at, and then as often as tells a host's memory.
    let mut opening = vec!["memory", "open", "memory"];
    opening.extend(["serve", "memory"].repeat(1 + memory::HOST_MEMORY_RUNS));
    assert_eq!(verbs[..2 * opening.len()], opening.repeat(2));
}
