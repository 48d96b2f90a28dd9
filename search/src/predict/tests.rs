//! Predictions against figures worked out by hand.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::fixtures::{attention, f32, mlp, small, table};
use crate::{CostTable, Measurement, Metric, Subject, Summary};
use espalier_arch::{BlockShape, Candidate, Variant};

const WORKLOAD: Workload = Workload {
    prompt_tokens: 10,
    output_tokens: 5,
    concurrency: 2,
};

/// Attention's decoding grows by 0.1 ms a token of context; only prefill has spread.
fn times() -> CostTable {
    let prefill = Point::Prefill {
        tokens: 10,
        sequences: 2,
    };
    let decode = |context| Point::Decode {
        context,
        sequences: 2,
    };
    let base = || Subject::Base { vocab_size: 100 };
    let (heads, channels) = (|| Subject::Block(attention(2)), || Subject::Block(mlp(64)));
    table(&[
        (base(), prefill, 1.0, 0.0),
        (base(), decode(10), 0.2, 0.0),
        (base(), decode(13), 0.2, 0.0),
        (heads(), prefill, 4.0, 0.1),
        (heads(), decode(10), 1.0, 0.0),
        (heads(), decode(13), 1.3, 0.0),
        (channels(), prefill, 2.0, 0.2),
        (channels(), decode(10), 0.5, 0.0),
        (channels(), decode(13), 0.5, 0.0),
    ])
}

fn model(measured: Option<&Measurement>) -> CostModel {
    let whole = measured.map(|measurement| crate::Whole {
        measurement,
        workload: &WORKLOAD,
    });
    CostModel::new(&times(), &WORKLOAD, &small(), f32(), whole).unwrap()
}

fn close(value: Option<f64>, expected: f64) {
    let value = value.unwrap();
    assert!(
        (value - expected).abs() <= 1e-9 * expected.abs(),
        "{value} instead of {expected}"
    );
}

#[test]
fn a_workload_is_timed_at_its_first_and_last_context_and_between_where_they_are_far_apart() {
    let contexts = |output_tokens| -> Vec<usize> {
        let workload = Workload {
            output_tokens,
            ..WORKLOAD
        };
        let decode = points(&workload)
            .unwrap()
            .into_iter()
            .filter_map(|point| match point {
                Point::Decode { context, .. } => Some(context),
                Point::Prefill { .. } => None,
            });
        decode.collect()
    };
    assert!(contexts(1).is_empty());
    assert_eq!(contexts(2), [10]);
    assert_eq!(contexts(5), [10, 13]);
    assert_eq!(contexts(2050), [10, 1034, 2058]);
}

#[test]
fn every_figure_is_the_sum_over_blocks_and_base() {
    let figures = model(None).predict(&small()).unwrap().figures;
    // Prefill: 3 · 4 + 3 · 2 + 1.
    close(figures.first_token_ms, 19.0);
    // Four steps at contexts 10 to 13: 3 · (1.0 + 1.1 + 1.2 + 1.3) + 3 · 4 · 0.5 + 4 · 0.2.
    close(figures.per_token_ms, 20.6 / 4.0);
    close(figures.latency_ms, 39.6);
    close(figures.throughput_tokens_per_second, 2.0 * 5.0 / 0.0396);
    // Norm, query and output of 32 × 32, key and value of 16 × 32; norm and three matrices of 64 × 32.
    let parameters = 3.0 * (32.0 + 2.0 * 1024.0 + 2.0 * 512.0) + 3.0 * (32.0 + 3.0 * 2048.0);
    close(figures.block_parameters, parameters);
    // Keys and values of 16 at context 15 for two requests in three layers; 100 tied embeddings and a norm.
    let state = 3.0 * 2.0 * 2.0 * 16.0 * 15.0;
    close(figures.memory_bytes, 4.0 * (parameters + state + 101.0 * 32.0));
}

