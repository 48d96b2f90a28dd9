//! The `espalier.v1` protocol: the generated messages and services, and the values they carry.
//!
//! gRPC carries small messages; what a task needs to know and what it found out travel as JSON of the
//! types in [`task`], so that the journal, the wire and the JSON API agree. Tensors and shards go
//! through the artifact store and are named here by [`task::ArtifactId`].

pub mod task;
