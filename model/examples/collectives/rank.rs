//! One rank: forms the gangs that it is told of, does what it is told in them, and says what it found.

use std::io::BufRead;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use espalier_model::collective::mesh::{Mesh, Options, Place};
use espalier_model::collective::{Communicator, Error, Gang};
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::cuda::{CudaOperations, nccl_version};
use espalier_model::ops::{Operations, cuda};
use espalier_model::{ElementType, Tensor};

use super::{Failure, checks};

/// Calls of one measurement, measurements of which the median counts, and calls before.
const CALLS: u32 = 20;
const ROUNDS: usize = 5;
const WARM_UP: u32 = 5;
/// Rows and columns of what an endless loop adds up: 64 MiB in bf16.
const LOOPED: (usize, usize) = (1024, 32 * 1024);

/// Where a rank computes.
pub enum Backend {
    Cpu(CpuOperations),
    Cuda(Box<CudaOperations>),
}

impl Backend {
    fn open(device: &str, number: usize) -> Result<Self, Failure> {
        let index = match device.split_once(':') {
            None if device == "cpu" => return Ok(Self::Cpu(CpuOperations::new())),
            Some(("cuda", index)) => index.parse()?,
            _ => u32::try_from(number)?,
        };
        let options = cuda::Options {
            // A rank may wait for another in a call.
            deadline: Options::default().call,
            poison: true,
            memory_limit: Some(8 << 30),
            ..cuda::Options::default()
        };
        Ok(Self::Cuda(Box::new(CudaOperations::open(index, options)?)))
    }

    pub fn operations(&self) -> &dyn Operations {
        match self {
            Self::Cpu(operations) => operations,
            Self::Cuda(operations) => operations.as_ref(),
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Cpu(_) => "cpu".to_owned(),
            Self::Cuda(operations) => {
                let (free, total) = operations.device().memory().unwrap_or_default();
                format!(
                    "{}, NCCL {}, {} of {} MiB free",
                    operations.device().info().name,
                    nccl_version().unwrap_or_default(),
                    free >> 20,
                    total >> 20
                )
            }
        }
    }
}

/// A gang that this rank is in.
pub struct Formed {
    pub gang: Arc<dyn Gang>,
    pub all: Arc<dyn Communicator>,
    mesh: Arc<Mesh>,
}

/// Does what the standard input says, until it says to leave.
pub fn run(number: &str, device: &str, silence: &str) -> Result<(), Failure> {
    let number: usize = number.parse()?;
    let silence = Duration::from_millis(silence.parse()?);
    let backend = Backend::open(device, number)?;
    let mut lines = std::io::stdin().lock().lines().map_while(Result::ok);
    loop {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        println!("address {}", listener.local_addr()?);
        let Some(line) = lines.next() else {
            return Ok(());
        };
        let mut words = line.split_whitespace();
        if words.next() != Some("release") {
            return Ok(());
        }
        let generation = words.next().ok_or("a release without a generation")?.parse()?;
        let place = Place {
            rank: number,
            listener,
            addresses: words.map(str::to_owned).collect(),
            token: "collectives".to_owned(),
            generation,
        };
        let options = Options {
            silence,
            ..Options::default()
        };
        let mesh = Arc::new(Mesh::form(place, options)?);
        let gang = backend.operations().gang(mesh.clone())?;
        let ranks: Vec<usize> = (0..gang.size()).collect();
        let all = gang.communicator(&ranks)?;
        println!("formed on {}", backend.describe());
        let formed = Formed { gang, all, mesh };
        match serve(&backend, &formed, &mut lines) {
            Ok(()) => {
                let mesh = formed.mesh.clone();
                drop(formed);
                mesh.close()?;
                println!("left");
                return Ok(());
            }
            Err(error) => {
                println!("lost {error}");
                if let Some(espalier_model::Error::Gang(Error::Away { .. } | Error::GivenUp { .. })) =
                    error.downcast_ref()
                {
                    return Ok(());
                }
            }
        }
    }
}

