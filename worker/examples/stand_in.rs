//! Processes for tests: a device child as the program has it, the same with a process of its own, and an
//! agent that does nothing but hold a child at work, so that it can be killed.
//!
//! ```text
//! stand_in child [MARKER]
//! stand_in parent-of-one [MARKER]
//! stand_in holder CHILD SPEC STORE
//! ```

use std::fmt::Debug;
use std::io::Write;
use std::process::Command;

use espalier_model::Device;
use espalier_worker::Assigned;
use espalier_worker::agent::leftover::Mark;
use espalier_worker::agent::options::{ChildOptions, DeviceOptions};
use espalier_worker::agent::process::Process;
use espalier_worker::child::protocol::{Order, Request};
use espalier_worker::engine::vllm::VllmOptions;
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

type Answer = Result<(), Box<dyn std::error::Error>>;

fn main() -> Answer {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["child", ..] => child(),
        ["parent-of-one", ..] => {
            Command::new("sleep").arg("3600").spawn()?;
            child()
        }
        ["holder", child, spec, store] => hold(child, spec, store),
        _ => Err("expected: child | parent-of-one | holder CHILD SPEC STORE".into()),
    }
}

/// Writes what is worth a line to standard error.
struct Lines;

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            line.push_str(&format!("{field}={value:?} "));
        });
        eprintln!("{line}");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn child() -> Answer {
    tracing::subscriber::set_global_default(Lines)?;
    let assigned = Assigned {
        device: Device::Cpu,
        memory_limit: None,
        vllm: VllmOptions::default(),
    };
    Ok(espalier_worker::run_child(assigned, || ())?)
}

/// Has a child work on a spec and prints the child's process group; never ends.
fn hold(child: &str, spec: &str, store: &str) -> Answer {
    let options = ChildOptions {
        program: Some(std::env::current_exe()?),
        arguments: vec![child.to_owned()],
        ..ChildOptions::default()
    };
    let order = Order {
        attempt: 1,
        job: String::new(),
        task: 1,
        traceparent: String::new(),
        artifact_store: store.to_owned(),
        artifact_store_id: String::new(),
        spec: serde_json::from_str(spec)?,
        gang: None,
    };
    let mark = Mark::new(store, "holder", "cpu");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut process = Process::start(&options, &DeviceOptions::cpu(1), &mark)?;
        process.send(&Request::Run(Box::new(order)))?;
        // Its first words tell that it works.
        process.next().await;
        writeln!(std::io::stdout(), "{}", process.group().unwrap_or(0))?;
        std::io::stdout().flush()?;
        while process.next().await.is_some() {}
        Ok(())
    })
}
