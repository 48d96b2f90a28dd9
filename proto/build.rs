//! Compiles `proto/` to Rust. In Rust alone: no `protoc` has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["espalier/v1/jobs.proto", "espalier/v1/workers.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // `Workers.Connect` would clash with a generated `connect`: make a channel and use `new`.
        .build_transport(false)
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