#[test]
fn errors_of_one_shape_add_and_those_of_different_shapes_add_in_quadrature() {
    let errors = model(None).predict(&small()).unwrap().errors;
    // The median of four repeats: 1.4826 · √(π/2) · 0.1 / √4.
    let one = 1.4826 * (std::f64::consts::PI / 2.0).sqrt() * 0.05;
    let expected = (3.0 * one).hypot(3.0 * 2.0 * one);
    close(errors.first_token_ms, expected);
    close(errors.latency_ms, expected);
    assert_eq!(errors.per_token_ms, Some(0.0));
    close(
        errors.throughput_tokens_per_second,
        10_000.0 / 39.6 * expected / 39.6,
    );
}

#[test]
fn a_skipped_block_costs_nothing_and_its_state_goes() {
    let model = model(None);
    let mut variants = vec![Variant::Whole; 6];
    variants[2] = Variant::Skip;
    let smaller = small().with_candidate(&Candidate { variants }).unwrap();
    let figures = model.predict(&smaller).unwrap().figures;
    close(figures.latency_ms, 39.6 - 4.0 - 4.6);
    let whole = model.predict(&small()).unwrap().figures.memory_bytes.unwrap();
    close(
        figures.memory_bytes,
        whole - 4.0 * (3104.0 + 2.0 * 2.0 * 16.0 * 15.0),
    );
}

#[test]
fn corrections_scale_times_and_the_parents_other_memory_stays() {
    // Of times it says nothing.
    let summary = Summary::of(Vec::new());
    let counted = f32().counted_bytes(&small(), &WORKLOAD);
    let measurement = Measurement {
        latency_ms: summary.clone(),
        first_token_ms: summary.clone(),
        per_token_ms: summary.clone(),
        throughput_tokens_per_second: summary,
        memory_bytes: 200_000,
    };
    assert!(counted < 200_000);
    let corrections = Corrections {
        first_token: 2.0,
        decode: 0.5,
        turnover: 3.0,
        memory_bytes: 7.0,
        ..Corrections::default()
    };
    let corrected = model(Some(&measurement))
        .corrected(&corrections, &small())
        .unwrap();
    let figures = corrected.predict(&small()).unwrap().figures;
    close(figures.first_token_ms, 38.0);
    close(figures.latency_ms, 38.0 + 10.3);
    // Requests that run together from start to end have the throughput of their latency.
    close(figures.throughput_tokens_per_second, 10_000.0 / 48.3);
    close(figures.memory_bytes, 200_007.0);
}

#[test]
fn a_parent_that_takes_longer_than_its_sums_scales_all_alike_and_a_faster_one_nothing() {
    let summary = |median| Summary::of(vec![median]);
    // 19.0 and 20.6 ms are the sums of the table's times.
    let measurement = Measurement {
        latency_ms: summary(38.0 + 41.2 / 4.0),
        first_token_ms: summary(38.0),
        per_token_ms: summary(2.575),
        throughput_tokens_per_second: summary(100.0),
        memory_bytes: 0,
    };
    let mut smaller = small();
    smaller.blocks.truncate(2);
    let factors = [2.0, 1.0];
    for shape in [small(), smaller] {
        let sums = model(None).predict(&shape).unwrap().figures;
        let found = model(Some(&measurement)).predict(&shape).unwrap().figures;
        let (first, each) = (sums.first_token_ms.unwrap(), sums.per_token_ms.unwrap());
        close(found.first_token_ms, factors[0] * first);
        close(found.per_token_ms, factors[1] * each);
    }
    // What is learnt later comes on top.
    let corrections = Corrections {
        first_token: 3.0,
        ..Corrections::default()
    };
    let corrected = model(Some(&measurement))
        .corrected(&corrections, &small())
        .unwrap();
    let corrected = corrected.predict(&small()).unwrap().figures;
    close(corrected.first_token_ms, 3.0 * 38.0);
    // A throughput of its own has a factor of its own.
    let mut continuous = times();
    continuous.key.engine = "vllm".to_owned();
    let whole = crate::Whole {
        measurement: &measurement,
        workload: &WORKLOAD,
    };
    let model = CostModel::new(&continuous, &WORKLOAD, &small(), f32(), Some(whole)).unwrap();
    let figures = model.predict(&small()).unwrap().figures;
    close(figures.throughput_tokens_per_second, 100.0);
    close(figures.latency_ms, 58.6);
}

