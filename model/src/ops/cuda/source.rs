//! The kernels' sources, and what a kernel is compiled for.

use std::collections::BTreeSet;

use super::error::Version;

/// A file of `kernels/`.
#[derive(Debug)]
pub(super) struct File {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(File { name: $name, text: include_str!(concat!("kernels/", $name)) }),*]
    };
}

/// What others include.
pub(super) static HEADERS: &[File] = files![
    "common.cuh",
    "tensor_core.cuh",
    "attention_backward.cuh",
    "warpgroup.cuh",
    "attention_backward_sm90.cuh",
];

static SOURCES: &[File] = files![
    "activation.cu",
    "adamw.cu",
    "argmax.cu",
    "attention_backward_key.cu",
    "attention_backward_key_sm90.cu",
    "attention_backward_query.cu",
    "attention_backward_query_sm90.cu",
    "attention_forward.cu",
    "attention_forward_sm90.cu",
    "columns.cu",
    "decode.cu",
    "elementwise.cu",
    "embedding.cu",
    "loss.cu",
    "matvec.cu",
    "rms_norm.cu",
    "rope.cu",
];

/// The value of a macro.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Value {
    Number(u32),
    Name(&'static str),
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Number(value)
    }
}

impl From<&'static str> for Value {
    fn from(value: &'static str) -> Self {
        Self::Name(value)
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::Name(name) => name.fmt(formatter),
        }
    }
}

/// The most macros that a source has.
const MACROS: usize = 4;

/// A source with its macros: one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Specialisation {
    source: &'static str,
    macros: [Option<(&'static str, Value)>; MACROS],
}

impl Specialisation {
    pub(super) fn new<const N: usize>(source: &'static str, given: [(&'static str, Value); N]) -> Self {
        const { assert!(N <= MACROS) };
        let mut macros = [None; MACROS];
        for (place, one) in macros.iter_mut().zip(given) {
            *place = Some(one);
        }
        Self { source, macros }
    }

    /// The file's name.
    pub(super) fn source(&self) -> &'static str {
        self.source
    }

    /// Whether the file uses what Hopper alone has.
    pub(super) fn is_sm90(&self) -> bool {
        self.source.ends_with("_sm90.cu")
    }

    /// The file's text; none when there is no such file.
    pub(super) fn text(&self) -> Option<&'static str> {
        SOURCES
            .iter()
            .find(|file| file.name == self.source)
            .map(|file| file.text)
    }

    /// The compiler's options on a device of `capability`.
    pub(super) fn options(&self, capability: Version) -> Vec<String> {
        let Version { major, minor } = capability;
        let suffix = if self.is_sm90() { "a" } else { "" };
        let mut options = vec![
            format!("--gpu-architecture=sm_{major}{minor}{suffix}"),
            "--std=c++17".to_owned(),
        ];
        options.extend(
            self.macros
                .iter()
                .flatten()
                .map(|(name, value)| format!("-D{name}={value}")),
        );
        options
    }

    /// What decides the machine code: the text with what it includes, the options, the compiler.
    pub(super) fn key(&self, capability: Version, compiler: Version) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        let mut add = |part: &str| {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        };
        add(&format!("espalier kernel 1, NVRTC {compiler}"));
        for option in self.options(capability) {
            add(&option);
        }
        let text = self.text().unwrap_or_default();
        add(text);
        for header in included(text) {
            add(header.name);
            add(header.text);
        }
        hasher.finalize()
    }
}

impl std::fmt::Display for Specialisation {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.source)?;
        for (name, value) in self.macros.iter().flatten() {
            write!(formatter, " {name}={value}")?;
        }
        Ok(())
    }
}

