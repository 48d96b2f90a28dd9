//! Cross-entropy and forward KL over the head, in chunks of rows: logits and their gradient share one
//! buffer, so that vocabulary × tokens is never held at once.

use rayon::prelude::*;

use super::matmul::{Threads, View, ViewMut, multiply};
use super::rows::{expect, expect_shape};
use super::simd::{self, exponential, multiply_add, vectorised};
use crate::ops::{Head, HeadGradient, Losses, TokenBatch};
use crate::tensor::Buffer;
use crate::{Result, Tensor};

/// Rows whose logits are held at once.
const CHUNK_ROWS: usize = 128;

/// Elements whose f32 sums are added into f64.
const SPAN: usize = 1024;
/// Independent partial sums.
const LANES: usize = 16;

vectorised! {
    /// `Σ e^(p − p_log) ((p − p_log) − (s − s_log))` over logits `p` of the parent and `s` of the student.
    fn divergence_row(parent: &[f32], parent_log: f32, student: &[f32], student_log: f32) -> f64 {
        let offset = student_log - parent_log;
        let mut total = 0.0f64;
        for (parent, student) in parent.chunks(SPAN).zip(student.chunks(SPAN)) {
            let mut lanes = [0.0f32; LANES];
            let (parents, parent_rest) = parent.as_chunks::<LANES>();
            let (students, student_rest) = student.as_chunks::<LANES>();
            for (parent, student) in parents.iter().zip(students) {
                for lane in 0..LANES {
                    let weight = exponential::<FMA>(parent[lane] - parent_log);
                    let gap = parent[lane] - student[lane] + offset;
                    lanes[lane] = multiply_add::<FMA>(weight, gap, lanes[lane]);
                }
            }
            for (parent, student) in parent_rest.iter().zip(student_rest) {
                let weight = exponential::<FMA>(*parent - parent_log);
                total += f64::from(weight * (*parent - *student + offset));
            }
            total += lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>();
        }
        total
    }

    /// `student = scale (e^(student − s_log) − e^(parent − p_log))`.
    fn divergence_gradient_row(
        student: &mut [f32],
        student_log: f32,
        parent: &[f32],
        parent_log: f32,
        scale: f32,
    ) {
        for (student, parent) in student.iter_mut().zip(parent) {
            let gap = exponential::<FMA>(*student - student_log) - exponential::<FMA>(*parent - parent_log);
            *student = scale * gap;
        }
    }

    /// `x = scale · e^(x − log)`.
    fn scaled_softmax_row(x: &mut [f32], log: f32, scale: f32) {
        for x in x {
            *x = scale * exponential::<FMA>(*x - log);
        }
    }
}

/// `ln Σ e^x`.
fn log_sum(x: &[f32]) -> f64 {
    let largest = simd::maximum(x);
    f64::from(largest) + simd::sum_of_exponentials(x, largest).ln()
}

fn expect_head(operation: &'static str, name: &str, head: Head<'_>) -> Result<()> {
    expect(
        operation,
        head.hidden.columns() == head.weight.columns() && head.weight.rows() > 0,
        || format!("{name} weight of a vocabulary x {}", head.hidden.columns()),
        || format!("{} x {}", head.weight.rows(), head.weight.columns()),
    )
}

/// Where the gradient of a loss goes while its chunks are worked through.
struct Gradient<'a> {
    head: Head<'a>,
    hidden: Tensor,
    weight: &'a mut Tensor,
    scale: f32,
}

impl<'a> Gradient<'a> {
    fn of(operation: &'static str, head: Head<'a>, wanted: HeadGradient<'a>) -> Result<Self> {
        let (rows, columns) = (head.weight.rows(), head.weight.columns());
        expect_shape(operation, "gradient.weight", wanted.weight, rows, columns)?;
        Ok(Self {
            head,
            hidden: Tensor::unspecified(head.hidden.rows(), head.hidden.columns())?,
            weight: wanted.weight,
            scale: wanted.scale,
        })
    }

