//! A few timings, so that a change of speed shows beside a change of bits: medians after warm-up.

use espalier_model::ops::cuda::{
    AttentionGradients, AttentionInputs, AttentionShape, CudaDevice, CudaParameter, CudaStep, DecodeCache,
    Element, Matrix, Onto, Result,
};

const RUNS: usize = 20;

/// Milliseconds of the device, the median of [`RUNS`].
fn time(device: &CudaDevice, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..3 {
        work()?;
    }
    let mut times = Vec::new();
    for _ in 0..RUNS {
        let begin = device.compute().timed_mark()?;
        work()?;
        let end = device.compute().timed_mark()?;
        device.wait()?;
        times.push(f64::from(begin.milliseconds_until(&end)?));
    }
    times.sort_by(f64::total_cmp);
    Ok(times[RUNS / 2])
}

/// Bell-shaped numbers: zeros would run faster.
fn noise(device: &CudaDevice, rows: usize, columns: usize) -> Result<Matrix> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let data: Vec<f32> = (0..rows * columns).map(|_| next() + next()).collect();
    device.upload_bf16(&data, rows, columns)
}

pub(crate) fn report(device: &CudaDevice) -> Result<()> {
    products(device)?;
    attention(device, 8, 1024, 9, 3, 64)?;
    attention(device, 4, 2048, 16, 16, 128)?;
    for rows in [1, 64] {
        few_rows(device, rows)?;
        decode_attention(device, rows, 512 * rows.min(2))?;
    }
    optimiser(device)?;
    launches(device)
}

fn products(device: &CudaDevice) -> Result<()> {
    for (rows, inner, out) in [(8192, 576, 3072), (8192, 576, 49152), (8192, 2048, 8192)] {
        let (x, weight) = (noise(device, rows, inner)?, noise(device, out, inner)?);
        let output = device.matrix(Element::Bf16, rows, out)?;
        let ms = time(device, || {
            device.linear(&x, &weight, None, Onto::Nothing, &output)
        })?;
        let flops = 2.0 * rows as f64 * inner as f64 * out as f64;
        println!(
            "linear {rows}x{inner}x{out}: {ms:.3} ms, {:.0} TFLOP/s",
            flops / ms / 1e9
        );
    }
    Ok(())
}

fn attention(
    device: &CudaDevice,
    sequences: usize,
    tokens: usize,
    heads: usize,
    groups: usize,
    head_dim: usize,
) -> Result<()> {
    let rows = sequences * tokens;
    let (q_width, kv_width) = (heads * head_dim, groups * head_dim);
    let (q, grad_output) = (noise(device, rows, q_width)?, noise(device, rows, q_width)?);
    let (k, v) = (noise(device, rows, kv_width)?, noise(device, rows, kv_width)?);
    let new = |columns| device.matrix(Element::Bf16, rows, columns);
    let (output, grad_q, grad_k, grad_v) = (new(q_width)?, new(q_width)?, new(kv_width)?, new(kv_width)?);
    let log_sums = device.matrix(Element::F32, heads, rows)?;
    let shape = AttentionShape {
        head_dim,
        sequences,
        window: 0,
    };
    let forward = time(device, || {
        device.attention(&q, &k, &v, &output, &log_sums, shape, None)
    })?;
    let inputs = AttentionInputs {
        q: &q,
        k: &k,
        v: &v,
        output: &output,
        log_sums: &log_sums,
        grad_output: &grad_output,
    };
    let into = AttentionGradients {
        q: &grad_q,
        k: &grad_k,
        v: &grad_v,
    };
    let backward = time(device, || device.attention_backward(inputs, into, shape))?;
    println!(
        "attention {sequences}x{tokens}, {heads}/{groups} heads of {head_dim}: forward {:.0} µs, backward {:.0} µs",
        forward * 1e3,
        backward * 1e3
    );
    Ok(())
}

/// The products of a token of each of `rows` sequences through a 1.2B Llama, each over weights enough that none
/// stays in a cache.
fn few_rows(device: &CudaDevice, rows: usize) -> Result<()> {
    for (inner, out) in [
        (2048, 3072),
        (2048, 2048),
        (2048, 16384),
        (8192, 2048),
        (2048, 128256),
    ] {
        let copies = ((256 << 20) / (inner * out * 2)).max(1);
        let weight = noise(device, copies * out, inner)?;
        let x = noise(device, rows, inner)?;
        let output = device.matrix(Element::Bf16, rows, out)?;
        let ms = time(device, || {
            (0..copies).try_for_each(|copy| {
                let weight = weight.narrow_rows(copy * out, out)?;
                device.linear(&x, &weight, None, Onto::Nothing, &output)
            })
        })? / copies as f64;
        println!(
            "linear {rows}x{inner}x{out}: {:.1} µs, {:.2} TB/s",
            ms * 1e3,
            (inner * out * 2) as f64 / ms / 1e9
        );
    }
    Ok(())
}

