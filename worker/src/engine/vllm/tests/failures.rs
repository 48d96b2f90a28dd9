//! What goes wrong in the middle of work: one error of its kind, in time, and nothing left behind.

use super::*;

#[test]
fn whatever_goes_wrong_in_the_middle_of_a_profile_is_one_error_of_its_kind() {
    if !has_python() {
        return;
    }
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
        (
            "steps:5=closed",
            Kind::Crashed,
            "ended its answers, not itself, while it was asked to time steps",
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
        let error = World::new(&[("FAKE_VLLM", wrong)]).fails();
        let said = error.to_string();
        assert_eq!(error.failure_kind(), kind, "{wrong}: {said}");
        assert!(said.contains(part), "{wrong}: {said}");
        assert!(!said.contains('\n'), "{wrong}: {said}");
    }
}

#[test]
fn a_process_that_hangs_or_only_says_that_it_lives_is_killed_at_its_deadline() {
    if !has_python() {
        return;
    }
    for wrong in ["steps:5=hang", "steps:5=stall", "open:2=hang"] {
        let world = World::new(&[("FAKE_VLLM", wrong)]).patient_for(Duration::from_secs(2));
        let error = world.fails();
        assert_eq!(error.failure_kind(), FailureKind::Hung, "{wrong}: {error}");
        assert!(
            error.to_string().contains("came no further for"),
            "{wrong}: {error}"
        );
    }
    // One that does nothing at all is not waited for as long as one that may be at work.
    let mut idle = World::new(&[("FAKE_VLLM", "steps:5=stall")]);
    let patient = Duration::from_secs(600);
    idle.options.deadlines = Deadlines {
        hello: patient,
        open: patient,
        work: patient,
        idle: Duration::from_secs(3),
    };
    let error = idle.fails();
    assert_eq!(error.failure_kind(), FailureKind::Hung, "{error}");
    assert!(error.to_string().contains("no further for 3 s"), "{error}");
}

#[test]
fn output_of_any_amount_holds_nobody_up() {
    if !has_python() {
        return;
    }
    let world = World::new(&[("FAKE_VLLM", "steps:2=flood")]);
    assert!(world.profile().is_ok());
}

#[test]
fn a_stop_is_heeded_while_the_process_hangs_and_leaves_none_behind() {
    if !has_python() {
        return;
    }
    let world = World::new(&[("FAKE_VLLM", "hello=hang")]);
    world.whoever.stops_after.set(1);
    let mut vllm = Vllm::new(world.options.clone());
    assert!(matches!(
        vllm.engine(Precision::Bf16, &world.whoever).map(|_| ()),
        Err(crate::Error::Cancelled)
    ));
    expect_nobody_of(world.directory.path());
}

#[test]
fn an_error_leaves_no_process_behind_not_even_a_child_of_its_own() {
    if !has_python() {
        return;
    }
    let mark = tempfile::tempdir().unwrap();
    let wrong = "steps:2=orphan,steps:4=garbage";
    let world = World::new(&[("FAKE_VLLM", wrong), ("FAKE_MARK", mark.path().to_str().unwrap())]);
    world.profile().unwrap_err();
    expect_nobody_of(mark.path());
}

#[test]
fn what_it_wrote_in_passing_goes_with_it_and_what_it_compiled_stays() {
    if !has_python() {
        return;
    }
    let says = tempfile::NamedTempFile::new().unwrap();
    let world = World::new(&[
        ("FAKE_VLLM", "steps:2=litter,steps:4=garbage"),
        ("FAKE_VLLM_LITTER", says.path().to_str().unwrap()),
    ]);
    world.profile().unwrap_err();
    let passing = fs::read_to_string(says.path()).unwrap();
    assert!(passing.contains("espalier-vllm-"), "{passing}");
    assert!(!Path::new(&passing).exists());
    assert!(world.directory.path().join("rooms/0/vllm").is_dir());
}

#[test]
fn one_that_died_while_nothing_was_asked_of_it_costs_the_next_task_nothing() {
    if !has_python() {
        return;
    }
    let world = World::new(&[("FAKE_VLLM_CUDA", "1")]);
    let mut vllm = Vllm::new(world.options.clone());
    let engine = vllm.engine(Precision::Bf16, &world.whoever).unwrap();
    engine.close();
    vllm.helper.as_mut().unwrap().end();
    let mut engine = vllm.engine(Precision::Bf16, &world.whoever).unwrap();
    engine.profile(&task()).unwrap();
    assert!(engine.helper.is_idle());
}

/// Waits for the end of those that were killed and nobody waited for.
fn expect_nobody_of(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while processes_of(path) > 0 {
        assert!(Instant::now() < deadline, "{} are left", processes_of(path));
        std::thread::sleep(Duration::from_millis(10));
    }
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
