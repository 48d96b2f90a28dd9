//! The thread that keeps the tables: opens them, builds them where it has to, and reads along with the journal.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::project;
use super::rows::Place;
use super::store::Store;
use super::{DIRECTORY, Shared, open};
use crate::archive::Archives;
use crate::journal::disk::Disk;
use crate::journal::{self, Fold, Step, Tailing};
use crate::scheduler::{Event, State};

/// Frames since the start that mean a rush.
const RUSH_FRAMES: u64 = 4096;
/// How often the journal is looked at.
const INTERVAL: Duration = Duration::from_millis(100);
/// Of the time that work takes, this many times as much is left to others: the tables can wait.
const REST: u32 = 9;
/// But no longer at a time: after everything was built anew there is much to catch up with.
const LONGEST_REST: Duration = Duration::from_secs(1);
/// How long tables that could not keep up wait for the rush to end before they are built anew.
const RUSH: Duration = Duration::from_secs(30);

/// Why the tables cannot go on as they are.
enum Trouble {
    /// They cannot be used any more.
    Tables(String),
    /// The journal cannot be read; the tables are as good as they were.
    Journal(String),
}

/// Everything the thread has.
#[derive(Debug)]
pub struct Follower {
    disk: Arc<dyn Disk>,
    data_dir: PathBuf,
    durable: Arc<AtomicU64>,
    /// The last frame that was durable before the thread began.
    history: u64,
    shared: Arc<Shared>,
}

impl Follower {
    pub fn new(disk: Arc<dyn Disk>, data_dir: &Path, durable: Arc<AtomicU64>, shared: Arc<Shared>) -> Self {
        Self {
            disk,
            data_dir: data_dir.to_owned(),
            history: durable.load(Ordering::Acquire),
            durable,
            shared,
        }
    }

    /// Runs until told to stop. Tables that fail are built anew once; if those fail too, there are none until
    /// the next start.
    pub fn run(&mut self) {
        for attempt in 0..2 {
            let Some(store) = self.open() else {
                return;
            };
            match catch_unwind(AssertUnwindSafe(|| self.keep(store))) {
                Ok(Ok(())) => return,
                Ok(Err(Trouble::Journal(what))) => {
                    tracing::warn!(%what, "the tables do not follow the journal until the next start");
                    return;
                }
                Ok(Err(Trouble::Tables(what))) => self.let_go(&what, attempt),
                Err(_) => self.let_go("writing them failed", attempt),
            }
        }
    }

    fn stops(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    fn let_go(&self, what: &str, attempt: u32) {
        self.shared.database().take();
        self.shared.reflects.store(0, Ordering::Release);
        let again = if attempt == 0 {
            "they are built anew"
        } else {
            "there are none until the next start"
        };
        tracing::warn!(what, "the tables cannot be used: {again}");
        self.set_aside();
    }

    /// Opens the tables that are there, or begins new ones.
    fn open(&self) -> Option<Store> {
        let directory = self.data_dir.join(DIRECTORY);
        let opened = open::open(&directory).and_then(|store| {
            let durable = self.durable.load(Ordering::Acquire);
            if store.position() > durable {
                return Err(format!(
                    "they reflect frame {}, the journal ends with {durable}",
                    store.position()
                ));
            }
            Ok(store)
        });
        let error = match opened {
            Ok(store) => return Some(store),
            Err(error) => error,
        };
        tracing::warn!(%error, "the tables are set aside and built anew");
        self.set_aside();
        match open::open(&directory) {
            Ok(store) => Some(store),
            Err(error) => {
                tracing::warn!(%error, "no tables can be built: there are none until the next start");
                None
            }
        }
    }

    fn set_aside(&self) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Err(error) = open::set_aside(&self.data_dir.join(DIRECTORY), since.as_millis()) {
            tracing::warn!(%error, "the tables cannot be set aside");
        }
    }

    fn keep(&self, mut store: Store) -> Result<(), Trouble> {
        let journal = self.data_dir.join("journal");
        let mut tailing = Tailing::after(Arc::clone(&self.disk), &journal, store.position());
        let mut is_shown = false;
        while !self.stops() {
            let durable = self.durable.load(Ordering::Acquire);
            if tailing.last() >= durable {
                if !is_shown {
                    *self.shared.database() = Some(store.database().clone());
                    is_shown = true;
                }
                self.shared.reflects.store(store.position(), Ordering::Release);
                self.wait(INTERVAL);
                continue;
            }
            let mut began = Instant::now();
            if follow(&mut store, &mut tailing, durable)? == Step::Gone {
                // What was there at the start is history; where much came since, there is a rush, in which building
                // anew would cost memory for a state that is about to change, and be in vain.
                if durable.saturating_sub(self.history) > RUSH_FRAMES {
                    self.wait(RUSH);
                    began = Instant::now();
                }
                if self.stops() {
                    break;
                }
                let from = self.after_gap(&mut store, &journal, tailing.last())?;
                tailing = Tailing::after(Arc::clone(&self.disk), &journal, from);
            }
            if is_shown {
                self.shared.reflects.store(store.position(), Ordering::Release);
            }
            self.wait(began.elapsed().saturating_mul(REST).min(LONGEST_REST));
        }
        store.close();
        Ok(())
    }