/// One token of each of `sequences` sequences over `keys` cached ones, 32 query heads and 8 KV heads of 64.
fn decode_attention(device: &CudaDevice, sequences: usize, keys: usize) -> Result<()> {
    let (heads, groups, head_dim) = (32, 8, 64);
    let kv_width = groups * head_dim;
    let (q, output) = (
        noise(device, sequences, heads * head_dim)?,
        device.matrix(Element::Bf16, sequences, heads * head_dim)?,
    );
    let (k, v) = (
        noise(device, sequences, kv_width)?,
        noise(device, sequences, kv_width)?,
    );
    let copies = ((128 << 20) / (sequences * keys * kv_width * 2)).max(1);
    let caches = (0..copies)
        .map(|_| {
            let one = || noise(device, sequences * keys, kv_width);
            Ok((one()?, one()?))
        })
        .collect::<Result<Vec<_>>>()?;
    let lengths = device.upload_i32(&vec![i32::try_from(keys).unwrap_or(0); sequences])?;
    let ms = time(device, || {
        caches.iter().try_for_each(|(keys_cache, values)| {
            let cache = DecodeCache {
                keys: keys_cache,
                values,
                capacity: keys,
                lengths: &lengths,
            };
            device.decode_attention(&q, &k, &v, cache, None, &output, head_dim, 0, true)
        })
    })? / copies as f64;
    let bytes = (sequences * keys * kv_width * 4) as f64;
    println!(
        "decode_attention {sequences} over {keys}, {heads}/{groups} heads of {head_dim}: {:.1} µs, {:.2} TB/s",
        ms * 1e3,
        bytes / ms / 1e9
    );
    Ok(())
}

fn optimiser(device: &CudaDevice) -> Result<()> {
    let parameters = (0..128)
        .map(|_| {
            let new = || device.zeros(Element::F32, 1, 1 << 20);
            Ok(CudaParameter {
                value: new()?,
                gradient: new()?,
                first_moment: new()?,
                second_moment: new()?,
                working: Some(device.zeros(Element::Bf16, 1, 1 << 20)?),
                decay: 0.1,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let count = parameters.len() << 20;
    let optimiser = device.optimiser(parameters)?;
    let step = CudaStep {
        rate: 1e-4,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        step: 1,
        gradient_scale: 1.0,
        clip: 1.0,
    };
    device.set_step(&optimiser, step)?;
    let parameters = optimiser.parameters().iter();
    let gradients: Vec<_> = parameters.map(|parameter| parameter.gradient.clone()).collect();
    let ms = time(device, || {
        let measured = device.measure(&gradients, &[])?;
        device.update(&optimiser, &measured)
    })?;
    // Gradients are read twice; value, gradient and moments are read and written, the copy is written.
    let bytes = count as f64 * (4.0 + 8.0 * 4.0 + 2.0);
    println!(
        "update of {count} parameters: {ms:.3} ms, {:.2} TB/s",
        bytes / ms / 1e9
    );
    Ok(())
}

/// What queueing a small kernel and a small product costs the host.
fn launches(device: &CudaDevice) -> Result<()> {
    let (x, weight) = (noise(device, 64, 64)?, noise(device, 64, 64)?);
    let y = device.zeros(Element::Bf16, 64, 64)?;
    let kernel = || device.add_assign(&y, &x);
    let product = || device.linear(&x, &weight, None, Onto::Nothing, &y);
    type Work<'a> = &'a dyn Fn() -> Result<()>;
    for (what, work) in [("kernel", &kernel as Work<'_>), ("product", &product as Work<'_>)] {
        work()?;
        device.wait()?;
        let begun = std::time::Instant::now();
        for _ in 0..500 {
            work()?;
        }
        let queued = begun.elapsed();
        device.wait()?;
        println!("queueing a {what}: {:.2} µs", queued.as_secs_f64() * 1e6 / 500.0);
    }
    Ok(())
}
