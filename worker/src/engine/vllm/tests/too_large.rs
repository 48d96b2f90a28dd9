//! Parents without room: what is measured without them, and that nothing stays open.

use super::profile::true_cost;
use super::*;

/// What the fake holds of a model under the workload.
fn held_bytes(architecture: &Architecture) -> u64 {
    held_in_pages(architecture, 32)
}

/// The same in pages of so many tokens.
fn held_in_pages(architecture: &Architecture, tokens: usize) -> u64 {
    let load = models::Load::of(&WORKLOAD, WORKLOAD.concurrency, 1);
    architecture.weight_bytes(Precision::Bf16) + load.kv_bytes(architecture, Precision::Bf16, tokens)
}

/// The verbs that open and close, in the order they were asked.
fn verbs_of(log: &Path) -> Vec<&'static str> {
    let requests = fs::read_to_string(log).unwrap();
    let verbs = requests.lines().filter_map(|line| {
        let mut verbs = ["hello", "open", "close"].into_iter();
        verbs.find(|verb| line.contains(&format!("\"{verb}\"")))
    });
    verbs.collect()
}

#[test]
fn a_parent_without_room_leaves_rows_and_what_the_engine_needs() {
    if !has_python() {
        return;
    }
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("requests");
    // Deeper than any stack, which the fake's cache of 1 MiB bounds.
    let mut deep = parent();
    for layer in 3..200 {
        let shapes = [attention(2), mlp(512)];
        deep.blocks.extend(shapes.map(|shape| Block { layer, shape }));
    }
    let asked = Profile {
        architecture: deep.clone(),
        ..task()
    };
    let fits = (held_bytes(&deep) * 9 / 10).to_string();
    let world = World::new(&[
        ("FAKE_VLLM_MEMORY", &fits),
        ("FAKE_VLLM_LOG", path.to_str().unwrap()),
    ]);
    let profiled = world.profile_of(&asked).unwrap();
    let shortage = profiled.parent.shortage().unwrap();
    assert_eq!(shortage.needed_bytes, held_bytes(&deep));
    assert_eq!(profiled.rows.len(), 5 * task().points.len());
    for row in &profiled.rows {
        let expected = true_cost(&row.subject, row.point);
        assert!(
            (row.median_ms - expected).abs() < 0.02 * expected + 0.002,
            "{row:?}"
        );
    }
    let whole = World::new(&[]).profile().unwrap();
    assert_eq!(
        profiled.memory.unwrap().block_tokens,
        whole.memory.unwrap().block_tokens
    );
    assert_eq!(
        verbs_of(&path)[..5],
        ["hello", "open", "hello", "open", "close"],
        "what shows the engine's needs is in a process of its own, and makes room"
    );
}

#[test]
fn on_a_processor_memory_is_read_where_no_model_was_before() {
    let mut smaller = parent();
    smaller.blocks.truncate(3);
    for (cuda, page, last) in [
        ("0", 32, &["close", "hello", "open"][..]),
        ("1", 16, &["close", "open"]),
    ] {
        // There is room for either, not for both; the fake has no norms, which are a few kilobytes.
        let both = held_in_pages(&parent(), page) + held_in_pages(&smaller, page);
        let fits = (both - 4096).to_string();
        let log = tempfile::NamedTempFile::new().unwrap();
        let world = World::new(&[
            ("FAKE_VLLM_MEMORY", &fits),
            ("FAKE_VLLM_CUDA", cuda),
            ("FAKE_VLLM_LOG", log.path().to_str().unwrap()),
        ]);
        assert!(world.pair(None).unwrap().parent.shortage().is_some());
        assert_eq!(verbs_of(log.path()), [&["hello", "open", "open"], last].concat());
    }
}

