//! The names of things: typed, small, ordered.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The one after.
            pub fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(formatter)
            }
        }
    };
}

number!(
    /// A task, unique within a journal.
    TaskId
);
number!(
    /// One try at a task, unique within a journal.
    AttemptId
);
number!(
    /// A worker, for as long as the journal knows its name.
    WorkerId
);
number!(
    /// Incarnation of the coordinator.
    Term
);
number!(
    /// Incarnation of a worker.
    Epoch
);

/// A job; shown as `job-12`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u64);

impl JobId {
    /// The one after.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "job-{}", self.0)
    }
}

impl FromStr for JobId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix("job-").and_then(|digits| digits.parse().ok());
        number
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a job id: one looks like `job-12`"))
    }
}

/// A short text that many things share: an executor, a kind of device, a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Name(Arc<str>);

impl Name {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        &*self.0 == other
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0.as_ref().to_owned()
    }
}

/// The right to run an attempt: who gave it, to whom, and which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lease {
    /// The coordinator's incarnation when it was given.
    pub term: Term,
    /// The worker's incarnation it was given to.
    pub epoch: Epoch,
    /// The attempt.
    pub attempt: AttemptId,
}

/// JSON text that the scheduler carries and never reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Payload(Arc<str>);

impl Payload {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Payload {
    /// Tells one text from another: FNV-1a, 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>).
    pub fn digest(&self) -> u64 {
        const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        let fold = |digest: u64, byte: u8| (digest ^ u64::from(byte)).wrapping_mul(PRIME);
        self.0.bytes().fold(BASIS, fold)
    }
}

impl From<String> for Payload {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&str> for Payload {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<Payload> for String {
    fn from(payload: Payload) -> Self {
        payload.0.as_ref().to_owned()
    }
}

/// What only the ranks of one formation of a gang know, by which they tell each other from strangers. Kept in the journal,
/// so that a rank that is told again is told the same, and shown nowhere.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// The text that ranks are told.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Of a gang that a build before tokens released.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<u128> for Token {
    fn from(bits: u128) -> Self {
        Self(format!("{bits:032x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token")
    }
}
