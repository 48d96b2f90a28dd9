//! Repositories of a hub: which files a parent needs, fetched into the usual cache.
//!
//! Honours `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME` as Hugging Face's own tools do. Weights are fetched as
//! safetensors; a GGUF file is fetched when the source names it.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use super::HUB_PREFIX;
use crate::{Error, Result};

/// Times a broken download is tried again.
const RETRIES: usize = 3;
const NO_DIRECTORY: &str = "the cached config.json lies in no directory";

/// Where the hub is and what it is asked with.
#[derive(Debug, Clone, Default)]
struct Settings {
    endpoint: Option<String>,
    token: Option<String>,
    home: Option<PathBuf>,
}

/// What a source names, `org/name[/file.gguf][@revision]`.
#[derive(Debug, PartialEq, Eq)]
struct Source {
    repository: String,
    file: Option<String>,
    revision: String,
}

/// Fetches what a parent needs of `org/name[/file.gguf][@revision]`; the directory, or the GGUF file.
pub fn fetch(source: &str) -> Result<PathBuf> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let settings = Settings {
        endpoint: variable("HF_ENDPOINT"),
        token: variable("HF_TOKEN"),
        home: variable("HF_HOME").map(PathBuf::from),
    };
    fetch_with(source, &settings)
}

fn fetch_with(source: &str, settings: &Settings) -> Result<PathBuf> {
    let wrong = |reason: String| Error::Hub {
        source_name: format!("{HUB_PREFIX}{source}"),
        reason,
    };
    let parsed = parse(source).map_err(wrong)?;
    let cache = settings
        .home
        .as_ref()
        .map_or_else(Cache::default, |home| Cache::new(home.join("hub")));
    let mut builder = ApiBuilder::from_cache(cache.clone())
        .with_progress(false)
        .with_retries(RETRIES);
    if let Some(endpoint) = &settings.endpoint {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
    }
    if settings.token.is_some() {
        builder = builder.with_token(settings.token.clone());
    }
    let api = builder.build().map_err(|error| wrong(error.to_string()))?;
    let at =
        |revision: &str| Repo::with_revision(parsed.repository.clone(), RepoType::Model, revision.to_owned());
    let (files, commit) = match listing(&api.repo(at(&parsed.revision))) {
        Ok(listing) => listing,
        Err(reason) => {
            let cached = cache
                .repo(at(&parsed.revision))
                .get(parsed.file.as_deref().unwrap_or("config.json"));
            let Some(cached) = cached else {
                return Err(wrong(reason));
            };
            tracing::warn!(
                source,
                reason,
                "the hub is out of reach, using what was fetched before"
            );
            return location(cached, &parsed).ok_or_else(|| wrong(NO_DIRECTORY.to_owned()));
        }
    };
    // Every file of one commit, even when the branch moves meanwhile.
    let repository = api.repo(at(&commit));
    let get = |file: &str| {
        repository
            .get(file)
            .map_err(|error| wrong(format!("cannot fetch {file}: {error}")))
    };
    let found = match &parsed.file {
        Some(file) => get(file)?,
        None => {
            let needed = needed_files(&files).map_err(wrong)?;
            for file in needed {
                get(file)?;
            }
            get("config.json")?
        }
    };
    if let Err(error) = cache.repo(at(&parsed.revision)).create_ref(&commit) {
        tracing::warn!(source, %error, "cannot note the revision in the cache: it will not be found offline");
    }
    location(found, &parsed).ok_or_else(|| wrong(NO_DIRECTORY.to_owned()))
}

/// The GGUF file itself, or the directory of a config.
fn location(found: PathBuf, source: &Source) -> Option<PathBuf> {
    if source.file.is_some() {
        Some(found)
    } else {
        found.parent().map(Path::to_owned)
    }
}

fn listing(repository: &ApiRepo) -> std::result::Result<(Vec<String>, String), String> {
    let info = repository.info().map_err(|error| {
        format!(
            "the hub does not give its files: {error} (is the name right, and HF_TOKEN set if it is gated?)"
        )
    })?;
    Ok((
        info.siblings
            .into_iter()
            .map(|sibling| sibling.rfilename)
            .collect(),
        info.sha,
    ))
}

/// Files at the top of the repository that a parent is made of.
fn needed_files(files: &[String]) -> std::result::Result<Vec<&str>, String> {
    let wanted = |name: &str| {
        let ending = [".safetensors", ".json", ".jinja", ".model"]
            .iter()
            .any(|ending| name.ends_with(ending));
        let named = ["merges.txt", "LICENSE", "LICENSE.txt", "NOTICE"].contains(&name);
        !name.contains('/') && name != "config.json" && (ending || named)
    };
    if !files.iter().any(|name| name == "config.json") {
        let gguf: Vec<&str> = files
            .iter()
            .map(String::as_str)
            .filter(|name| name.ends_with(".gguf"))
            .take(3)
            .collect();
        return Err(match gguf.first() {
            Some(first) => format!("no config.json; to use one of its GGUF files, name it: …/{first}"),
            None => "no config.json in the repository, expected a model in transformers' layout".to_owned(),
        });
    }
    let needed: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|name| wanted(name))
        .collect();
    if !needed.iter().any(|name| name.ends_with(".safetensors")) {
        return Err("no .safetensors at the top of the repository, expected the weights there".to_owned());
    }
    Ok(needed)
}

