//! What the CUDA backend does on the host, where there is no GPU: what it refuses, and how long it waits.
//!
//! `false_device/` builds the libraries, which compute nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod false_device;

use std::sync::Arc;
use std::time::Duration;

use espalier_arch::Architecture;
use espalier_model::decode::Session;
use espalier_model::ops::cuda::{
    AttentionGradients, AttentionInputs, AttentionShape, CudaDevice, CudaOperations, CudaParameter, CudaStep,
    Element, Error, KernelNeeds, Onto, Options, Result, Version, compile_all,
};
use espalier_model::ops::{Head, Layout, Operations};
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Trainer};
use espalier_model::{ElementType, Elements, Model, Tensor};
use false_device::{COMPILER, PRODUCTS, build, build_device, passes_with};
use serde_json::json;

/// That `case` below passes on a false device.
fn passes(case: &str, settings: &[(&str, &str)]) {
    let directory = tempfile::tempdir().unwrap();
    if build_device(directory.path()) {
        passes_with(case, directory.path(), settings);
    }
}

fn options() -> Options {
    Options {
        memory_limit: Some(256 << 20),
        cache: None,
        ..Options::default()
    }
}

fn operations() -> CudaOperations {
    CudaOperations::open(0, options()).unwrap()
}

fn bf16(operations: &CudaOperations, rows: usize, columns: usize) -> Tensor {
    operations.zeros(rows, columns, ElementType::Bf16).unwrap()
}

/// That it is refused as an operand of `operation`, before anything is done.
fn assert_refused<T: std::fmt::Debug, E: std::fmt::Display>(
    result: std::result::Result<T, E>,
    operation: &str,
    expected: &str,
) {
    let error = result.map_err(|error| error.to_string()).unwrap_err();
    assert!(
        error.starts_with(&format!("{operation}: ")) && error.contains(expected),
        "{error}"
    );
}

