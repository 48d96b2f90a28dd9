//! Profiles: what rows say, on a quiet machine and on others.

use super::*;

/// The fake's formula, milliseconds.
fn true_cost(subject: &RowSubject, point: Point) -> f64 {
    let (tokens, keys) = match point {
        Point::Prefill { tokens, sequences } => (tokens * sequences, tokens * tokens * sequences),
        Point::Decode { context, sequences } => (sequences, context * sequences),
    };
    let (tokens, keys) = (tokens as f64, keys as f64);
    let linear = |weights: f64| 10.0 + weights / 500.0 + tokens * weights / 20_000.0;
    let microseconds = match subject {
        RowSubject::Base { .. } => 200.0 + tokens / 2.0,
        RowSubject::Block(BlockShape::Attention(attention)) => {
            let heads = attention.query_heads() + attention.kv_groups;
            let weights = 2.0 * 128.0 * (attention.head_dim * heads) as f64;
            linear(weights) + keys * 2.0 * (attention.kv_groups * attention.head_dim) as f64 / 400.0
        }
        RowSubject::Block(BlockShape::Mlp(mlp)) => linear(3.0 * 128.0 * mlp.channels as f64),
        other => panic!("{other:?}"),
    };
    microseconds / 1000.0
}

#[test]
fn a_profile_gives_what_each_block_and_the_base_cost_and_what_the_table_is_true_for() {
    let world = World::new(&[]);
    let profiled = world.profile().unwrap();
    assert_eq!(profiled.rows.len(), 5 * task().points.len());
    for row in &profiled.rows {
        let expected = true_cost(&row.subject, row.point);
        let (found, close) = (row.median_ms, 0.02 * expected + 0.002);
        assert!(
            (found - expected).abs() < close,
            "{:?} at {}: {found} for {expected}",
            row.subject,
            row.point
        );
    }
    let key = &profiled.key;
    assert_eq!(
        (key.engine.as_str(), key.engine_version.as_str()),
        ("vllm", "0.32.0")
    );
    assert_eq!((key.precision.as_str(), key.hidden), ("bf16", 128));
    assert!(key.device.ends_with(" threads"), "{}", key.device);
    assert!(world.whoever.beats.get() > 0, "it was seen to be alive");
}

#[test]
fn a_busy_machine_is_timed_again_and_then_as_it_is() {
    let profiled = World::new(&[("FAKE_VLLM_NOISE", "1")]).profile().unwrap();
    let blocks = profiled
        .rows
        .iter()
        .filter(|row| matches!(row.subject, RowSubject::Block(_)));
    assert!(
        blocks.map(|row| row.spread_ms).sum::<f64>() > 0.0,
        "its scatter is told"
    );
    let rounds = profiled.parent.latency_ms.samples.len();
    assert!(
        rounds > task().rounds,
        "more rounds while times scatter: {rounds}"
    );
}

#[test]
fn fewer_engines_are_open_at_once_where_there_is_no_room_for_all() {
    let world = World::new(&[("FAKE_VLLM_ENGINES", "4")]);
    let profiled = world.profile().unwrap();
    for row in &profiled.rows {
        let expected = true_cost(&row.subject, row.point);
        assert!(
            (row.median_ms - expected).abs() < 0.02 * expected + 0.002,
            "{row:?}"
        );
    }
    let later = World::new(&[("FAKE_VLLM", "steps:9=out_of_memory")]);
    assert!(
        later.profile().is_ok(),
        "also where it shows while they are timed"
    );
    let crate::Error::Vllm(error) = World::new(&[("FAKE_VLLM_ENGINES", "1")]).profile().unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(error.failure_kind(), FailureKind::OutOfMemory, "{error}");
}

#[test]
fn on_a_gpu_rows_are_its_own_time_and_what_the_host_needs_stands_beside_them() {
    let profiled = World::new(&[("FAKE_VLLM_CUDA", "1")]).profile().unwrap();
    assert_eq!(profiled.key.mode, Mode::Graphs);
    assert_eq!(profiled.key.device, "fake GPU");
    assert_eq!(profiled.rows.len(), (5 + 3) * task().points.len());
    let decode = |row: &&espalier_search::CostRow| matches!(row.point, Point::Decode { .. });
    for row in profiled.rows.iter().filter(decode) {
        // The stand-in's own part of the formula, and what its host needs: shallow stacks are bound by that.
        let expected = match row.subject {
            RowSubject::HostFloor => 0.3,
            RowSubject::HostBlock => 0.06,
            RowSubject::HostAlone => 0.1,
            _ => 0.6 * true_cost(&row.subject, row.point),
        };
        let close = 0.02 * expected + 0.01;
        assert!((row.median_ms - expected).abs() < close, "{row:?} for {expected}");
    }
}

#[test]
fn on_a_gpu_rounds_end_with_its_own_times_however_the_clock_scatters() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let world = World::new(&[
        ("FAKE_VLLM_CUDA", "1"),
        ("FAKE_VLLM_NOISE", "1"),
        ("FAKE_VLLM_LOG", log.path().to_str().unwrap()),
    ]);
    let mut task = task();
    task.rounds = 7;
    let profiled = world.profile_of(&task).unwrap();
    assert_eq!(profiled.parent.latency_ms.samples.len(), 7);
    let asked = fs::read_to_string(log.path()).unwrap();
    let steps = asked.lines().filter(|line| line.contains("\"steps\"")).count();
    // A parent, a short model, and two stacks of each shape: their own times do not scatter and take three rounds.
    assert_eq!(steps, 3 * (2 + 2 * 4) * task.points.len());
}
