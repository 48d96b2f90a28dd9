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

    async fn wait_for(&self, text: &str) {
        let began = Instant::now();
        while self.with(text) == 0 {
            assert!(began.elapsed() < DEADLINE, "`{text}` is not said");
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
    let gone = "the terms in the store cannot be read; authority ends";
    lines.wait_for(gone).await;
    // It is looked at many times meanwhile.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(lines.with(gone), 1);
    let _ = std::fs::remove_dir_all(&store);
    std::fs::rename(&elsewhere, &store).unwrap();
    lines.wait_for("the terms in the store can be read again").await;
    assert_eq!(lines.with("the coordinator has stopped"), 0);
    running.shutdown(DEADLINE).await.unwrap();
    assert_eq!(lines.with("the coordinator has stopped"), 1);
}
