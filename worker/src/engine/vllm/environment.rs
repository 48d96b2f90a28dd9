//! The Python environment that a worker was told of: looked at without importing vLLM, which takes many seconds.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::Error;
use super::error::{TESTED, minor};

/// Prints what of vLLM and of the plugin is there, as one line of JSON, the last.
const LOOK: &str = "
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
/// An interpreter that has said nothing for this long hangs.
const PATIENCE: Duration = Duration::from_secs(60);
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
        let python = || self.python.clone();
        let said = self.ask().map_err(|reason| Error::NoPython {
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
            return Err(Error::NoPlugin { python: python() });
        }
        if !self.is_tested(&version) {
            return Err(Error::Untested { version });
        }
        Ok(version)
    }

    /// Whether the version was tested, or is trusted.
    fn is_tested(&self, version: &str) -> bool {
        let minor = minor(version);
        TESTED.contains(&minor.as_str()) || self.trusted.contains(&minor)
    }

    /// What the interpreter says on its standard output.
    fn ask(&self) -> Result<String, String> {
        expect_program(&self.python)?;
        let mut child = Command::new(&self.python)
            .args(["-c", LOOK])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("cannot be started: {error}"))?;
        let output = child.stdout.take();
        let reader = std::thread::spawn(move || {
            let mut said = String::new();
            if let Some(output) = output {
                // What is no text is no answer either.
                let _ = output.take(MOST_BYTES).read_to_string(&mut said);
            }
            said
        });
        let ended = wait(&mut child);
        let said = reader.join().unwrap_or_default();
        match ended? {
            0 => Ok(said),
            code => Err(format!(
                "ended with code {code}, which no Python does when asked what it has"
            )),
        }
    }
}

/// The exit code; a child that does not end is killed.
fn wait(child: &mut Child) -> Result<i32, String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status.code().unwrap_or(-1)),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("did not answer within {} s", PATIENCE.as_secs()));
            }
            Err(error) => return Err(format!("cannot be waited for: {error}")),
        }
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