    /// Carries the gradient of a chunk's logits into the hidden states (written) and the weight (added).
    fn carry(&mut self, slopes: &[f32], first: usize, rows: usize) -> Result<()> {
        let vocabulary = self.head.weight.rows();
        let slopes = View::new(slopes, rows, vocabulary, vocabulary)?;
        let (columns, leading) = (self.hidden.columns(), self.hidden.leading_dimension());
        let target = self.hidden.host_mut()?;
        let target = target.get_mut(first * leading..).unwrap_or_default();
        let target = ViewMut::new(target, rows, columns, leading)?;
        multiply(target, slopes, View::of(self.head.weight)?, false, Threads::All)?;
        let hidden = self.head.hidden.narrow_rows(first, rows)?;
        let weight = ViewMut::of(self.weight)?;
        multiply(
            weight,
            slopes.transposed(),
            View::of(&hidden)?,
            true,
            Threads::All,
        )
    }
}

/// Logits of `hidden`, whole rows one after another.
fn logits_into(logits: &mut [f32], hidden: &Tensor, weight: &Tensor) -> Result<()> {
    let vocabulary = weight.rows();
    let out = ViewMut::new(logits, hidden.rows(), vocabulary, vocabulary)?;
    multiply(
        out,
        View::of(hidden)?,
        View::of(weight)?.transposed(),
        false,
        Threads::All,
    )
}

/// Losses of rows, as a tensor.
fn column(losses: Vec<f32>) -> Result<Tensor> {
    let rows = losses.len();
    Tensor::from_vec(losses, rows, 1)
}

pub(super) fn cross_entropy(
    head: Head<'_>,
    targets: &TokenBatch,
    gradient: Option<HeadGradient<'_>>,
) -> Result<Losses> {
    const OPERATION: &str = "cross_entropy";
    expect_head(OPERATION, "head", head)?;
    let (rows, vocabulary) = (head.hidden.rows(), head.weight.rows());
    targets.expect_targets(OPERATION, rows, vocabulary)?;
    let targets = &targets.host()?.targets;
    let mut gradient = gradient
        .map(|wanted| Gradient::of(OPERATION, head, wanted))
        .transpose()?;
    let mut logits = Buffer::unspecified(CHUNK_ROWS.min(rows) * vocabulary);
    let mut losses = Vec::with_capacity(rows);
    let scale = gradient.as_ref().map(|gradient| gradient.scale);
    for first in (0..rows).step_by(CHUNK_ROWS) {
        let count = CHUNK_ROWS.min(rows - first);
        let hidden = head.hidden.narrow_rows(first, count)?;
        let chunk = &mut logits[..count * vocabulary];
        logits_into(chunk, &hidden, head.weight)?;
        let part = chunk
            .par_chunks_mut(vocabulary)
            .zip(&targets[first..first + count])
            .map(|(row, target)| cross_entropy_row(row, *target, scale));
        losses.par_extend(part);
        if let Some(gradient) = &mut gradient {
            gradient.carry(chunk, first, count)?;
        }
    }
    Ok(Losses {
        rows: column(losses)?,
        hidden_gradient: gradient.map(|gradient| gradient.hidden),
    })
}

/// The loss of one row, whose logits become their gradient when there is a scale.
fn cross_entropy_row(row: &mut [f32], target: Option<u32>, scale: Option<f32>) -> f32 {
    let Some(target) = target else {
        row.fill(0.0);
        return 0.0;
    };
    let target = target as usize;
    let log = log_sum(row);
    let logit = row.get(target).copied().unwrap_or(f32::NAN);
    if let Some(scale) = scale {
        scaled_softmax_row(row, log as f32, scale);
        if let Some(slope) = row.get_mut(target) {
            *slope -= scale;
        }
    }
    (log - f64::from(logit)) as f32
}

