//! Whether a timing can be believed: it cannot when the process was stopped meanwhile (a signal, a suspended
//! machine), or when others kept its threads waiting for a processor.
//!
//! A thread that does nothing but wake up every few milliseconds notices every moment in which the process
//! did not run. The scheduler's own account of how long threads waited for a processor tells contention, and
//! tells it from a stop. A disturbed sample is thrown away and taken again. One that overlaps a stop is never
//! kept: past a bound the measurement fails with what disturbed it. Contention that does not end is another
//! matter: past a bound samples are kept, for medians stand some of it, and whoever asked is told
//! ([`Quiet::gave_up`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// How often the watching thread wakes up.
const BEAT: Duration = Duration::from_millis(10);
/// The process did not run for this long: it was stopped.
const STOPPED: Duration = Duration::from_millis(200);
/// The share of the time in which threads had work and waited for a processor; above it others took it.
const CONTENDED_SHARE: f64 = 0.2;
/// Samples shorter than this say too little about contention.
const CONTENDED_LEAST: Duration = Duration::from_millis(20);
/// Samples of one task that may overlap a stop.
const STOPS: u64 = 20;
/// Samples of one task that are taken again because of contention.
const CONTENTIONS: u64 = 12;

/// What the watching thread has noticed.
#[derive(Debug, Default)]
struct Noticed {
    /// When it woke up last, nanoseconds on the watch's own clock.
    last_beat: AtomicU64,
    /// Its own waiting for a processor until then, nanoseconds.
    last_waited: AtomicU64,
    stops: AtomicU64,
    /// Milliseconds of all stops.
    stopped_ms: AtomicU64,
    thread: AtomicU64,
    over: AtomicBool,
}

/// A watch over the process, for as long as something is measured.
#[derive(Debug)]
pub struct Quiet {
    start: Instant,
    noticed: Arc<Noticed>,
    watcher: Option<JoinHandle<()>>,
    discarded_stopped: AtomicU64,
    discarded_contended: AtomicU64,
}

/// Where the counters stand at the beginning of a sample.
#[derive(Debug, Clone, Copy)]
struct Before {
    at: Duration,
    stops: u64,
    account: Account,
    suspended: Duration,
}

/// Time of all threads of this process: computing, and waiting for a processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Account {
    computed: Duration,
    waited: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Disturbance {
    Stopped,
    Contended(f64),
}