    /// Lets so much time pass, unless it is told to stop. Who tells it wakes it up once: it looks before it sleeps.
    fn wait(&self, pause: Duration) {
        let began = Instant::now();
        while !self.stops() {
            let left = pause.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            thread::park_timeout(left);
        }
    }

    /// The frame after which to go on when the next one is not there: after everything was built anew from what
    /// is left, or after a gap that a snapshot bridged.
    fn after_gap(&self, store: &mut Store, journal: &Path, last: u64) -> Result<u64, Trouble> {
        let segments = journal::segments(self.disk.as_ref(), journal).map_err(in_journal)?;
        let goes_back = segments
            .first()
            .is_some_and(|(first, _)| *first <= last.saturating_add(1));
        if !goes_back {
            return self.rebuild(store, journal);
        }
        let next = segments
            .iter()
            .map(|(first, _)| *first)
            .find(|first| *first > last.saturating_add(1));
        let next =
            next.ok_or_else(|| Trouble::Journal(format!("frame {} is missing", last.saturating_add(1))))?;
        Ok(next.saturating_sub(1))
    }

    /// Takes what archives and the newest snapshot know; gives the frame after which the journal goes on.
    fn rebuild(&self, store: &mut Store, journal: &Path) -> Result<u64, Trouble> {
        tracing::info!("the tables are built from archives, the newest snapshot and the journal");
        let archives = Archives::new(Arc::clone(&self.disk), &self.data_dir);
        for job in archives
            .jobs()
            .map_err(|error| Trouble::Journal(error.to_string()))?
        {
            match archives.read(job) {
                Ok(archive) => in_change(store, 0, |change| project::archive(change, &archive))?,
                Err(error) => tracing::warn!(%error, "the tables go without it"),
            }
            if self.stops() {
                return Ok(0);
            }
        }
        let snapshots = journal::snapshots(self.disk.as_ref(), journal).map_err(in_journal)?;
        for (sequence, path) in snapshots {
            let mut state = State::default();
            let json = journal::read_snapshot(self.disk.as_ref(), &path, sequence);
            if json.is_ok_and(|json| state.restore(&json).is_ok()) {
                in_change(store, 0, |change| project::snapshot(change, &state))?;
                break;
            }
        }
        let segments = journal::segments(self.disk.as_ref(), journal).map_err(in_journal)?;
        let from = segments.first().map_or(0, |(first, _)| first.saturating_sub(1));
        in_change(store, from, |_| Ok(()))?;
        Ok(from)
    }
}

fn in_journal(error: journal::Error) -> Trouble {
    Trouble::Journal(error.to_string())
}

fn in_change(
    store: &mut Store,
    position: u64,
    fill: impl FnOnce(&mut super::store::Change<'_>) -> Result<(), String>,
) -> Result<(), Trouble> {
    let mut change = store.change();
    fill(&mut change).map_err(Trouble::Tables)?;
    change.commit(position).map_err(Trouble::Tables)
}

/// Reads some frames and stores what they say, in one change.
fn follow(store: &mut Store, tailing: &mut Tailing, durable: u64) -> Result<Step, Trouble> {
    let mut change = store.change();
    let mut failed = None;
    loop {
        let was = tailing.last();
        let step = tailing.step(durable, &mut |frame, payload| {
            let events: Vec<Event> = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
            for (index, event) in (0..).zip(&events) {
                if let Err(what) = project::event(&mut change, Place { frame, index }, event) {
                    failed.get_or_insert(what);
                }
            }
            Ok(())
        });
        let step = step.map_err(in_journal)?;
        if let Some(what) = failed {
            return Err(Trouble::Tables(what));
        }
        let last = tailing.last();
        let is_enough = change.is_enough() || last >= durable || last == was;
        if step == Step::Gone || is_enough {
            if last > 0 {
                change.commit(last).map_err(Trouble::Tables)?;
            }
            return Ok(step);
        }
    }
}
