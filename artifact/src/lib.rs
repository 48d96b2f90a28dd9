//! Content-addressed artifacts over an object store