fn serve(
    backend: &Backend,
    formed: &Formed,
    lines: &mut impl Iterator<Item = String>,
) -> Result<(), Failure> {
    loop {
        let line = lines.next().unwrap_or_default();
        if let Some(mib) = line.strip_prefix("speed ") {
            println!("figures {}", speed(backend, formed, mib.parse()?)?);
            continue;
        }
        match line.as_str() {
            "check all" => println!("checked {}", checks::run(backend, formed, true)?),
            "check some" => println!("checked {}", checks::run(backend, formed, false)?),
            "loop" => {
                println!("looping");
                endless(backend, formed)?;
            }
            _ => return Ok(()),
        }
    }
}

/// What activations are made of where the backend has it.
fn element_type(backend: &Backend) -> ElementType {
    backend.operations().activation_type()
}

/// Adds up without end, and reads a little of each sum.
fn endless(backend: &Backend, formed: &Formed) -> Result<(), Failure> {
    let operations = backend.operations();
    let (rows, columns) = LOOPED;
    let mut tensor = operations.zeros(rows, columns, element_type(backend))?;
    loop {
        for _ in 0..3 {
            tensor = formed.all.all_reduce(tensor)?.wait()?;
        }
        let read = operations.download(&tensor.first_rows(1)?)?;
        formed.gang.check()?;
        if read.iter().any(|&value| value != 0.0) {
            return Err("a sum of zeros is not zero".into());
        }
    }
}

/// Bandwidth of one call after the other: bytes of the operand over the time, as is usual, and what that asks of each
/// direction of a link.
fn speed(backend: &Backend, formed: &Formed, mib: usize) -> Result<String, Failure> {
    let operations = backend.operations();
    let element_type = element_type(backend);
    let bytes = mib << 20;
    let columns = bytes / element_type.bytes() / 64;
    let mut tensor = Some(operations.zeros(64, columns, element_type)?);
    let mut rates = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        let calls = if round == 0 { WARM_UP } else { CALLS };
        formed.gang.barrier()?;
        let seconds = timed(backend, || {
            for _ in 0..calls {
                let operand = tensor.take().ok_or("no operand")?;
                tensor = Some(formed.all.all_reduce(operand)?.wait()?);
            }
            Ok(())
        })?;
        if round > 0 {
            rates.push(bytes as f64 * f64::from(calls) / seconds);
        }
    }
    formed.gang.check()?;
    rates.sort_by(f64::total_cmp);
    let rate = rates.get(ROUNDS / 2).copied().unwrap_or(0.0) / 1e9;
    let size = formed.gang.size() as f64;
    let memory = match backend {
        Backend::Cpu(_) => String::new(),
        Backend::Cuda(_) => format!("; {}", backend.describe()),
    };
    Ok(format!(
        "all_reduce of {} MiB {element_type}: {rate:.1} GB/s ({:.1} GB/s each way){memory}",
        bytes >> 20,
        rate * 2.0 * (size - 1.0) / size
    ))
}

/// Seconds of `work`: on the device's own clock where there is one.
fn timed(backend: &Backend, work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let begun = Instant::now();
    let Backend::Cuda(operations) = backend else {
        work()?;
        return Ok(begun.elapsed().as_secs_f64());
    };
    let stream = operations.device().compute();
    let begin = stream.timed_mark()?;
    work()?;
    let end = stream.timed_mark()?;
    end.wait(Options::default().call, "the measured calls")?;
    Ok(f64::from(begin.milliseconds_until(&end)?) / 1e3)
}

/// A tensor of the backend's with these elements.
pub fn tensor(
    operations: &dyn Operations,
    elements: &[f32],
    rows: usize,
    element_type: ElementType,
) -> espalier_model::Result<Tensor> {
    let tensor = operations.upload(elements, rows, elements.len() / rows.max(1))?;
    match element_type {
        ElementType::F32 => Ok(tensor),
        ElementType::Bf16 => operations.copy_as(&tensor, element_type),
    }
}