fn parse(source: &str) -> std::result::Result<Source, String> {
    let expected = "expected hf://org/name, hf://org/name@revision or hf://org/name/file.gguf";
    let (path, revision) = match source.split_once('@') {
        Some((path, revision)) => (path, revision),
        None => (source, "main"),
    };
    let mut parts = path.splitn(3, '/');
    let (Some(org), Some(name)) = (parts.next(), parts.next()) else {
        return Err(expected.to_owned());
    };
    let file = parts.next();
    let plain = |text: &str| {
        !text.is_empty()
            && !text.starts_with('.')
            && text
                .chars()
                .all(|character| character.is_ascii_alphanumeric() || "._-".contains(character))
    };
    let file_fits = file.is_none_or(|file| file.ends_with(".gguf") && file.split('/').all(plain));
    if !plain(org) || !plain(name) || !file_fits || !revision.split('/').all(plain) {
        return Err(expected.to_owned());
    }
    Ok(Source {
        repository: format!("{org}/{name}"),
        file: file.map(str::to_owned),
        revision: revision.to_owned(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const COMMIT: &str = "1111111111111111111111111111111111111111";

    /// A hub with one repository, `org/name`, that wants the token `secret`. It serves until the test ends.
    fn hub(files: &[(&str, &str)]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files: BTreeMap<String, String> = files
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(stream, &files);
            }
        });
        endpoint
    }

    fn answer(mut stream: TcpStream, files: &BTreeMap<String, String>) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let path = lines
            .next()
            .unwrap()
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .to_owned();
        let headers: Vec<String> = lines
            .map_while(|line| line.ok().filter(|line| !line.is_empty()))
            .map(|line| line.to_lowercase())
            .collect();
        let mut reply = |status: &str, extra: &str, body: &str| {
            let length = body.len();
            let head =
                format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{extra}\r\n");
            stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        };
        if !headers
            .iter()
            .any(|header| header == "authorization: bearer secret")
        {
            return reply("401 Unauthorized", "", "");
        }
        if path == "/api/models/org/name/revision/main" {
            let siblings: Vec<_> = files
                .keys()
                .map(|name| serde_json::json!({"rfilename": name}))
                .collect();
            return reply(
                "200 OK",
                "",
                &serde_json::json!({"siblings": siblings, "sha": COMMIT}).to_string(),
            );
        }
        let name = path
            .strip_prefix(&format!("/org/name/resolve/{COMMIT}/"))
            .unwrap_or_default();
        let Some(text) = files.get(name) else {
            return reply("404 Not Found", "", "");
        };
        let probe = headers.iter().any(|header| header == "range: bytes=0-0");
        let extra = format!(
            "ETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes 0-0/{}\r\n",
            blake3::hash(text.as_bytes()).to_hex(),
            text.len()
        );
        reply(
            "206 Partial Content",
            &extra,
            if probe { &text[..1] } else { text },
        )
    }

    fn settings(endpoint: &str, home: &Path, token: Option<&str>) -> Settings {
        Settings {
            endpoint: Some(endpoint.to_owned()),
            token: token.map(str::to_owned),
            home: Some(home.to_owned()),
        }
    }

    #[test]
    fn a_repository_is_fetched_whole_but_for_what_a_parent_does_not_need() {
        let endpoint = hub(&[
            ("config.json", "{}"),
            ("model.safetensors", "weights"),
            ("tokenizer.json", "tokens"),
            ("README.md", "read me"),
            ("onnx/model.onnx", "no"),
        ]);
        let home = tempfile::tempdir().unwrap();
        let settings = settings(&endpoint, home.path(), Some("secret"));
        let directory = fetch_with("org/name", &settings).unwrap();
        let mut names: Vec<_> = std::fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
        assert_eq!(
            std::fs::read_to_string(directory.join("model.safetensors")).unwrap(),
            "weights"
        );

        let unreachable = Settings {
            endpoint: Some("http://127.0.0.1:9".to_owned()),
            ..settings
        };
        assert_eq!(
            fetch_with("org/name", &unreachable).unwrap(),
            directory,
            "the cache serves offline"
        );
    }

    #[test]
    fn a_repository_without_access_or_without_weights_says_what_to_do() {
        let endpoint = hub(&[("config.json", "{}"), ("pytorch_model.bin", "pickle")]);
        let home = tempfile::tempdir().unwrap();
        let refused = fetch_with("org/name", &settings(&endpoint, home.path(), None))
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("hf://org/name") && refused.contains("HF_TOKEN"),
            "{refused}"
        );
        let empty = fetch_with("org/name", &settings(&endpoint, home.path(), Some("secret")))
            .unwrap_err()
            .to_string();
        assert!(empty.contains(".safetensors"), "{empty}");
    }

    #[test]
    fn a_gguf_file_of_a_repository_is_fetched_by_name() {
        let endpoint = hub(&[("model-q4.gguf", "GGUF"), ("model-q8.gguf", "GGUF8")]);
        let home = tempfile::tempdir().unwrap();
        let settings = settings(&endpoint, home.path(), Some("secret"));
        let file = fetch_with("org/name/model-q8.gguf", &settings).unwrap();
        assert_eq!(std::fs::read_to_string(file).unwrap(), "GGUF8");
        let unnamed = fetch_with("org/name", &settings).unwrap_err().to_string();
        assert!(unnamed.contains("model-q4.gguf"), "{unnamed}");
    }

    #[test]
    fn a_source_that_could_leave_the_cache_or_names_no_repository_is_refused() {
        for bad in [
            "name",
            "org/",
            "../etc/x",
            "org/../x.gguf",
            "org/name/weights.bin",
            "org/name@",
            "o rg/name",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let parsed = parse("org/name@refs/pr/3").unwrap();
        assert_eq!(
            (parsed.repository.as_str(), parsed.revision.as_str()),
            ("org/name", "refs/pr/3")
        );
    }
}