#[test]
fn operands_that_do_not_fit_are_refused_as_on_the_host() {
    passes("layers_and_losses", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn layers_and_losses() {
    let operations = operations();
    // Side by side and one below the other, of as many columns as rows in all, and yet each of another's.
    let (gradients, weights) = (bf16(&operations, 2, 8), bf16(&operations, 8, 4));
    let (narrow, wide) = (
        gradients.columns_from(0, 3).unwrap(),
        gradients.columns_from(3, 5).unwrap(),
    );
    let (tall, low) = (
        weights.narrow_rows(0, 5).unwrap(),
        weights.narrow_rows(5, 3).unwrap(),
    );
    let crossed = operations.linear_backward_input(&[(&narrow, &tall), (&wide, &low)]);
    assert_refused(crossed, "linear_backward_input", "3 x 4");
    let (own_narrow, own_wide) = (
        gradients.columns_from(0, 5).unwrap(),
        gradients.columns_from(5, 3).unwrap(),
    );
    let own = operations.linear_backward_input(&[(&own_narrow, &tall), (&own_wide, &low)]);
    assert_eq!(own.unwrap().columns(), 4);

    let (weight, parent_weight) = (bf16(&operations, 16, 8), bf16(&operations, 16, 24));
    let (hidden, parent_hidden) = (bf16(&operations, 4, 8), bf16(&operations, 5, 24));
    let (student, parent) = (
        Head {
            hidden: &hidden,
            weight: &weight,
        },
        Head {
            hidden: &parent_hidden,
            weight: &parent_weight,
        },
    );
    let expected = "the parent's 5 rows of the student, found 4";
    assert_refused(
        operations.distillation(student, parent, None),
        "distillation",
        expected,
    );
    let many = operations.distillation_many(&[student], parent);
    assert_refused(many, "distillation_many", expected);
    let as_many = parent_hidden.first_rows(4).unwrap();
    let parent = Head {
        hidden: &as_many,
        ..parent
    };
    assert_eq!(
        operations
            .distillation(student, parent, None)
            .unwrap()
            .rows
            .rows(),
        4
    );
}

#[test]
fn a_gradient_is_not_written_where_it_is_read_later() {
    passes("attention_gradients", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn attention_gradients() {
    let device = CudaDevice::open(0, options()).unwrap();
    let new = || device.zeros(Element::Bf16, 8, 32).unwrap();
    let (q, k, v, output, grad_output) = (new(), new(), new(), new(), new());
    let log_sums = device.zeros(Element::F32, 2, 8).unwrap();
    let inputs = AttentionInputs {
        q: &q,
        k: &k,
        v: &v,
        output: &output,
        log_sums: &log_sums,
        grad_output: &grad_output,
    };
    let shape = AttentionShape {
        head_dim: 16,
        sequences: 1,
        window: usize::MAX,
    };
    let (grad_k, grad_v) = (new(), new());
    for (grad_q, is_sound) in [
        (&q, false),
        (&grad_output, false),
        (&output, true),
        (&new(), true),
    ] {
        let gradients = AttentionGradients {
            q: grad_q,
            k: &grad_k,
            v: &grad_v,
        };
        let result = device.attention_backward(inputs, gradients, shape);
        if is_sound {
            result.unwrap();
        } else {
            assert_refused(result, "attention_backward", "grad_q: another buffer");
        }
    }
}

#[test]
fn what_lies_on_another_device_is_refused() {
    passes("another_device", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn another_device() {
    let (device, other) = (operations(), operations());
    let theirs = other.upload(&[1.0, 2.0], 1, 2).unwrap();
    assert_eq!(other.download(&theirs).unwrap(), [1.0, 2.0]);
    assert_refused(device.download(&theirs), "download", "on this device");
    let table = bf16(&device, 4, 8);
    let tokens = other.tokens(&[1, 3], None).unwrap();
    assert_refused(device.embedding(&table, &tokens), "embedding", "on this device");
    let tokens = device.tokens(&[1, 3], None).unwrap();
    assert_eq!(device.embedding(&table, &tokens).unwrap().rows(), 2);
}

#[test]
fn a_step_is_counted_from_one() {
    passes("first_step", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn first_step() {
    let device = CudaDevice::open(0, options()).unwrap();
    let new = || device.zeros(Element::F32, 1, 5).unwrap();
    let parameter = CudaParameter {
        value: new(),
        gradient: new(),
        first_moment: new(),
        second_moment: new(),
        working: None,
        decay: 0.0,
    };
    let optimiser = device.optimiser(vec![parameter]).unwrap();
    let set = |step: u32| -> Result<()> {
        let step = CudaStep {
            rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            step,
            gradient_scale: 1.0,
            clip: 1.0,
        };
        device.set_step(&optimiser, step)
    };
    let refused = set(0).unwrap_err();
    assert!(matches!(refused, Error::Operand { .. }), "{refused}");
    assert_refused(Err::<(), _>(refused), "adamw", "a step of at least 1, found 0");
    set(1).unwrap();
}

#[test]
fn an_older_toolkit_by_the_name_without_a_version_is_passed_over() {
    let directory = tempfile::tempdir().unwrap();
    let old = |name, source, macros: &[&str]| build(directory.path(), name, source, macros);
    if build_device(directory.path())
        && old("libnvrtc.so", COMPILER, &["-DVERSION=12040", "-DRESULT=6"])
        && old("libcublasLt.so", PRODUCTS, &["-DVERSION=120400"])
    {
        passes_with("opens_and_compiles", directory.path(), &[]);
    }
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn opens_and_compiles() {
    CudaDevice::open(0, options()).unwrap();
    let reports = compile_all(&KernelNeeds::default(), Version { major: 8, minor: 0 }).unwrap();
    assert!(reports.len() > 10, "{reports:?}");
}

#[test]
fn a_hung_kernel_ends_in_a_deadline_before_the_drivers_queue_is_full() {
    passes("a_hung_kernel", &[("FALSE_HANG_FROM", "100")]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn a_hung_kernel() {
    let deadline = Duration::from_millis(50);
    let device = CudaDevice::open(
        0,
        Options {
            deadline,
            ..options()
        },
    )
    .unwrap();
    let new = || device.zeros(Element::F32, 4, 4).unwrap();
    let (target, source) = (new(), new());
    let launch = |_| device.add_assign(&target, &source).err();
    let error = (0..5000).find_map(launch).unwrap();
    assert!(
        matches!(error, Error::Deadline { waited, .. } if waited >= deadline),
        "{error}"
    );
    assert!(matches!(device.wait(), Err(Error::Lost)));
}

#[test]
fn steps_and_tokens_give_back_what_they_take_also_when_memory_runs_out() {
    passes("memory_of_steps", &[]);
}

/// Biases, norms of heads, a window, widths that allow no vectors.
fn odd_model(operations: &CudaOperations, family: &str) -> Model {
    let mut config = json!({
        "model_type": family, "hidden_act": "silu", "hidden_size": 96, "intermediate_size": 77,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 101,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": true,
    });
    match family {
        "qwen3" => config["head_dim"] = json!(48),
        "mistral" => config["sliding_window"] = json!(u32::MAX),
        _ => {}
    }
    Model::random(&Architecture::from_config(&config).unwrap(), 1, operations).unwrap()
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn memory_of_steps() {
    for family in ["llama", "qwen2", "qwen3", "mistral"] {
        let operations = Arc::new(operations());
        let in_use = || operations.device().usage().in_use;
        let student = odd_model(&operations, family);
        let mut trainer = Trainer::new(operations.clone(), &student, usize::MAX).unwrap();
        let mut step = |sequences: usize| {
            let layout = Layout {
                sequences,
                tokens: 19,
            };
            let batch = MicroBatch {
                tokens: &vec![7; layout.rows()],
                layout,
                objective: Objective::NextToken,
            };
            trainer.accumulate(&batch, batch.predictions())?;
            // What nothing computed may be anything: only where it lies matters here.
            let _ = trainer
                .update(&Hyperparameters::default(), batch.predictions())?
                .read();
            Ok::<_, espalier_model::Error>(())
        };
        step(3).unwrap();
        let after_one = in_use();
        for sequences in [3, 5, 1] {
            step(sequences).unwrap();
            assert_eq!(in_use(), after_one, "{family}, {sequences} sequences");
        }
        let refused = step(20_000).unwrap_err();
        assert!(
            matches!(refused, espalier_model::Error::Cuda(Error::OutOfMemory { .. })),
            "{refused}"
        );
        assert_eq!(in_use(), after_one, "{family}, a step that found no memory");
        step(3).unwrap();
        assert_eq!(in_use(), after_one, "{family}, a step after that");

        let (student, without) = (Arc::new(student), in_use());
        let mut session = Session::new(operations.clone(), Arc::clone(&student), 2, 64).unwrap();
        drop(session.prefill(&[7; 10]).unwrap());
        // Tables of every position, and the memory of a step that is recorded, are kept from then on.
        session.settle().unwrap();
        assert_eq!(session.length(), 5);
        let before = in_use();
        for _ in 0..20 {
            drop(session.decode(&[7, 8]).unwrap());
            session.go_on(&[7, 8], 1, |_| false).unwrap();
        }
        assert_eq!(in_use(), before, "{family}, decoding");
        drop(session);
        assert_eq!(in_use(), without, "{family}, a session that is over");
    }
}

#[test]
fn what_is_recorded_runs_when_it_is_replayed_and_keeps_its_memory() {
    passes("a_recording", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn a_recording() {
    let operations = operations();
    let device = operations.device();
    let data = device.upload_f32(&[1.0; 64], 1, 64).unwrap();
    let in_use = || device.usage().in_use;
    let before = in_use();
    let (graph, made) = device
        .record(|| {
            // A mark of what is not asked for yet is none; one that was taken would be looked at in vain.
            assert!(operations.mark().unwrap().is_none());
            drop(device.matrix(Element::F32, 1, 64)?);
            let made = device.matrix(Element::F32, 1, 64)?;
            device.cast(&made, &data)?;
            Ok::<_, Error>(made)
        })
        .unwrap();
    // A slab of the pool; what was freed within was taken again.
    assert_eq!(in_use() - before, 1 << 20);
    for _ in 0..3 {
        device.replay(&graph).unwrap();
    }
    let refused = [
        device.record(|| device.upload_f32(&[0.0], 1, 1)).err(),
        device.record(|| device.download(&data)).err(),
        device.record(|| device.wait()).err(),
        device.record(|| device.replay(&graph)).err(),
        device.record(|| device.record(|| Ok::<_, Error>(()))).err(),
    ];
    for error in refused {
        assert!(matches!(error, Some(Error::Recording { .. })), "{error:?}");
    }
    let panics =
        std::panic::AssertUnwindSafe(|| device.record(|| -> Result<()> { panic!("work that goes wrong") }));
    assert!(std::panic::catch_unwind(panics).is_err());
    device.record(|| Ok::<_, Error>(())).unwrap();
    // What failed to be recorded is over: the thread's work runs again.
    assert!(operations.mark().unwrap().is_some());
    device.wait().unwrap();
    drop(graph);
    assert!(in_use() > before, "the matrix that was made keeps the memory");
    drop(made);
    assert_eq!(in_use(), before);
}

#[test]
fn a_product_that_leaves_no_memory_to_time_others_is_made_all_the_same() {
    passes("a_large_product", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn a_large_product() {
    let device = CudaDevice::open(
        0,
        Options {
            tune: true,
            ..options()
        },
    )
    .unwrap();
    // 64 MiB of workspace and 2 of operands leave no room for a second of 128.
    let new = |rows, columns| device.matrix(Element::Bf16, rows, columns).unwrap();
    let (x, weight, output) = (new(8192, 64), new(8192, 64), new(8192, 8192));
    device.linear(&x, &weight, None, Onto::Nothing, &output).unwrap();
    let small = new(8192, 8);
    device
        .linear(
            &x,
            &weight.narrow_rows(0, 8).unwrap(),
            None,
            Onto::Nothing,
            &small,
        )
        .unwrap();
}

#[test]
fn no_more_memory_is_planned_with_than_is_free() {
    passes("memory_limits", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn memory_limits() {
    let limit_of = |asked: Option<u64>| {
        let options = Options {
            memory_limit: asked,
            ..options()
        };
        CudaOperations::open(0, options)
            .unwrap()
            .accelerator()
            .unwrap()
            .memory_limit
    };
    // The false device has 8 GiB free, of which one is left alone.
    assert_eq!(limit_of(None), 7 << 30);
    assert_eq!(limit_of(Some(100 << 30)), 7 << 30);
    assert_eq!(limit_of(Some(3 << 30)), 3 << 30);
}

#[test]
fn a_weight_is_rounded_on_the_host_and_never_held_in_f32() {
    passes("upload_rounded", &[]);
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn upload_rounded() {
    // 192 MiB in f32 and half of that in bf16: both together are more than the 256 MiB that tensors may take.
    let (rows, columns) = (48 << 10, 1 << 10);
    let mut values = vec![0.0; rows * columns];
    let halfway = 1.0 + 1.0 / 256.0;
    values[..3].copy_from_slice(&[halfway, 1.0 + 3.0 / 256.0, -2.5]);
    let operations = operations();
    let weight = operations
        .upload_elements(&Elements::rounded(values, ElementType::Bf16), rows, columns)
        .unwrap();
    assert_eq!(weight.element_type(), ElementType::Bf16);
    let first = weight.first_rows(1).unwrap().columns_from(0, 3).unwrap();
    assert_eq!(
        operations.download(&first).unwrap(),
        [1.0, 1.0 + 4.0 / 256.0, -2.5]
    );
}
