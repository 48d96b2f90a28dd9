//! What goes wrong in the middle of work: one error of its kind, in time, and nothing left behind.

use super::*;

#[test]
fn whatever_goes_wrong_in_the_middle_of_a_profile_is_one_error_of_its_kind() {
    use FailureKind as Kind;
    for (wrong, kind, part) in [
        (
            "steps:5=die",
            Kind::Crashed,
            "of signal 9 while it was asked to time steps",
        ),
        (
            "steps:5=exit",
            Kind::Crashed,
            "with code 1 while it was asked to time steps; its last line: RuntimeError: fell over",
        ),
        ("open:2=half", Kind::Error, "came where an answer was expected"),
        (
            "steps:5=garbage",
            Kind::Error,
            "came where an answer was expected",
        ),
        (
            "steps:3=long_line",
            Kind::Error,
            "came where an answer was expected",
        ),
        ("steps:5=wrong_id", Kind::Error, "it answered request"),
        ("steps:5=twice", Kind::Error, "it answered request"),
        ("steps:5=nothing", Kind::Error, "is none"),
        ("steps:5=unsupported", Kind::Invalid, "vLLM cannot run this"),
        ("open=invalid", Kind::Invalid, "vLLM cannot run this"),
        ("steps:5=engine", Kind::Error, "vLLM failed"),
        ("steps:5=fatal", Kind::Error, "illegal memory access"),
        ("open=busy", Kind::OutOfMemory, "busy with other work"),
        ("hello=no_vllm", Kind::Error, "--vllm-python"),
        ("hello=version", Kind::Error, "--vllm-python"),
        ("hello=protocol", Kind::Error, "protocol"),
        ("start=exit", Kind::Crashed, "while it was asked to start"),
    ] {
        let error = World::fails(wrong);
        let said = error.to_string();
        assert_eq!(error.failure_kind(), kind, "{wrong}: {said}");
        assert!(said.contains(part), "{wrong}: {said}");
        assert!(!said.contains('\n'), "{wrong}: {said}");
    }
}

#[test]
fn a_process_that_hangs_or_only_says_that_it_lives_is_killed_at_its_deadline() {
    for wrong in ["steps:5=hang", "steps:5=stall", "open:2=hang"] {
        let began = Instant::now();
        let error = World::fails(wrong);
        assert_eq!(error.failure_kind(), FailureKind::Hung, "{wrong}: {error}");
        assert!(
            error.to_string().contains("came no further for"),
            "{wrong}: {error}"
        );
        assert!(began.elapsed() < Duration::from_secs(60), "{wrong}");
    }
    let slow = World::new(&[("FAKE_VLLM", "steps:5=slow")]);
    assert!(
        slow.profile().is_ok(),
        "one that takes longer but gets further is waited for"
    );
}

#[test]
fn output_of_any_amount_holds_nobody_up() {
    let world = World::new(&[("FAKE_VLLM", "steps:2=flood")]);
    assert!(world.profile().is_ok());
}

#[test]
fn a_first_step_has_as_long_as_an_engine_to_open_and_later_ones_follow_the_longest() {
    let patient = Deadlines::default();
    assert_eq!(patient.timing(None), Duration::from_secs(600));
    let longest = Some(Duration::from_secs(88));
    assert_eq!(patient.timing(longest), Duration::from_secs(60 + 50 * 88));
}

#[test]
fn a_stop_is_heeded_while_the_process_hangs_and_leaves_none_behind() {
    let world = World::new(&[("FAKE_VLLM", "hello=hang")]);
    world.whoever.stops_after.set(1);
    let mut vllm = Vllm::new(VllmOptions {
        deadlines: Deadlines::default(),
        ..world.options.clone()
    });
    let began = Instant::now();
    assert!(matches!(
        vllm.engine(Precision::Bf16, &world.whoever).map(|_| ()),
        Err(crate::Error::Cancelled)
    ));
    assert!(began.elapsed() < Duration::from_secs(30));
    assert_eq!(processes_of(world.directory.path()), 0);
}

#[test]
fn an_error_leaves_no_process_behind_not_even_a_child_of_its_own() {
    let mark = tempfile::tempdir().unwrap();
    let wrong = "steps:2=orphan,steps:4=garbage";
    let world = World::new(&[("FAKE_VLLM", wrong), ("FAKE_MARK", mark.path().to_str().unwrap())]);
    world.profile().unwrap_err();
    assert_eq!(processes_of(mark.path()), 0);
}

/// Processes that have the path in their environment or command line.
fn processes_of(path: &Path) -> usize {
    let path = path.to_str().unwrap().as_bytes().to_vec();
    let is_of = |process: &fs::DirEntry| {
        ["environ", "cmdline"].iter().any(|file| {
            let text = fs::read(process.path().join(file)).unwrap_or_default();
            text.windows(path.len()).any(|window| window == path)
        })
    };
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|process| process.file_name().to_str().is_some_and(|name| name != own))
        .filter(is_of)
        .count()
}
