//! What the log says, and how often.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{DEADLINE, Place, Story};
use espalier_coordinator::{Coordinator, CoordinatorOptions};

#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn with(&self, text: &str) -> usize {
        let said = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        said.matches(text).count()
    }

    async fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < DEADLINE, "{what}: not so");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Everything on one thread, whose log is read.
#[tokio::test]
async fn a_store_that_vanishes_and_comes_back_and_a_stop_are_said_once_each() {
    let lines = Lines::default();
    let written = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || written.clone());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    let place = Place::new();
    let store = place.directory.path().join("store");
    let options = CoordinatorOptions {
        store: Some(store.display().to_string()),
        term_lease: Duration::from_secs(2),
        ..place.options()
    };
    let running = Coordinator::start_with(options, Arc::new(Story)).await.unwrap();
    let elsewhere = place.directory.path().join("elsewhere");
    std::fs::rename(&store, &elsewhere).unwrap();
    let gone = || lines.with("the terms in the store cannot be read; authority ends");
    let again = || lines.with("the terms in the store can be read again");
    let is_away = || gone() > again();
    lines.wait_until("the store is said to be gone", is_away).await;
    // It is looked at many times meanwhile.
    tokio::time::sleep(Duration::from_secs(1)).await;
    lines.wait_until("the store is said to be gone", is_away).await;
    // A look that took too long on a busy machine was said as well, and that it was over.
    let before = again();
    assert_eq!(gone(), before + 1, "it is said again and again");
    let began = Instant::now();
    // Somebody may put something into the empty store meanwhile.
    while std::fs::rename(&elsewhere, &store).is_err() {
        assert!(began.elapsed() < DEADLINE, "the store cannot be put back");
        let _ = std::fs::remove_dir_all(&store);
    }
    lines
        .wait_until("the store is said to be back", || again() > before)
        .await;
    assert!(again() <= gone(), "it is said again and again");
    assert_eq!(lines.with("the coordinator has stopped"), 0);
    running.shutdown(DEADLINE).await.unwrap();
    assert_eq!(lines.with("the coordinator has stopped"), 1);
}
