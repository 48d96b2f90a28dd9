//! Content-addressed artifacts: whatever is too large for a message travels through here.
//!
//! An artifact is named by the lower-case hexadecimal BLAKE3 of its bytes, appears whole or not at all,
//! and is checked against its name whenever it is read. The same bytes put twice are stored once. Here
//! lives the store and its blocking form for device children; what the bytes mean lives with whoever
//! wrote them.

mod blocking;
mod error;
mod name;
mod store;

pub use blocking::BlockingStore;
pub use error::{Error, Result};
pub use name::{Name, hash_file};
pub use store::ArtifactStore;