#[test]
fn the_next_task_finds_the_process_and_on_a_processor_opens_its_models_in_another() {
    if !has_python() {
        return;
    }
    for (cuda, between) in [("0", &["hello"][..]), ("1", &[])] {
        let log = tempfile::NamedTempFile::new().unwrap();
        let world = World::new(&[
            ("FAKE_VLLM_CUDA", cuda),
            ("FAKE_VLLM_LOG", log.path().to_str().unwrap()),
        ]);
        let mut vllm = Vllm::new(world.options.clone());
        for _ in 0..2 {
            let mut engine = vllm.engine(Precision::Bf16, &world.whoever).unwrap();
            let opened = engine.open(&Subject::Shape(&parent()), &WORKLOAD, WORKLOAD.concurrency);
            opened.unwrap();
            engine.close();
        }
        let expected = [&["hello", "open", "close"][..], between, &["open", "close"]].concat();
        assert_eq!(verbs_of(log.path()), expected);
    }
}

#[test]
fn a_model_that_takes_its_process_with_it_leaves_others_one() {
    for (cuda, wrong) in ["0", "1"]
        .into_iter()
        .flat_map(|cuda| [(cuda, "open:1=killed"), (cuda, "open:2=killed")])
    {
        let says = format!("{wrong}, {cuda} GPUs");
        let once = tempfile::tempdir().unwrap();
        let once = once.path().join("once");
        let world = World::new(&[
            ("FAKE_VLLM", wrong),
            ("FAKE_VLLM_CUDA", cuda),
            ("FAKE_VLLM_ONCE", once.to_str().unwrap()),
        ]);
        let pair = world.pair(None).expect(&says);
        assert!(pair.parent.shortage().is_some(), "{says}");
        assert_eq!(pair.candidate.latency_ms.samples.len(), 4, "{says}");
    }
    let once = tempfile::tempdir().unwrap();
    let once = once.path().join("once");
    let world = World::new(&[
        ("FAKE_VLLM", "open:1=killed"),
        ("FAKE_VLLM_ONCE", once.to_str().unwrap()),
    ]);
    let profiled = world.profile().unwrap();
    assert!(profiled.parent.shortage().is_some() && profiled.memory.is_some());
}

#[test]
fn a_candidate_is_served_alone_where_the_parent_has_no_room_or_none_beside_it() {
    if !has_python() {
        return;
    }
    let smaller = smaller_than(&parent());
    let both = held_bytes(&parent()) + held_bytes(&smaller);
    // The fake has no norms, which are a few kilobytes.
    for (fits, says) in [
        (held_bytes(&parent()) - 4096, "out of memory in fact"),
        (both - 4096, "not beside the candidate"),
    ] {
        let pair = World::new(&[("FAKE_VLLM_MEMORY", &fits.to_string())])
            .pair(None)
            .unwrap();
        let shortage = pair.parent.shortage().expect(says);
        assert_eq!(shortage.needed_bytes, held_bytes(&parent()), "{says}");
        assert_eq!(pair.candidate.latency_ms.samples.len(), 4, "{says}");
    }
    let fits = both.to_string();
    let pair = World::new(&[("FAKE_VLLM_MEMORY", &fits)]).pair(None).unwrap();
    assert!(pair.parent.measured().is_some());
    // Somebody else's memory may be given back.
    let busy = World::new(&[("FAKE_VLLM", "open=busy")]).pair(None).unwrap_err();
    assert!(matches!(busy, crate::Error::Vllm(Error::Busy { .. })), "{busy}");
}

#[test]
fn what_is_counted_not_to_fit_is_not_tried() {
    if !has_python() {
        return;
    }
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("requests");
    let world = World::new(&[("FAKE_VLLM_LOG", path.to_str().unwrap()), ("FAKE_VLLM_CUDA", "1")]);
    let mut vllm = Vllm::new(world.options.clone());
    let mut engine = vllm.engine(Precision::Bf16, &world.whoever).unwrap();
    let mut vast = parent();
    // The fake's device has 8 GiB.
    vast.blocks.extend((3..12).map(|layer| Block {
        layer,
        shape: mlp(2 << 20),
    }));
    let opened = engine
        .open_where_it_fits(&Subject::Shape(&vast), &WORKLOAD, WORKLOAD.concurrency)
        .unwrap();
    let shortage = opened.unwrap_err();
    assert!(
        shortage.needed_bytes > 8 << 30 && shortage.free_bytes == 8 << 30,
        "{shortage}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap().matches("\"open\"").count(), 0);
}
