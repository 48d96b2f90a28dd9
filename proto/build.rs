//! Compiles `proto/` to Rust. In Rust alone: no `protoc` has to be installed.

use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files =
        ["cluster", "jobs", "tables", "tasks", "workers"].map(|name| format!("espalier/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["proto"])?;
    let encoded = PathBuf::from(std::env::var("OUT_DIR")?).join("descriptors.bin");
    std::fs::write(encoded, descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        // `Workers.Connect` would clash with a generated `connect`: make a channel and use `new`.
        .build_transport(false)
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
