//! The `espalier.v1` protocol: the generated messages and services, and the values they carry.
//!
//! gRPC carries small messages; what a task needs to know and what it found out travel as JSON of the
//! types in [`task`], so that the journal, the wire and the JSON API agree. Tensors and shards go
//! through the artifact store and are named here by [`task::ArtifactId`].

pub mod json;
pub mod task;

/// Messages, clients and servers of `espalier.v1`, generated from `proto/espalier/v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("espalier.v1");
}

/// The protocol version this build speaks.
pub const PROTOCOL_VERSION: u32 = 2;

/// The version before, which both sides still take.
pub const OLDEST_PROTOCOL_VERSION: u32 = 1;

/// A coordinator's address as a URL: `host:port` alone means plain HTTP.
pub fn coordinator_url(given: &str) -> String {
    if given.contains("://") {
        given.to_owned()
    } else {
        format!("http://{given}")
    }
}

/// The encoded descriptors of `espalier.v1`, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Largest gRPC message either side takes, bytes.
pub const MESSAGE_LIMIT_BYTES: usize = 16 << 20;

/// Largest JSON of a task's spec or output that is taken, bytes: far enough below [`MESSAGE_LIMIT_BYTES`] that a
/// message with it, and a task shown with both, can always be sent.
pub const PAYLOAD_LIMIT_BYTES: usize = 6 << 20;

/// Metadata of the status that refuses a hello for its epoch: the epoch, in decimal, that the coordinator knows the
/// worker by. It is there only when no process of that epoch is connected, so that a worker whose clock once ran
/// ahead can begin above it. A worker that was welcomed under its own epoch before must not: another process has
/// taken its name since.
pub const KNOWN_EPOCH_METADATA: &str = "espalier-known-epoch";

/// Metadata of every status that refuses a hello for its epoch: the refused epoch, in decimal. A worker that was
/// welcomed before and meets it stops at once: another process has taken its name.
pub const STALE_EPOCH_METADATA: &str = "espalier-stale-epoch";