#[test]
fn a_throughput_of_continuous_batching_is_corrected_by_its_own_factor_alone() {
    let mut continuous = times();
    continuous.key.engine = "vllm".to_owned();
    let predicted = |corrections| {
        let costs = CostModel::new(&continuous, &WORKLOAD, &small(), f32(), None).unwrap();
        let costs = costs.corrected(&corrections, &small()).unwrap();
        costs.predict(&small()).unwrap().figures
    };
    let plain = predicted(Corrections::default());
    let slower = predicted(Corrections {
        first_token: 2.0,
        decode: 2.0,
        turnover: 1.25,
        ..Corrections::default()
    });
    close(slower.latency_ms, 2.0 * 39.6);
    close(
        slower.throughput_tokens_per_second,
        plain.throughput_tokens_per_second.unwrap() / 1.25,
    );
    let old: Corrections =
        serde_json::from_str(r#"{"first_token": 1.0, "decode": 1.0, "memory_bytes": 0.0}"#).unwrap();
    assert_eq!(old, Corrections::default());
}

#[test]
fn of_what_a_check_has_told_only_the_difference_to_the_checked_model_stays_in_doubt() {
    let variants = [Variant::Skip]
        .into_iter()
        .chain(vec![Variant::Whole; 5])
        .collect::<Vec<_>>();
    let smaller = Candidate { variants };
    let taught = |candidate: &Candidate, workload: Workload| Corrections {
        first_token: 2.0,
        checked: Some(Checked {
            candidate: candidate.clone(),
            workload,
            running: 2,
            first_token_error: 0.01,
            decode_error: 0.0,
            turnover_error: 0.0,
        }),
        ..Corrections::default()
    };
    let whole = Candidate {
        variants: vec![Variant::Whole; 6],
    };
    let error = |candidate: &Candidate, corrections: &Corrections| {
        let architecture = small().with_candidate(candidate).unwrap();
        let model = model(None).corrected(corrections, &small()).unwrap();
        model.predict(&architecture).unwrap().errors.first_token_ms
    };
    let of_whole = taught(&whole, WORKLOAD);
    // Twice 19 ms, which were measured to one part in a hundred.
    close(error(&whole, &of_whole), 0.38);
    // Twice 15 ms of two blocks of attention and three MLPs, where three and three are known to be 19.
    let one = 1.4826 * (std::f64::consts::PI / 2.0).sqrt() * 0.05;
    let share = 15.0 / 19.0;
    let attention = 2.0 * one * (2.0 - 3.0 * share);
    let mlps = 2.0 * 2.0 * one * (3.0 - 3.0 * share);
    close(
        error(&smaller, &of_whole),
        (0.3_f64.powi(2) + attention.powi(2) + mlps.powi(2)).sqrt(),
    );
    // Another workload tells nothing of this one.
    let others = taught(&whole, PROMPTS);
    close(error(&whole, &others), 2.0 * (3.0 * one).hypot(6.0 * one));
    // Nor does a model whose times are not known.
    let mut halved = whole;
    halved.variants[1] = Variant::Mlp { channels: 32 };
    let unknown = taught(&halved, WORKLOAD);
    close(error(&smaller, &unknown), 2.0 * (2.0 * one).hypot(6.0 * one));
}

#[test]
fn a_floor_on_throughput_is_a_ceiling_on_the_sum_of_latencies() {
    let limit = crate::AbsoluteLimit::new(Metric::Throughput, 250.0);
    assert_eq!(model(None).sum_limit(&limit), 40.0);
}

#[test]
fn times_are_never_extrapolated_nor_guessed() {
    let longer = Workload {
        output_tokens: 6,
        ..WORKLOAD
    };
    let model_of_longer = CostModel::new(&times(), &longer, &small(), f32(), None).unwrap();
    let message = model_of_longer.predict(&small()).unwrap_err().to_string();
    assert!(message.contains("contexts 10 to 13, but 14"), "{message}");
    let message = model(None).block_costs(Some(&mlp(32))).unwrap_err().to_string();
    assert!(message.contains("channels 64 to 64, but 32"), "{message}");
    let mut biased = mlp(64);
    if let BlockShape::Mlp(mlp) = &mut biased {
        mlp.bias = true;
    }
    let message = model(None).block_costs(Some(&biased)).unwrap_err().to_string();
    assert!(message.contains("profile it first"), "{message}");
}

/// A table of MLPs of these widths and times, prefill only, each with this spread, and a base of nothing.
fn widths(times: &[(usize, f64)], spread: f64) -> CostTable {
    let prefill = Point::Prefill {
        tokens: 10,
        sequences: 2,
    };
    let base = (Subject::Base { vocab_size: 100 }, prefill, 0.0, 0.0);
    let rows = times
        .iter()
        .map(|(channels, time)| (Subject::Block(mlp(*channels)), prefill, *time, spread));
    table(&rows.chain([base]).collect::<Vec<_>>())
}

const PROMPTS: Workload = Workload {
    output_tokens: 1,
    ..WORKLOAD
};

/// The time of three MLPs of so many channels, and its error.
fn priced(table: &CostTable, channels: usize) -> crate::Result<(f64, f64)> {
    let mut model = small();
    model
        .blocks
        .retain(|block| matches!(block.shape, BlockShape::Mlp(_)));
    for block in &mut model.blocks {
        block.shape = mlp(channels);
    }
    let costs = CostModel::new(table, &PROMPTS, &small(), f32(), None)?;
    let prediction = costs.predict(&model)?;
    let of = |figures: crate::Figures| figures.latency_ms.unwrap();
    Ok((of(prediction.figures), of(prediction.errors)))
}

#[test]
fn between_widths_times_are_linear_and_the_error_is_how_far_measured_ones_lie_off_their_neighbours_line() {
    let straight = widths(&[(32, 1.0), (64, 2.0), (128, 4.0)], 0.0);
    assert_eq!(priced(&straight, 96).unwrap(), (9.0, 0.0));
    // Without the middle 32 and 128 give 2 at 64, half a millisecond less than measured: for each of three blocks.
    let bent = widths(&[(32, 1.0), (64, 2.5), (128, 4.0)], 0.0);
    assert_eq!(priced(&bent, 96).unwrap(), (9.75, 1.5));
    // Two points leave nothing out: a width between lies anywhere between.
    let two = widths(&[(32, 1.0), (64, 3.0)], 0.0);
    assert_eq!(priced(&two, 48).unwrap(), (6.0, 3.0));
}

#[test]
fn an_interpolated_width_has_the_spread_of_its_neighbours_too() {
    let exact = priced(&widths(&[(32, 1.0), (64, 2.0), (128, 4.0)], 0.1), 64)
        .unwrap()
        .1;
    let between = priced(&widths(&[(32, 1.0), (64, 2.0), (128, 4.0)], 0.1), 96)
        .unwrap()
        .1;
    // Half of each of two independent errors, three times.
    assert!(
        (between - exact / 2.0_f64.sqrt()).abs() < 1e-9,
        "{between} of {exact}"
    );
}

#[test]
fn beyond_the_measured_widths_there_is_a_time_only_where_it_is_asked_for_and_in_doubt() {
    let table = widths(&[(32, 1.0), (64, 2.0)], 0.0);
    let message = priced(&table, 96).unwrap_err().to_string();
    assert!(
        message.contains("an MLP of 96 channels at channels 32 to 64, but 96"),
        "{message}"
    );
    let costs = CostModel::new(&table, &PROMPTS, &small(), f32(), None).unwrap();
    let costs = costs.extrapolating().unwrap();
    assert_eq!(costs.block_costs(Some(&mlp(96))).unwrap().latency_ms, 3.0);
}

#[test]
fn attention_lies_between_its_neighbours_in_groups() {
    let prefill = Point::Prefill {
        tokens: 10,
        sequences: 2,
    };
    let table = table(&[
        (Subject::Base { vocab_size: 100 }, prefill, 0.0, 0.0),
        (Subject::Block(attention(1)), prefill, 1.0, 0.0),
        (Subject::Block(attention(4)), prefill, 4.0, 0.0),
    ]);
    let costs = CostModel::new(&table, &PROMPTS, &small(), f32(), None).unwrap();
    let found = costs.block_costs(Some(&attention(2))).unwrap();
    assert!((found.latency_ms - 2.0).abs() < 1e-12, "{}", found.latency_ms);
    let message = costs.block_costs(Some(&attention(5))).unwrap_err().to_string();
    assert!(message.contains("key/value groups 1 to 4, but 5"), "{message}");
}

#[test]
fn a_prompt_between_measured_ones_and_a_batch_between_measured_ones_lie_on_lines() {
    let prefill = |tokens, sequences| Point::Prefill { tokens, sequences };
    let base = || Subject::Base { vocab_size: 100 };
    let table = table(&[
        (base(), prefill(8, 1), 1.0, 0.0),
        (base(), prefill(16, 1), 2.0, 0.0),
        (base(), prefill(8, 4), 4.0, 0.0),
        (base(), prefill(16, 4), 8.0, 0.0),
    ]);
    let first = |prompt_tokens, concurrency| {
        let workload = Workload {
            prompt_tokens,
            output_tokens: 1,
            concurrency,
        };
        let costs = CostModel::new(&table, &workload, &small(), f32(), None).unwrap();
        costs.base_costs(&small()).map(|costs| costs.first_token_ms)
    };
    assert_eq!(first(12, 1).unwrap(), 1.5);
    assert_eq!(first(12, 4).unwrap(), 6.0);
    assert_eq!(first(12, 2).unwrap(), 3.0);
    let message = first(20, 1).unwrap_err().to_string();
    assert!(message.contains("prompts of tokens 8 to 16, but 20"), "{message}");
    let message = first(12, 5).unwrap_err().to_string();
    assert!(message.contains("sequences 1 to 4, but 5"), "{message}");
}

/// Milliseconds a step and their error, of a model that is all base, by its steps at some contexts.
fn per_token(
    time: impl Fn(usize) -> f64,
    contexts: &[usize],
    prompt_tokens: usize,
    steps: usize,
) -> (f64, f64) {
    let base = || Subject::Base { vocab_size: 100 };
    let prefill = |tokens| Point::Prefill { tokens, sequences: 1 };
    let mut rows = vec![(base(), prefill(1), 1.0, 0.0), (base(), prefill(8192), 1.0, 0.0)];
    let decode = |context| Point::Decode {
        context,
        sequences: 1,
    };
    rows.extend(
        contexts
            .iter()
            .map(|context| (base(), decode(*context), time(*context), 0.0)),
    );
    let workload = Workload {
        prompt_tokens,
        output_tokens: steps + 1,
        concurrency: 1,
    };
    let mut bare = small();
    bare.blocks.clear();
    let costs = CostModel::new(&table(&rows), &workload, &bare, f32(), None).unwrap();
    let prediction = costs.predict(&bare).unwrap();
    (
        prediction.figures.per_token_ms.unwrap(),
        prediction.errors.per_token_ms.unwrap(),
    )
}

#[test]
#[allow(clippy::cast_precision_loss)]
fn steps_between_the_contexts_of_two_workloads_are_in_doubt_by_what_the_line_may_miss() {
    // Caches hold 2,048 tokens; beyond, a step takes longer with each.
    let bent = |context: usize| 1.0 + context.saturating_sub(2048) as f64 / 1000.0;
    let two_workloads = [128, 255, 4096, 4223];
    for prompt in [300, 1024, 2048, 3900] {
        let truth = (prompt..prompt + 100).map(bent).sum::<f64>() / 100.0;
        let (found, error) = per_token(bent, &two_workloads, prompt, 100);
        assert!(
            (found - truth).abs() <= 2.0 * error,
            "{prompt}: {found} ± {error}, but {truth}"
        );
    }
    assert_eq!(
        per_token(bent, &two_workloads, 130, 100),
        (1.0, 0.0),
        "as measured"
    );
    // What is straight has no doubt; two points alone do not show it, so half of their difference is in the middle.
    let straight = |context: usize| context as f64;
    assert!(per_token(straight, &two_workloads, 1024, 100).1 < 1e-6);
    close(Some(per_token(straight, &[0, 4000], 2000, 1).1), 2000.0);
    assert_eq!(
        per_token(straight, &[1000, 2024], 1500, 100).1,
        0.0,
        "as a profile has them"
    );
}

/// [`times`] with what the host needs beside them: under the first token, and under each step.
fn hosted(parts: &[(Subject, f64, f64)]) -> CostTable {
    let mut hosted = times();
    for (subject, prefill, decode) in parts {
        let prompts = Point::Prefill {
            tokens: 10,
            sequences: 2,
        };
        let steps = [10, 13].map(|context| Point::Decode {
            context,
            sequences: 2,
        });
        let rows = [(prompts, *prefill), (steps[0], *decode), (steps[1], *decode)];
        let rows = rows.map(|(point, time)| (subject.clone(), point, time, 0.0));
        hosted.rows.extend(table(&rows).rows);
    }
    hosted
}

/// As older files have it, with one floor for models of any depth.
fn floored() -> CostTable {
    hosted(&[(Subject::HostFloor, 20.0, 6.0)])
}

#[test]
fn where_the_host_decides_the_parents_time_its_side_alone_is_scaled() {
    // The device takes 19 ms and 20.6 ms for four steps; the host twice that and more, or hardly anything.
    for (floor, factor) in [((40.0, 12.0), 1.0), ((1.0, 1.0), 1.5)] {
        let table = hosted(&[(Subject::HostFloor, floor.0, floor.1)]);
        let predict = |whole| {
            let costs = CostModel::new(&table, &WORKLOAD, &small(), f32(), whole).unwrap();
            costs.predict(&small()).unwrap()
        };
        let sums = predict(None);
        let (first, latency) = (sums.figures.first_token_ms, sums.figures.latency_ms);
        let summary = |value: Option<f64>| Summary::of(vec![1.5 * value.unwrap()]);
        let measurement = Measurement {
            latency_ms: summary(latency),
            first_token_ms: summary(first),
            per_token_ms: summary(sums.figures.per_token_ms),
            throughput_tokens_per_second: summary(sums.figures.throughput_tokens_per_second),
            memory_bytes: 0,
        };
        let whole = |workload| crate::Whole {
            measurement: &measurement,
            workload,
        };
        let found = predict(Some(whole(&WORKLOAD)));
        close(found.figures.latency_ms, 1.5 * latency.unwrap());
        close(found.device.unwrap().latency_ms, factor * 39.6);
        let other = Workload {
            output_tokens: 4,
            ..WORKLOAD
        };
        let unmoved = predict(Some(whole(&other))).figures;
        close(unmoved.latency_ms, latency.unwrap());
    }
}

#[test]
fn a_step_takes_the_longer_of_the_devices_sum_and_the_hosts_floor() {
    let costs = CostModel::new(&floored(), &WORKLOAD, &small(), f32(), None).unwrap();
    let prediction = costs.predict(&small()).unwrap();
    // The device takes 19 ms and 20.6 ms for four steps, the host 20 and 24.
    close(prediction.figures.first_token_ms, 20.0);
    close(prediction.figures.per_token_ms, 6.0);
    close(prediction.figures.latency_ms, 44.0);
    close(prediction.device.unwrap().latency_ms, 39.6);
    let limit = crate::AbsoluteLimit::new(Metric::Latency, 50.0);
    let whole = |cone: crate::predict::Cone| -> f64 {
        let blocks = small().blocks.into_iter();
        let shares = blocks.map(|block| cone.share(&costs.price(Some(&block.shape)).unwrap()).value);
        cone.share(&costs.base_price(&small()).unwrap()).value + shares.sum::<f64>()
    };
    let combinations: Vec<f64> = costs.cones(&limit).into_iter().map(whole).collect();
    for (found, expected) in combinations.iter().zip([39.6, 43.0, 40.6, 44.0]) {
        close(Some(*found), expected);
    }
    assert_eq!(combinations.len(), 4);
    assert!(model(None).predict(&small()).unwrap().device.is_none());
}

#[test]
fn the_hosts_side_grows_with_blocks_and_the_device_waits_for_what_it_cannot_hide() {
    let table = hosted(&[
        (Subject::HostFloor, 15.0, 3.0),
        (Subject::HostBlock, 1.0, 0.5),
        (Subject::HostAlone, 3.0, 0.1),
    ]);
    let costs = CostModel::new(&table, &WORKLOAD, &small(), f32(), None).unwrap();
    let prediction = costs.predict(&small()).unwrap();
    // Six blocks: the device's 19 ms and 3 of waiting against 15 + 6, and 20.6 + 0.4 against 4 · (3 + 3).
    close(prediction.figures.first_token_ms, 22.0);
    close(prediction.figures.latency_ms, 22.0 + 24.0);
    close(prediction.device.unwrap().first_token_ms, 19.0);
    let mut shorter = small();
    shorter.blocks.pop();
    let shorter = costs.predict(&shorter).unwrap().figures;
    close(shorter.per_token_ms, 3.0 + 2.5);
}

#[test]
fn a_table_that_tells_the_hosts_part_somewhere_has_to_tell_it_at_every_load() {
    let mut mixed = floored();
    mixed
        .rows
        .retain(|row| row.subject != Subject::HostFloor || matches!(row.point, Point::Decode { .. }));
    let error = CostModel::new(&mixed, &WORKLOAD, &small(), f32(), None).unwrap_err();
    assert!(error.to_string().contains("the host's floor"), "{error}");
}

#[test]
fn a_prompt_joins_a_step_that_the_host_works_for_once() {
    let mut continuous = floored();
    continuous.key.engine = "vllm".to_owned();
    let costs = CostModel::new(&continuous, &WORKLOAD, &small(), f32(), None).unwrap();
    let figures = costs.predict(&small()).unwrap().figures;
    // Of four shared steps two only decode: the device takes 10.3 ms for them, the host 12. The others have the prompts
    // too: 10.3 + 19 ms, and 20 of the host.
    close(
        figures.throughput_tokens_per_second,
        10_000.0 / (12.0 + 10.3 + 19.0),
    );
    let limit = crate::AbsoluteLimit::new(Metric::Throughput, 100.0);
    assert_eq!(costs.cones(&limit).len(), 4);
}

#[test]
fn a_sequence_that_runs_alone_has_the_throughput_of_its_latency() {
    let mut alone = floored();
    alone.key.engine = "vllm".to_owned();
    for row in &mut alone.rows {
        let (Point::Prefill { sequences, .. } | Point::Decode { sequences, .. }) = &mut row.point;
        *sequences = 1;
    }
    let workload = Workload {
        concurrency: 1,
        ..WORKLOAD
    };
    let costs = CostModel::new(&alone, &workload, &small(), f32(), None).unwrap();
    let figures = costs.predict(&small()).unwrap().figures;
    // Of five tokens: the host's 20 ms and four times 6.
    close(figures.latency_ms, 44.0);
    close(figures.throughput_tokens_per_second, 5_000.0 / 44.0);
}

#[test]
fn the_host_works_once_for_a_step_that_several_prompts_join() {
    let mut continuous = hosted(&[(Subject::HostFloor, 200.0, 60.0)]);
    continuous.key.engine = "vllm".to_owned();
    let mut alone = continuous.rows.clone();
    alone.retain_mut(|row| match &mut row.point {
        Point::Prefill { sequences, .. } => {
            *sequences = 1;
            true
        }
        Point::Decode { .. } => false,
    });
    continuous.rows.extend(alone);
    let workload = Workload {
        output_tokens: 2,
        ..WORKLOAD
    };
    let costs = CostModel::new(&continuous, &workload, &small(), f32(), None).unwrap();
    let figures = costs.predict(&small()).unwrap().figures;
    // Both prompts join the only step that there is for two requests of two tokens.
    close(figures.throughput_tokens_per_second, 4_000.0 / 200.0);
}

#[test]
fn the_host_looks_after_all_sequences_of_a_step_that_a_prompt_joins() {
    let mut continuous = floored();
    continuous.key.engine = "vllm".to_owned();
    // Of one sequence the host needs 2 ms less.
    let mut alone = continuous.rows.clone();
    alone.retain_mut(|row| match &mut row.point {
        Point::Decode { sequences, .. } if row.subject == Subject::HostFloor => {
            *sequences = 1;
            row.median_ms -= 2.0;
            true
        }
        _ => false,
    });
    continuous.rows.extend(alone);
    // A workload for which the device is never the slower one.
    for row in &mut continuous.rows {
        if row.subject == Subject::HostFloor {
            row.median_ms *= 10.0;
        }
    }
    let costs = CostModel::new(&continuous, &WORKLOAD, &small(), f32(), None).unwrap();
    let figures = costs.predict(&small()).unwrap().figures;
    // Two steps of 60 ms only decode; two prompts, of 200 ms together, each join a step that is 20 ms longer for the two
    // sequences than for one.
    close(
        figures.throughput_tokens_per_second,
        10_000.0 / (2.0 * 60.0 + 200.0 + 2.0 * 20.0),
    );
}

#[test]
fn continuous_batching_shares_steps_among_those_that_run_and_counts_their_state_alone() {
    let mut continuous = times();
    continuous.key.engine = "vllm".to_owned();
    let mut costs = CostModel::new(&continuous, &WORKLOAD, &small(), f32(), None).unwrap();
    // Without a prompt by itself its share of two: 19 ms for both, and 20.6 ms of steps that both share.
    let both = costs.predict(&small()).unwrap().figures;
    close(both.throughput_tokens_per_second, 2.0 * 5.0 / 0.0396);
    let whole = both.memory_bytes.unwrap();
    costs.run_together(1).unwrap();
    let message = costs.predict(&small()).unwrap_err().to_string();
    assert!(message.contains("sequences 2 to 2, but 1"), "{message}");
    for (subject, milliseconds) in [
        (Subject::Base { vocab_size: 100 }, 0.1),
        (Subject::Block(attention(2)), 0.5),
        (Subject::Block(mlp(64)), 0.25),
    ] {
        for context in [10, 13] {
            let point = Point::Decode {
                context,
                sequences: 1,
            };
            continuous
                .rows
                .extend(table(&[(subject.clone(), point, milliseconds, 0.0)]).rows);
        }
    }
    let mut costs = CostModel::new(&continuous, &WORKLOAD, &small(), f32(), None).unwrap();
    costs.run_together(1).unwrap();
    let one = costs.predict(&small()).unwrap().figures;
    // Each request has its own four steps of 3 · 0.75 + 0.1 ms, and 9.5 ms of prefill.
    close(one.throughput_tokens_per_second, 5.0 / (0.0095 + 4.0 * 0.00235));
    // One of the two waits for the other, so the median has waited half a course.
    close(one.first_token_ms, 9.5 + 0.5 * (9.5 + 9.4));
    close(one.latency_ms, 1.5 * (9.5 + 9.4));
    close(one.per_token_ms, 2.35);
    close(one.memory_bytes, whole - 3.0 * 2.0 * 16.0 * 15.0 * 4.0);
}