impl Quiet {
    /// Begins to watch.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn watch() -> Result<Self> {
        if Account::of_this_process() == Account::default() {
            tracing::warn!(
                "the system keeps no account of threads that wait for a processor: others that disturb timings are \
                 not noticed"
            );
        }
        let noticed = Arc::new(Noticed::default());
        let (start, watched) = (Instant::now(), Arc::clone(&noticed));
        let watcher = std::thread::Builder::new()
            .name("quiet".to_owned())
            .spawn(move || beat(start, &watched))
            .map_err(|error| Error::Child {
                reason: format!("cannot start the thread that watches over measurements: {error}"),
            })?;
        Ok(Self {
            start,
            noticed,
            watcher: Some(watcher),
            discarded_stopped: AtomicU64::new(0),
            discarded_contended: AtomicU64::new(0),
        })
    }

    /// Takes a sample until it is undisturbed.
    ///
    /// # Errors
    /// Those of `take`; [`Error::TooNoisy`] when samples overlap stops again and again.
    pub fn measure<T>(&self, take: impl FnMut() -> Result<T>) -> Result<T> {
        self.measure_judged_by(|before| self.disturbance(before), take)
    }

    fn measure_judged_by<T>(
        &self,
        disturbance: impl Fn(Before) -> Option<Disturbance>,
        mut take: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            let before = self.look();
            let sample = take()?;
            match disturbance(before) {
                None => return Ok(sample),
                Some(Disturbance::Stopped) => self.discard_stopped()?,
                Some(Disturbance::Contended(share)) => {
                    if !self.discard_contended(share) {
                        return Ok(sample);
                    }
                }
            }
        }
    }

    fn look(&self) -> Before {
        Before {
            at: self.start.elapsed(),
            stops: self.noticed.stops.load(Ordering::SeqCst),
            account: Account::of_this_process(),
            suspended: suspended(),
        }
    }

    /// Whether samples were kept though others took the processors meanwhile.
    pub fn gave_up(&self) -> bool {
        self.discarded_contended.load(Ordering::SeqCst) > CONTENTIONS
    }

    fn disturbance(&self, before: Before) -> Option<Disturbance> {
        let now = self.start.elapsed();
        let noticed = self.noticed.stops.load(Ordering::SeqCst) != before.stops;
        let suspended = suspended().saturating_sub(before.suspended) > STOPPED;
        // A stop may have ended a moment ago, and the watching thread not have been awake since.
        if noticed || suspended || self.noticed.gap(now).is_some() {
            return Some(Disturbance::Stopped);
        }
        let wall = now.saturating_sub(before.at);
        let share = Account::of_this_process().since(before.account).waiting_share();
        (wall >= CONTENDED_LEAST && share > CONTENDED_SHARE).then_some(Disturbance::Contended(share))
    }

    fn discard_stopped(&self) -> Result<()> {
        let discarded = self.discarded_stopped.fetch_add(1, Ordering::SeqCst) + 1;
        let stopped_ms = self.noticed.stopped_ms.load(Ordering::SeqCst);
        tracing::warn!(
            discarded,
            stopped_ms,
            "a sample overlapped a stop and is measured again"
        );
        if discarded < STOPS {
            return Ok(());
        }
        Err(Error::TooNoisy {
            evidence: format!(
                "{discarded} samples overlapped moments in which the process did not run, {stopped_ms} ms in all: \
                 it was stopped, or the machine suspended"
            ),
        })
    }

    /// Whether a sample that others disturbed is taken again.
    fn discard_contended(&self, share: f64) -> bool {
        let discarded = self.discarded_contended.fetch_add(1, Ordering::SeqCst) + 1;
        if discarded <= CONTENTIONS {
            tracing::debug!(share, "others took the processor; the sample is measured again");
            return true;
        }
        if discarded == CONTENTIONS + 1 {
            tracing::warn!(
                share,
                discarded = CONTENTIONS,
                "others keep taking the processor: samples are kept from here on"
            );
        }
        false
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        self.noticed.over.store(true, Ordering::SeqCst);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

impl Noticed {
    /// How long the process did not run before `now`, when that is long; waiting for a processor left aside.
    fn gap(&self, now: Duration) -> Option<Duration> {
        let last = Duration::from_nanos(self.last_beat.load(Ordering::SeqCst));
        let gap = now.checked_sub(last)?.checked_sub(BEAT)?;
        if gap <= STOPPED {
            return None;
        }
        let waited = Account::of_thread(self.thread.load(Ordering::SeqCst)).waited;
        let waited = waited.saturating_sub(Duration::from_nanos(self.last_waited.load(Ordering::SeqCst)));
        gap.checked_sub(waited).filter(|stopped| *stopped > STOPPED)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The watching thread.
fn beat(start: Instant, noticed: &Noticed) {
    // SAFETY: asks for a number.
    let thread = unsafe { libc::gettid() };
    noticed
        .thread
        .store(u64::try_from(thread).unwrap_or(0), Ordering::SeqCst);
    let remember = || {
        let waited = Account::of_thread(noticed.thread.load(Ordering::SeqCst)).waited;
        noticed.last_waited.store(nanoseconds(waited), Ordering::SeqCst);
        noticed
            .last_beat
            .store(nanoseconds(start.elapsed()), Ordering::SeqCst);
    };
    remember();
    while !noticed.over.load(Ordering::SeqCst) {
        std::thread::sleep(BEAT);
        if let Some(stopped) = noticed.gap(start.elapsed()) {
            let milliseconds = u64::try_from(stopped.as_millis()).unwrap_or(u64::MAX);
            noticed.stopped_ms.fetch_add(milliseconds, Ordering::SeqCst);
            noticed.stops.fetch_add(1, Ordering::SeqCst);
        }
        remember();
    }
}

impl Account {
    /// Of one thread of this process; nothing where the system keeps no such account.
    fn of_thread(thread: u64) -> Self {
        std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat"))
            .map(|text| Self::parse(&text))
            .unwrap_or_default()
    }

    fn of_this_process() -> Self {
        let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
            return Self::default();
        };
        let names = threads
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        names.map(Self::of_thread).fold(Self::default(), Self::and)
    }

    /// `/proc/*/schedstat`: nanoseconds on a processor, nanoseconds waiting for one, turns.
    fn parse(text: &str) -> Self {
        let mut fields = text
            .split_whitespace()
            .map(|field| field.parse().map_or(Duration::ZERO, Duration::from_nanos));
        Self {
            computed: fields.next().unwrap_or_default(),
            waited: fields.next().unwrap_or_default(),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            computed: self.computed.saturating_add(other.computed),
            waited: self.waited.saturating_add(other.waited),
        }
    }

    /// Threads that ended meanwhile take their account with them.
    fn since(self, before: Self) -> Self {
        Self {
            computed: self.computed.saturating_sub(before.computed),
            waited: self.waited.saturating_sub(before.waited),
        }
    }

    fn waiting_share(self) -> f64 {
        let all = self.computed.saturating_add(self.waited).as_secs_f64();
        if all > 0.0 {
            self.waited.as_secs_f64() / all
        } else {
            0.0
        }
    }
}

/// How long the machine has been suspended since it started: what one clock counts and the other does not.
fn suspended() -> Duration {
    clock(libc::CLOCK_BOOTTIME).saturating_sub(clock(libc::CLOCK_MONOTONIC))
}

fn clock(which: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to the value above and nowhere else.
    let answer = unsafe { libc::clock_gettime(which, &raw mut time) };
    if answer != 0 {
        return Duration::ZERO;
    }
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_scheduler_s_account_is_read() {
        let account = Account::parse("3000000 1000000 12\n");
        assert_eq!(account.computed, Duration::from_millis(3));
        assert!((account.waiting_share() - 0.25).abs() < 1e-9);
        assert_eq!(Account::parse(""), Account::default());
    }

    #[test]
    fn a_sample_that_overlaps_stops_again_and_again_is_too_noisy() {
        let quiet = Quiet::watch().unwrap();
        let mut taken = 0;
        let answer = quiet.measure(|| {
            taken += 1;
            // As the watching thread would after a stop.
            quiet.noticed.stops.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        assert!(matches!(answer, Err(Error::TooNoisy { .. })));
        assert_eq!(taken, STOPS);
    }

    #[test]
    fn a_sample_that_overlaps_one_stop_is_taken_once_more() {
        let quiet = Quiet::watch().unwrap();
        let mut taken = 0;
        quiet
            .measure(|| {
                taken += 1;
                if taken == 1 {
                    quiet.noticed.stops.fetch_add(1, Ordering::SeqCst);
                }
                Ok(())
            })
            .unwrap();
        assert!(taken >= 2);
    }

    #[test]
    fn a_sample_that_others_disturbed_is_thrown_away_and_taken_again() {
        let quiet = Quiet::watch().unwrap();
        let taken = std::cell::Cell::new(0);
        let others_until_the_third = |_| (taken.get() < 3).then_some(Disturbance::Contended(0.5));
        let sample = quiet.measure_judged_by(others_until_the_third, || {
            taken.set(taken.get() + 1);
            Ok(taken.get())
        });
        assert_eq!(sample.unwrap(), 3, "the undisturbed one, and no other");
        assert!(!quiet.gave_up());
    }

    #[test]
    fn contention_that_does_not_end_is_kept_after_a_while() {
        let quiet = Quiet::watch().unwrap();
        let taken = std::cell::Cell::new(0);
        let samples = || {
            let always = |_| Some(Disturbance::Contended(0.5));
            quiet.measure_judged_by(always, || {
                taken.set(taken.get() + 1);
                Ok(())
            })
        };
        assert!(!quiet.gave_up());
        samples().unwrap();
        assert_eq!(taken.get(), CONTENTIONS + 1);
        assert!(quiet.gave_up());
        samples().unwrap();
        assert_eq!(taken.get(), CONTENTIONS + 2, "from there on none is taken again");
    }

    #[test]
    fn threads_that_wait_for_a_processor_are_noticed() {
        if Account::of_this_process() == Account::default() {
            return;
        }
        let quiet = Quiet::watch().unwrap();
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let before = quiet.look();
        let over = AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            for _ in 0..4 * processors {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(300));
            let seen = quiet.disturbance(before);
            over.store(true, Ordering::Relaxed);
            seen
        });
        // One that was stopped meanwhile on a busy machine is disturbed too.
        assert!(
            matches!(seen, Some(Disturbance::Contended(_) | Disturbance::Stopped)),
            "{seen:?}"
        );
    }
}