/// The headers that `text` includes, and those that they include, in the order of [`HEADERS`].
fn included(text: &str) -> Vec<&'static File> {
    let mut wanted = BTreeSet::new();
    let mut unread = vec![text];
    while let Some(text) = unread.pop() {
        for header in HEADERS {
            let line = format!("#include \"{}\"", header.name);
            if text.contains(&line) && wanted.insert(header.name) {
                unread.push(header.text);
            }
        }
    }
    HEADERS
        .iter()
        .filter(|header| wanted.contains(header.name))
        .collect()
}

/// What a kernel takes in one place of its list of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parameter {
    Pointer,
    Long,
    Int,
    Float,
}

/// An entry point: its name and parameters as the source declares them.
pub(super) type Signature = (&'static str, Vec<Parameter>);

/// The entry points of a source.
pub(super) fn signatures(text: &'static str) -> Vec<Signature> {
    text.split("extern \"C\" __global__ void")
        .skip(1)
        .filter_map(signature)
        .collect()
}

/// Of a text that begins after `void`: `__launch_bounds__(..)`, the name, the parameters.
fn signature(text: &'static str) -> Option<Signature> {
    let (_, after_bounds) = text.split_once("__launch_bounds__(")?.1.split_once(')')?;
    let (name, after_name) = after_bounds.split_once('(')?;
    let (parameters, _) = after_name.split_once(')')?;
    let kinds = parameters.split(',').map(|parameter| {
        if parameter.contains('*') {
            Parameter::Pointer
        } else if parameter.contains("long long") {
            Parameter::Long
        } else if parameter.contains("float") {
            Parameter::Float
        } else {
            Parameter::Int
        }
    });
    Some((name.trim(), kinds.collect()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    const HOPPER: Version = Version { major: 9, minor: 0 };

    #[test]
    fn every_file_of_the_folder_is_listed() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ops/cuda/kernels");
        let mut found: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        found.sort();
        let mut listed: Vec<&str> = SOURCES.iter().chain(HEADERS).map(|file| file.name).collect();
        listed.sort_unstable();
        assert_eq!(found, listed);
    }

    #[test]
    fn every_source_has_entry_points_and_every_include_is_ours() {
        for file in SOURCES {
            assert!(!signatures(file.text).is_empty(), "{}", file.name);
        }
        for file in SOURCES.iter().chain(HEADERS) {
            for line in file.text.lines().filter(|line| line.starts_with("#include")) {
                let known = HEADERS
                    .iter()
                    .any(|header| line == format!("#include \"{}\"", header.name));
                assert!(known, "{}: {line}", file.name);
            }
        }
    }

    #[test]
    fn parameters_are_read_from_the_source() {
        let text = Specialisation::new("matvec.cu", []).text().unwrap();
        let (name, parameters) = signatures(text).remove(0);
        assert_eq!(name, "matvec");
        use Parameter::{Float, Int, Long, Pointer};
        assert_eq!(
            parameters,
            [
                Pointer, Long, Pointer, Float, Pointer, Pointer, Long, Pointer, Long, Pointer, Long, Int, Int
            ]
        );
    }

    #[test]
    fn the_key_depends_on_macros_architecture_compiler_and_headers() {
        let compiler = Version { major: 13, minor: 0 };
        let one = Specialisation::new("rope.cu", [("VECTOR", 8.into())]);
        let key = one.key(HOPPER, compiler);
        assert_eq!(key, one.key(HOPPER, compiler));
        assert_ne!(
            key,
            Specialisation::new("rope.cu", [("VECTOR", 1.into())]).key(HOPPER, compiler)
        );
        assert_ne!(key, one.key(Version { major: 8, minor: 0 }, compiler));
        assert_ne!(key, one.key(HOPPER, Version { major: 13, minor: 1 }));
        let names: Vec<&str> = included("#include \"attention_backward_sm90.cuh\"")
            .iter()
            .map(|header| header.name)
            .collect();
        assert_eq!(
            names,
            [
                "common.cuh",
                "tensor_core.cuh",
                "warpgroup.cuh",
                "attention_backward_sm90.cuh"
            ]
        );
    }
}
