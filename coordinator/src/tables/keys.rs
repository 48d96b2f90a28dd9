//! Keys: a letter for the table, then numbers in big-endian order, so that a range is a scan.

use crate::scheduler::{AttemptId, JobId, TaskId, WorkerId};

/// Where the position is kept.
pub const META: &[u8] = b"m";

fn key(table: u8, numbers: &[u64]) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + 8 * numbers.len());
    key.push(table);
    for number in numbers {
        key.extend_from_slice(&number.to_be_bytes());
    }
    key
}

/// The number at this place of a key.
pub fn number(key: &[u8], place: usize) -> Option<u64> {
    let at = place.checked_mul(8)?.checked_add(1)?;
    Some(u64::from_be_bytes(
        key.get(at..at.checked_add(8)?)?.try_into().ok()?,
    ))
}

pub fn worker(worker: WorkerId) -> Vec<u8> {
    key(b'w', &[worker.0])
}

/// Tasks that follow each other, by the first of them.
pub fn tasks(first: TaskId) -> Vec<u8> {
    key(b'r', &[first.0])
}

/// One before any task's range.
pub fn before_tasks() -> Vec<u8> {
    key(b'r', &[])
}

/// A range of a job that is not archived.
pub fn tasks_of(job: JobId, first: TaskId) -> Vec<u8> {
    key(b'j', &[job.0, first.0])
}

pub fn all_tasks_of(job: JobId) -> Vec<u8> {
    key(b'j', &[job.0])
}

pub fn attempt(task: TaskId, attempt: AttemptId) -> Vec<u8> {
    key(b'a', &[task.0, attempt.0])
}

pub fn attempts_of(task: TaskId) -> Vec<u8> {
    key(b'a', &[task.0])
}

pub fn event(job: JobId, frame: u64, index: u64) -> Vec<u8> {
    key(b'e', &[job.0, frame, index])
}

pub fn events_of(job: JobId) -> Vec<u8> {
    key(b'e', &[job.0])
}

pub fn cost(job: JobId, task: TaskId, index: u64) -> Vec<u8> {
    key(b'c', &[job.0, task.0, index])
}

pub fn costs_of(job: JobId) -> Vec<u8> {
    key(b'c', &[job.0])
}

pub fn score(job: JobId, block: u64, task: TaskId, index: u64) -> Vec<u8> {
    key(b's', &[job.0, block, task.0, index])
}

pub fn scores_of(job: JobId) -> Vec<u8> {
    key(b's', &[job.0])
}

pub fn importance(job: JobId, task: TaskId) -> Vec<u8> {
    key(b'i', &[job.0, task.0])
}

pub fn importance_of(job: JobId) -> Vec<u8> {
    key(b'i', &[job.0])
}

pub fn decision(job: JobId, first: TaskId) -> Vec<u8> {
    key(b'd', &[job.0, first.0])
}

pub fn decisions_of(job: JobId) -> Vec<u8> {
    key(b'd', &[job.0])
}
