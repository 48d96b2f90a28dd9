//! Virtual time, and the queue of what happens in it. Nothing here waits: time is where the next event is.

use std::collections::BinaryHeap;
use std::fmt;
use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

/// A moment, in microseconds since the simulation began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// How long after the beginning.
    pub fn elapsed(self) -> Duration {
        Duration::from_micros(self.0)
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, later: Duration) -> Self {
        let micros = u64::try_from(later.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }
}

impl Sub for Time {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0 / 1_000_000;
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        let (seconds, micros) = (seconds % 60, self.0 % 1_000_000);
        write!(formatter, "{hours}:{minutes:02}:{seconds:02}.{micros:06}")
    }
}

/// The clocks of one machine: what its processes are told the time is.
#[derive(Debug, Default)]
pub struct MachineClock {
    micros: AtomicU64,
    /// How far its wall clock is off.
    off_ms: AtomicI64,
}

impl MachineClock {
    /// It is this moment.
    pub fn set(&self, now: Time) {
        self.micros.store(now.0, Ordering::Relaxed);
    }

    /// What the machine believes.
    pub fn now(&self) -> Time {
        Time(self.micros.load(Ordering::Relaxed))
    }

    /// Something took its time.
    pub fn advance(&self, by: Duration) {
        self.set(self.now() + by);
    }

    /// Lets the wall clock jump.
    pub fn jump(&self, by_ms: i64) {
        self.off_ms.fetch_add(by_ms, Ordering::Relaxed);
    }
}

impl espalier_coordinator::service::surroundings::Clock for MachineClock {
    fn elapsed(&self) -> Duration {
        self.now().elapsed()
    }

    fn unix_ms(&self) -> i64 {
        let since = i64::try_from(self.now().0 / 1000).unwrap_or(0);
        1_700_000_000_000 + since + self.off_ms.load(Ordering::Relaxed)
    }
}

/// What is to happen, the earliest first; at one moment, in the order it was asked for.
#[derive(Debug)]
pub struct Queue<E> {
    now: Time,
    asked: u64,
    waiting: BinaryHeap<Entry<E>>,
}

#[derive(Debug)]
struct Entry<E> {
    at: Time,
    order: u64,
    event: E,
}

impl<E> Queue<E> {
    /// At the beginning of time.
    pub fn new() -> Self {
        Self {
            now: Time::default(),
            asked: 0,
            waiting: BinaryHeap::new(),
        }
    }

    /// When it is.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Lets something happen then; at once if that has passed.
    pub fn at(&mut self, at: Time, event: E) {
        self.asked += 1;
        self.waiting.push(Entry {
            at: at.max(self.now),
            order: self.asked,
            event,
        });
    }

    /// Lets something happen so much later.
    pub fn after(&mut self, delay: Duration, event: E) {
        self.at(self.now + delay, event);
    }

    /// Goes to the next event.
    pub fn advance(&mut self) -> Option<E> {
        let entry = self.waiting.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap gives the greatest first.
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_one_moment_come_in_the_order_they_were_asked_for() {
        let mut queue = Queue::new();
        queue.after(Duration::from_secs(2), "late");
        queue.after(Duration::from_secs(1), "first");
        queue.after(Duration::from_secs(1), "second");
        let order: Vec<_> = std::iter::from_fn(|| queue.advance()).collect();
        assert_eq!(order, ["first", "second", "late"]);
        assert_eq!(queue.now(), Time(2_000_000));
    }
}
