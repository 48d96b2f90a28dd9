//! Profiles: what rows say, on a quiet machine and on others.

use super::*;

/// The fake's formula, milliseconds.
pub(super) fn true_cost(subject: &RowSubject, point: Point) -> f64 {
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
    if !has_python() {
        return;
    }
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
fn whatever_times_depend_on_is_in_their_key() {
    if !has_python() {
        return;
    }
    let key = |variables: &[(&str, &str)]| {
        let world = World::new(variables);
        let mut vllm = Vllm::new(world.options.clone());
        vllm.engine(Precision::Bf16, &world.whoever).unwrap().key(128)
    };
    let plain = key(&[]);
    assert_eq!(
        plain,
        key(&[("VLLM_CACHE_ROOT", "/elsewhere"), ("VLLM_LOGGING_LEVEL", "INFO")])
    );
    assert_eq!(
        plain
            .environment
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect::<Vec<_>>(),
        [("plugin", "0.1.0"), ("torch", "2.13.0")]
    );
    let preloaded = key(&[("FAKE_VLLM_PRELOAD", "/a/libtcmalloc.so.4:/b/libiomp5.so")]);
    assert_eq!(preloaded.environment["preload"], "libtcmalloc.so.4 libiomp5.so");
    assert_eq!(
        preloaded,
        key(&[("FAKE_VLLM_PRELOAD", "/c/libtcmalloc.so.4 /b/libiomp5.so")])
    );
    let bound = key(&[("VLLM_CPU_OMP_THREADS_BIND", "0-15")]);
    assert_eq!(bound.environment["VLLM_CPU_OMP_THREADS_BIND"], "0-15");
    assert_eq!(plain, key(&[("VLLM_CPU_OMP_THREADS_BIND", "nobind")]));
}

#[test]
fn an_engine_of_more_threads_than_its_key_says_is_a_fault_of_the_environment() {
    if !has_python() {
        return;
    }
    let world = World::new(&[("FAKE_VLLM_THREADS", "16")]);
    let crate::Error::Vllm(error) = world.profile().unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(error.failure_kind(), FailureKind::Error, "another worker may do");
    for part in ["--vllm-python", "with 16 threads, expected 1"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn times_that_scatter_are_taken_more_often_and_their_scatter_is_told() {
    if !has_python() {
        return;
    }
    let profiled = World::new(&[("FAKE_VLLM_NOISE", "0.3")]).profile().unwrap();
    let blocks = profiled
        .rows
        .iter()
        .filter(|row| matches!(row.subject, RowSubject::Block(_)));
    assert!(blocks.map(|row| row.spread_ms).sum::<f64>() > 0.0);
    let rounds = profiled.parent.measured().unwrap().latency_ms.samples.len();
    assert!(rounds > task().rounds, "{rounds}");
}

fn expect_true_costs(profiled: &Profiled) {
    for row in &profiled.rows {
        let expected = true_cost(&row.subject, row.point);
        let close = 0.02 * expected + 0.002;
        assert!((row.median_ms - expected).abs() < close, "{row:?} for {expected}");
    }
}

#[test]
fn others_are_waited_for_and_no_time_beside_them_is_in_a_row() {
    if !has_python() {
        return;
    }
    // As long as the pauses of one point last, and longer: the rest of a round is then taken beside them.
    for busy in ["9-16", "9-44"] {
        let world = World::new(&[("FAKE_VLLM_BUSY", busy)]);
        let profiled = world.profile().unwrap();
        expect_true_costs(&profiled);
        let latencies = &profiled.parent.measured().unwrap().latency_ms;
        assert!(latencies.spread < 0.01 * latencies.median, "{latencies:?}");
        let told = world.whoever.told.borrow();
        let waited = told
            .iter()
            .filter(|(_, total, note)| *total > 0 && note.starts_with("others use 50% of the processors"));
        assert!(waited.count() >= 8, "{busy}");
    }
}

#[test]
fn a_machine_that_others_do_not_leave_is_too_noisy_and_what_was_seen_is_said() {
    if !has_python() {
        return;
    }
    for busy in ["5-", "2-"] {
        let error = World::new(&[("FAKE_VLLM_BUSY", busy)]).profile().unwrap_err();
        assert_eq!(error.failure().kind, FailureKind::TooNoisy, "{error}");
        let said = error.to_string();
        for part in [
            "too noisy",
            "while others used more than 20%",
            "up to 50%",
            "8 pauses",
        ] {
            assert!(said.contains(part), "{said}");
        }
    }
}

#[test]
fn how_far_a_profile_is_is_told_over_all_its_groups_and_never_falls() {
    if !has_python() {
        return;
    }
    let world = World::new(&[("FAKE_VLLM_ENGINES", "4")]);
    world.profile().unwrap();
    let told = world.whoever.told.borrow();
    let told: Vec<(usize, usize)> = told
        .iter()
        .map(|(done, total, _)| (*done, *total))
        .filter(|(_, total)| *total > 0)
        .collect();
    let falls = told
        .windows(2)
        .find(|pair| pair[1].0 * pair[0].1 < pair[0].0 * pair[1].1);
    assert_eq!(falls, None);
    // A parent, a short model, and two stacks of each shape.
    let all = (2 + 2 * 4) * task().points.len() * task().rounds;
    assert_eq!(told.last(), Some(&(all, all)));
    assert!(told.len() > all, "it is told of each time");
}

#[test]
fn what_was_measured_stands_when_its_engines_cannot_be_closed() {
    if !has_python() {
        return;
    }
    for wrong in ["close=fatal", "close=die", "close:2=hang"] {
        let world = World::new(&[("FAKE_VLLM", wrong), ("FAKE_VLLM_CUDA", "1")]);
        // As long as the one that hangs is waited for, and no shorter than any other request may take.
        let world = world.patient_for(Duration::from_secs(20));
        let mut vllm = Vllm::new(world.options.clone());
        let mut engine = vllm.engine(Precision::Bf16, &world.whoever).unwrap();
        engine.profile(&task()).unwrap();
        engine.close();
        assert!(vllm.helper.is_none(), "{wrong}: it is of no more use");
    }
    // Between two groups too.
    let world = World::new(&[("FAKE_VLLM", "close:1=die"), ("FAKE_VLLM_ENGINES", "7")]);
    let mut vllm = Vllm::new(world.options.clone());
    let mut engine = vllm.engine(Precision::Bf16, &world.whoever).unwrap();
    expect_true_costs(&engine.profile(&task()).unwrap());
}

#[test]
fn one_that_the_system_kills_is_started_again_with_fewer_engines() {
    if !has_python() {
        return;
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let world = World::new(&[]);
    let once = world.directory.path().join("once");
    for wrong in ["steps:9=die", "open:4=die", "serve:3=out_of_memory"] {
        let mut options = world.options.clone();
        options.variables = [
            ("FAKE_VLLM", wrong),
            ("FAKE_VLLM_ONCE", once.to_str().unwrap()),
            ("FAKE_VLLM_LOG", log.path().to_str().unwrap()),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
        let mut vllm = Vllm::new(options);
        let mut engine = vllm.engine(Precision::Bf16, &world.whoever).unwrap();
        expect_true_costs(&engine.profile(&task()).unwrap());
        assert!(once.exists(), "{wrong}");
        let asked = fs::read_to_string(log.path()).unwrap();
        let started = asked.lines().filter(|line| line.contains("\"hello\"")).count();
        // The third is the parent's: another model's memory is then read in a process of its own.
        assert_eq!(started, 2, "{wrong}");
        fs::remove_file(&once).unwrap();
        fs::write(log.path(), "").unwrap();
    }
}

#[test]
fn fewer_engines_are_open_at_once_where_there_is_no_room_for_all() {
    if !has_python() {
        return;
    }
    let world = World::new(&[("FAKE_VLLM_ENGINES", "4")]);
    expect_true_costs(&world.profile().unwrap());
    let later = World::new(&[("FAKE_VLLM", "steps:9=out_of_memory")]);
    assert!(
        later.profile().is_ok(),
        "also where it shows while they are timed"
    );
    let alone = World::new(&[("FAKE_VLLM_ENGINES", "1")]).profile().unwrap();
    let rounds = alone.parent.measured().unwrap().latency_ms.samples.len();
    assert_eq!(
        rounds,
        task().rounds,
        "where there is room for one engine, the parent is the first"
    );
    assert_eq!(alone.rows.len(), 5 * task().points.len());
    let crate::Error::Vllm(error) = World::new(&[("FAKE_VLLM_ENGINES", "0")]).profile().unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(error.failure_kind(), FailureKind::OutOfMemory, "{error}");
}

#[test]
fn on_a_gpu_rows_are_its_own_time_and_what_the_host_needs_stands_beside_them() {
    if !has_python() {
        return;
    }
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
    if !has_python() {
        return;
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let world = World::new(&[
        ("FAKE_VLLM_CUDA", "1"),
        ("FAKE_VLLM_NOISE", "1"),
        ("FAKE_VLLM_LOG", log.path().to_str().unwrap()),
    ]);
    let mut task = task();
    task.rounds = 7;
    let profiled = world.profile_of(&task).unwrap();
    assert_eq!(profiled.parent.measured().unwrap().latency_ms.samples.len(), 7);
    let asked = fs::read_to_string(log.path()).unwrap();
    let steps = asked.lines().filter(|line| line.contains("\"steps\"")).count();
    // A parent, a short model, and two stacks of each shape: their own times do not scatter and take three rounds.
    assert_eq!(steps, 3 * (2 + 2 * 4) * task.points.len());
}
