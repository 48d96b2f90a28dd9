//! The Python that a worker was told of, and the device that its vLLM is for.

use super::*;

#[test]
fn a_vllm_made_for_another_kind_of_device_measures_nothing() {
    if !has_python() {
        return;
    }
    for (fake, wanted, says) in [
        ("0", "cuda", "runs on cpu and the task's device is cuda"),
        ("1", "cpu", "runs on cuda and the task's device is cpu"),
    ] {
        let mut world = World::new(&[("FAKE_VLLM_CUDA", fake)]);
        world.options.platform = Some(wanted);
        let refused = world.profile().unwrap_err();
        assert!(refused.to_string().contains(says), "{refused}");
        world.options.platform = Some(if wanted == "cpu" { "cuda" } else { "cpu" });
        world.profile().unwrap();
    }
}

#[test]
fn an_environment_that_lacks_something_is_told_in_one_line_before_anything_is_started() {
    let directory = tempfile::tempdir().unwrap();
    let look = |python: PathBuf, trusted: &[&str]| {
        let trusted = trusted.iter().map(|version| (*version).to_owned()).collect();
        Environment { python, trusted }.look()
    };
    let found = |found: &str| python(directory.path(), found);
    let said = |looked: std::result::Result<String, Error>| looked.unwrap_err().to_string();
    assert_eq!(look(found(BOTH), &[]), Ok("0.32.0".to_owned()));
    let path = directory.path().join("nowhere/python");
    assert!(said(look(path, &[])).contains("cannot be used: No such file"));
    assert!(said(look(directory.path().to_owned(), &[])).contains("is a directory"));
    let plain = directory.path().join("plain");
    fs::write(&plain, "text").unwrap();
    assert!(said(look(plain, &[])).contains("cannot be started"));
    let other = script(directory.path(), "other", "echo hello");
    assert!(said(look(other, &[])).contains("answers \"hello\\n\", which no Python does"));
    let failing = script(directory.path(), "failing", "exit 3");
    assert!(said(look(failing, &[])).contains("ended with code 3"));
    assert!(said(look(found(r#"{"vllm": null, "plugin": null}"#), &[])).contains("there is no module vllm"));
    assert!(said(look(found(r#"{"vllm": "0.32.0", "plugin": null}"#), &[])).contains("plugin espalier_vllm"));
    let newer = r#"{"vllm": "0.40.1", "plugin": "0.1.0"}"#;
    let refused = said(look(found(newer), &["0.33"]));
    for part in ["0.40.1 was not tested", "0.26 and 0.32", "--vllm-trust 0.40"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(look(found(newer), &["0.40"]), Ok("0.40.1".to_owned()));
}

#[test]
fn a_script_that_leaves_somebody_behind_or_hangs_holds_nobody_up() {
    let directory = tempfile::tempdir().unwrap();
    let look = |name: &str, text: &str, goes_on: &dyn Fn() -> Result<()>| {
        let environment = Environment {
            python: script(directory.path(), name, text),
            trusted: Vec::new(),
        };
        environment.look_while(goes_on)
    };
    let began = Instant::now();
    // Both have its output; the second is in another session.
    let left_behind = directory.path().join("left");
    let elsewhere = format!("setsid sleep 900 & echo $! > '{}'", left_behind.display());
    for left in ["sleep 900 &", &elsewhere] {
        let found = look("leaves", &format!("{left}\necho '{BOTH}'"), &|| Ok(()));
        assert_eq!(found.unwrap(), "0.32.0", "{left}");
    }
    let stopped = look("hangs", "sleep 900; true", &|| Err(crate::Error::Cancelled));
    assert!(matches!(stopped, Err(crate::Error::Cancelled)), "{stopped:?}");
    assert!(
        began.elapsed() < Duration::from_secs(600),
        "a sleep was waited for"
    );
    let left_behind = fs::read_to_string(left_behind).unwrap();
    // SAFETY: kill touches no memory; the script started it a moment ago and it sleeps yet.
    assert_eq!(
        unsafe { libc::kill(left_behind.trim().parse().unwrap(), libc::SIGKILL) },
        0
    );
}

#[test]
fn neither_the_look_nor_vllm_takes_modules_from_where_the_worker_was_started() {
    let mut world = World::new(&[]);
    let python = &mut world.options.environment.as_mut().unwrap().python;
    let text = format!(
        "[ \"$PYTHONSAFEPATH\" = 1 ] || exit 9; exec '{}' \"$@\"",
        python.display()
    );
    *python = script(world.directory.path(), "careful", &text);
    world.profile().unwrap();
}

#[test]
fn the_python_that_this_machine_has_is_understood_by_what_it_prints() {
    if !has_python() {
        return;
    }
    let environment = Environment {
        python: PathBuf::from("python3"),
        trusted: Vec::new(),
    };
    match environment.look() {
        Ok(_) | Err(Error::NoVllm { .. } | Error::NoPlugin { .. } | Error::Untested { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_worker_without_vllm_says_how_to_start_one_with_it() {
    let whoever = Whoever::default();
    let error = Vllm::default()
        .engine(Precision::Bf16, &whoever)
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("--vllm-python"), "{error}");
}
