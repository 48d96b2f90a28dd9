//! The `espalier.v1` protocol: the generated messages and services, and the values they carry.
//!
//! gRPC carries small messages; what a task needs to know and what it found out travel as JSON of the
//! types in [`task`], so that the journal, the wire and the JSON API agree. Tensors and shards go
//! through the artifact store and are named here by [`task::ArtifactId`].

pub mod task;

/// Messages, clients and servers of `espalier.v1`, generated from `proto/espalier/v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("espalier.v1");
}

/// The protocol version this build speaks. A coordinator also takes the version before.
pub const PROTOCOL_VERSION: u32 = 1;

/// Largest gRPC message either side takes, bytes.
pub const MESSAGE_LIMIT_BYTES: usize = 16 << 20;
