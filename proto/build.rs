//! Compiles `proto/` to Rust. In Rust alone: no `protoc` has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(
        ["espalier/v1/jobs.proto", "espalier/v1/workers.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
