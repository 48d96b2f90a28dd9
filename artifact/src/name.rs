//! Names of artifacts, and how they follow from content.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::str::FromStr;

use crate::{Error, Result};

/// An artifact's name: 64 lower-case hexadecimal digits, the BLAKE3 of its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

impl Name {
    /// The name that `bytes` have.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).to_hex().to_string())
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn from_hash(hash: blake3::Hash) -> Self {
        Self(hash.to_hex().to_string())
    }

    /// Where the artifact lies below the store's root: two digits fan out to 256 directories.
    pub(crate) fn key(&self) -> String {
        let fan = self.0.get(..2).unwrap_or_default();
        format!("{fan}/{}", self.0)
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let valid = name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if !valid {
            return Err(Error::Name {
                name: name.to_owned(),
            });
        }
        Ok(Self(name.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The name that a file's content has; reads it in pieces.
///
/// # Errors
/// When the file cannot be read.
pub fn hash_file(path: &Path) -> Result<Name> {
    let failed = |source| Error::Io {
        path: path.to_owned(),
        source,
    };
    let mut hasher = blake3::Hasher::new();
    hasher
        .update_reader(File::open(path).map_err(failed)?)
        .map_err(failed)?;
    Ok(Name::from_hash(hasher.finalize()))
}
