//! A histogram of durations made of atomics: nobody waits to be counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds, seconds; above the last is everything else.
const TASKS: [f64; 14] = [
    0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0, 172_800.0,
];
const DISKS: [f64; 14] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0,
];

/// How long things took.
#[derive(Debug)]
pub struct Durations {
    bounds: [f64; 14],
    counts: [AtomicU64; 15],
    microseconds: AtomicU64,
}

impl Durations {
    /// Of tasks: a millisecond to two days.
    pub fn of_tasks() -> Self {
        Self::new(TASKS)
    }

    /// Of a disk's answers: 50 µs to 5 s.
    pub fn of_disks() -> Self {
        Self::new(DISKS)
    }

    fn new(bounds: [f64; 14]) -> Self {
        Self {
            bounds,
            counts: std::array::from_fn(|_| AtomicU64::new(0)),
            microseconds: AtomicU64::new(0),
        }
    }

    /// Counts one.
    pub fn observe(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let microseconds = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.microseconds.fetch_add(microseconds, Ordering::Relaxed);
    }

    /// The sum in seconds, the number, and the number in each bucket by its upper bound.
    pub fn read(&self) -> (f64, u64, Vec<(f64, u64)>) {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let number = buckets.iter().map(|(_, count)| count).sum();
        let sum = Duration::from_micros(self.microseconds.load(Ordering::Relaxed));
        (sum.as_secs_f64(), number, buckets)
    }
}
