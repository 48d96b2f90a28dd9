//! The Python environment that a worker was told of: looked at without importing vLLM, which takes many seconds.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::Error;
use super::error::{TESTED, minor};
use super::group::Group;

/// Prints what of vLLM and of the plugin is there, as one line of JSON, the last.
const LOOK_UP: &str = "
import importlib.metadata as metadata, importlib.util as modules, json
def version(module):
    if modules.find_spec(module) is None:
        return None
    names = metadata.packages_distributions().get(module) or [module]
    try:
        return metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return ''
print(json.dumps({'vllm': version('vllm'), 'plugin': version('espalier_vllm')}))
";
/// Set, it keeps the directory that the worker happens to be started in off the path of modules: that may be a clone of
/// vLLM. Python 3.10 passes it over.
pub(super) const SAFE_PATH: (&str, &str) = ("PYTHONSAFEPATH", "1");
/// An interpreter that has said nothing for this long hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked whether it has.
const LOOK: Duration = Duration::from_millis(20);
/// What it said comes out of the pipe in this time, once it and what it started are gone.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Of what it says.
const MOST_BYTES: u64 = 1 << 20;

/// Where vLLM is, as the worker was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// The Python of an environment that has vLLM and the plugin.
    pub python: PathBuf,
    /// Versions beside those tested that are gone on with, by major and minor number.
    pub trusted: Vec<String>,
}

/// What was found there.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Found {
    vllm: Option<String>,
    plugin: Option<String>,
}

impl Environment {
    /// The same as arguments of a process that is to measure in it.
    pub fn arguments(&self) -> Vec<String> {
        let python = self.python.display().to_string();
        let trusted = self.trusted.iter();
        let trusted = trusted.flat_map(|version| ["--vllm-trust".to_owned(), version.clone()]);
        ["--vllm-python".to_owned(), python]
            .into_iter()
            .chain(trusted)
            .collect()
    }

    /// Whether vLLM and the plugin are there; the version of vLLM.
    ///
    /// # Errors
    /// Which of them is missing, or that the version was neither tested nor trusted.
    pub fn look(&self) -> Result<String, Error> {
        self.look_while(|| Ok(()))
    }

    /// The same, as long as it is not told to stop.
    ///
    /// # Errors
    /// As [`Environment::look`], and those of `goes_on`.
    pub(super) fn look_while<E: From<Error>>(
        &self,
        goes_on: impl Fn() -> Result<(), E>,
    ) -> Result<String, E> {
        let python = || self.python.clone();
        let said = self.ask(goes_on)?.map_err(|reason| Error::NoPython {
            python: python(),
            reason,
        })?;
        let found = said
            .lines()
            .last()
            .and_then(|line| serde_json::from_str::<Found>(line).ok());
        let found = found.ok_or_else(|| Error::NoPython {
            python: python(),
            reason: format!("answers {:?}, which no Python does", first_characters(&said)),
        })?;
        let version = found.vllm.ok_or_else(|| Error::NoVllm {
            python: python(),
            reason: "there is no module vllm: install vLLM there".to_owned(),
        })?;
        if found.plugin.is_none() {
            return Err(Error::NoPlugin { python: python() }.into());
        }
        if !self.is_tested(&version) {
            return Err(Error::Untested { version }.into());
        }
        Ok(version)
    }

    /// Whether the version was tested, or is trusted.
    fn is_tested(&self, version: &str) -> bool {
        let minor = minor(version);
        TESTED.contains(&minor.as_str()) || self.trusted.contains(&minor)
    }

    /// What the interpreter says on its standard output, or why it says nothing of use.
    fn ask<E>(&self, goes_on: impl Fn() -> Result<(), E>) -> Result<Result<String, String>, E> {
        if let Err(reason) = expect_program(&self.python) {
            return Ok(Err(reason));
        }
        let mut command = Command::new(&self.python);
        command
            .args(["-c", LOOK_UP])
            .env(SAFE_PATH.0, SAFE_PATH.1)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut group = match Group::spawn(&mut command) {
            Ok(group) => group,
            Err(error) => return Ok(Err(format!("cannot be started: {error}"))),
        };
        let words = Words::of(group.child().stdout.take());
        let deadline = Instant::now() + PATIENCE;
        while !group.has_ended() {
            goes_on()?;
            if Instant::now() >= deadline {
                return Ok(Err(format!("did not answer within {} s", PATIENCE.as_secs())));
            }
            std::thread::sleep(LOOK);
        }
        // It may be a script that has left somebody behind who holds its output.
        let status = group.kill();
        Ok(match status.and_then(|status| status.code()).unwrap_or(-1) {
            0 => Ok(words.said()),
            code => Err(format!(
                "ended with code {code}, which no Python does when asked what it has"
            )),
        })
    }
}

/// What comes out of a pipe, read by a thread that is not waited for: the pipe's end may never come.
struct Words {
    said: Arc<Mutex<Vec<u8>>>,
    thread: std::thread::JoinHandle<()>,
}

impl Words {
    fn of(output: Option<ChildStdout>) -> Self {
        let said = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&said);
        let thread = std::thread::spawn(move || {
            let mut output = output.map(|output| output.take(MOST_BYTES));
            let mut bytes = [0; 4096];
            while let Some(Ok(length @ 1..)) = output.as_mut().map(|output| output.read(&mut bytes)) {
                let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                heard.extend(bytes.iter().take(length));
            }
        });
        Self { said, thread }
    }

    /// All that was said, where its end comes soon.
    fn said(self) -> String {
        let deadline = Instant::now() + LAST_WORDS;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&said).into_owned()
    }
}

/// A clearer word than the system's for what cannot be a program.
pub(super) fn expect_program(path: &Path) -> Result<(), String> {
    // A bare name is looked for on the path by the system.
    if path.components().count() < 2 {
        return Ok(());
    }
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err("is a directory".to_owned()),
        Ok(_) => Ok(()),
        Err(error) => Err(format!("cannot be used: {error}")),
    }
}

fn first_characters(text: &str) -> String {
    text.chars().take(80).collect()
}
