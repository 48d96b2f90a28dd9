//! Text in, packed sequences of tokens out.
//!
//! - [`open`]: a file's bytes, decompressed by what they begin with.
//! - [`documents`]: the documents of a text or JSONL file, streamed, with errors that name file and line.
//! - [`chat`]: chat messages as text, through the parent's own template.
//! - [`sample`]: a bounded, seeded sample of documents, in a random order that ignores the files' order.
//! - [`pack`]: documents as sequences of fixed length, with a separator after each document.
//! - [`shard`]: packed sequences as artifacts.
//!
//! Nothing here knows a model's weights or what the sequences are for.

pub mod chat;
pub mod documents;
pub mod open;
pub mod pack;
pub mod sample;
pub mod shard;
