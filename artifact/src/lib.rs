//! Content-addressed artifacts: whatever is too large for a message travels through here.
//!
//! An artifact is named by the lower-case hexadecimal BLAKE3 of its bytes, appears whole or not at all,
//! and is checked against its name whenever it is read. The same bytes put twice are stored once. A store is
//! a directory or a bucket (S3, Google Cloud, Azure), opened by URL. Beside artifacts it keeps two kinds of
//! small things under names of their choosing: [records](ArtifactStore::set_record), by which an attempt finds
//! what the one before it left, and [areas](ObjectArea), which belong to whoever opens them. Here lives the
//! store and its blocking form for device children; what the bytes mean lives with whoever wrote them.

mod area;
mod blocking;
mod cache;
mod error;
mod identity;
mod location;
mod name;
mod objects;
mod scratch;
mod sealed;
mod store;
mod upload;

pub use area::{Created, ObjectArea, StoredObject};
pub use blocking::BlockingStore;
pub use error::{Error, Result, passes};
pub use identity::id_of_directory;
pub use location::Options;
pub use name::{Name, hash_file};
pub use scratch::sweep_scratch;
pub use store::{ArtifactStore, StoredArtifact};