pub(super) fn distillation(
    student: Head<'_>,
    parent: Head<'_>,
    gradient: Option<HeadGradient<'_>>,
) -> Result<Losses> {
    const OPERATION: &str = "distillation";
    expect_pair(OPERATION, student, parent)?;
    let mut gradient = gradient
        .map(|wanted| Gradient::of(OPERATION, student, wanted))
        .transpose()?;
    let (rows, vocabulary) = (student.hidden.rows(), student.weight.rows());
    let mut student_logits = Buffer::unspecified(CHUNK_ROWS.min(rows) * vocabulary);
    let mut parent_logits = Buffer::unspecified(CHUNK_ROWS.min(rows) * vocabulary);
    let mut losses = Vec::with_capacity(rows);
    let scale = gradient.as_ref().map(|gradient| gradient.scale);
    for first in (0..rows).step_by(CHUNK_ROWS) {
        let count = CHUNK_ROWS.min(rows - first);
        let students = &mut student_logits[..count * vocabulary];
        let parents = &mut parent_logits[..count * vocabulary];
        logits_into(
            students,
            &student.hidden.narrow_rows(first, count)?,
            student.weight,
        )?;
        logits_into(parents, &parent.hidden.narrow_rows(first, count)?, parent.weight)?;
        let part = students
            .par_chunks_mut(vocabulary)
            .zip(parents.par_chunks(vocabulary))
            .map(|(student, parent)| {
                let (student_log, parent_log) = (log_sum(student) as f32, log_sum(parent) as f32);
                let loss = divergence_row(parent, parent_log, student, student_log);
                if let Some(scale) = scale {
                    divergence_gradient_row(student, student_log, parent, parent_log, scale);
                }
                loss as f32
            });
        losses.par_extend(part);
        if let Some(gradient) = &mut gradient {
            gradient.carry(students, first, count)?;
        }
    }
    Ok(Losses {
        rows: column(losses)?,
        hidden_gradient: gradient.map(|gradient| gradient.hidden),
    })
}

fn expect_pair(operation: &'static str, student: Head<'_>, parent: Head<'_>) -> Result<()> {
    expect_head(operation, "student", student)?;
    expect_head(operation, "parent", parent)?;
    expect(
        operation,
        student.weight.rows() == parent.weight.rows() && student.hidden.rows() == parent.hidden.rows(),
        || {
            format!(
                "a student of {} rows, vocabulary {}",
                parent.hidden.rows(),
                parent.weight.rows()
            )
        },
        || {
            format!(
                "{} rows, vocabulary {}",
                student.hidden.rows(),
                student.weight.rows()
            )
        },
    )
}

pub(super) fn distillation_many(students: &[Head<'_>], parent: Head<'_>) -> Result<Vec<Tensor>> {
    const OPERATION: &str = "distillation_many";
    for student in students {
        expect_pair(OPERATION, *student, parent)?;
    }
    expect_head(OPERATION, "parent", parent)?;
    let (rows, vocabulary) = (parent.hidden.rows(), parent.weight.rows());
    let mut parent_logits = Buffer::unspecified(CHUNK_ROWS.min(rows) * vocabulary);
    let mut student_logits = Buffer::unspecified(CHUNK_ROWS.min(rows) * vocabulary);
    let mut losses = vec![Vec::with_capacity(rows); students.len()];
    for first in (0..rows).step_by(CHUNK_ROWS) {
        let count = CHUNK_ROWS.min(rows - first);
        let parents = &mut parent_logits[..count * vocabulary];
        logits_into(parents, &parent.hidden.narrow_rows(first, count)?, parent.weight)?;
        let parents = &*parents;
        let logs: Vec<f32> = parents
            .par_chunks(vocabulary)
            .map(|row| log_sum(row) as f32)
            .collect();
        for (student, losses) in students.iter().zip(&mut losses) {
            let chunk = &mut student_logits[..count * vocabulary];
            logits_into(chunk, &student.hidden.narrow_rows(first, count)?, student.weight)?;
            let pairs = chunk
                .par_chunks(vocabulary)
                .zip(parents.par_chunks(vocabulary))
                .zip(&logs);
            losses.par_extend(pairs.map(|((student, parent), parent_log)| {
                divergence_row(parent, *parent_log, student, log_sum(student) as f32) as f32
            }));
        }
    }
    losses.into_iter().map(column).collect()
}
