//! Turns for the loop: from its inbox, on a thread of its own, until it is told to stop.

use std::thread;

use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::owner::{BATCH, Owner, Request, TICK};
use crate::metrics::Metrics;
use crate::{Result, http, shipping};

/// Gives the loop its turns until it is told to stop.
pub fn run(
    mut owner: Owner,
    mut inbox: mpsc::Receiver<Request>,
    vitals: &http::Vitals,
    metrics: &Metrics,
    progress: &shipping::Progress,
    stop: &CancellationToken,
) -> Result<()> {
    let mut batch = Vec::with_capacity(BATCH);
    while !owner.is_stopping() {
        if stop.is_cancelled() {
            // What waits is taken; nothing more comes, whoever could still send.
            inbox.close();
        }
        // Without authority requests stay in the batch; when it is full of them the inbox has to wait.
        let room = BATCH.saturating_sub(batch.len());
        if room == 0 {
            thread::sleep(TICK);
            if stop.is_cancelled() {
                break;
            }
        } else if inbox.blocking_recv_many(&mut batch, room) == 0 {
            break;
        }
        owner.turn(&mut batch)?;
        vitals.turned();
        vitals.set_disk_full(owner.is_full());
        metrics.set_disk_full(owner.is_full());
        vitals.set_authority(owner.holds());
        progress.durable(owner.durable());
    }
    inbox.close();
    Ok(())
}

/// Wakes the loop regularly, until told to stop.
pub async fn tick(requests: mpsc::Sender<Request>, stop: CancellationToken) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = interval.tick() => {}
        }
        if requests.send(Request::Tick).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::journal::disk::SystemDisk;
    use crate::service::surroundings::{Beside, Surroundings, SystemClock, SystemSecrets, Work};
    use crate::service::{CoordinatorOptions, PipelinePlanner};
    use crate::tables::Tables;

    struct Never;

    impl Beside for Never {
        fn spawn(&self, _: Work) {}
    }

    #[test]
    fn a_stop_for_which_the_inbox_had_no_room_is_seen_though_somebody_could_still_send() {
        let directory = tempfile::tempdir().unwrap();
        let surroundings = Surroundings {
            clock: Arc::new(SystemClock::default()),
            beside: Arc::new(Never),
            disk: Arc::new(SystemDisk),
            secrets: Arc::new(SystemSecrets::new().unwrap()),
            tables: Tables::default(),
            store: String::new(),
            store_id: String::new(),
            witness: None,
        };
        let options = CoordinatorOptions::new(directory.path());
        let owner = Owner::open(options, Arc::new(PipelinePlanner::default()), surroundings).unwrap();
        let (requests, inbox) = mpsc::channel(4);
        while requests.try_send(Request::Tick).is_ok() {}
        let stop = CancellationToken::new();
        stop.cancel();
        let thread = thread::spawn(move || {
            let (vitals, progress) = (http::Vitals::default(), shipping::Progress::default());
            run(owner, inbox, &vitals, &Metrics::default(), &progress, &stop)
        });
        let began = Instant::now();
        while !thread.is_finished() {
            assert!(began.elapsed() < Duration::from_secs(60), "the loop goes on");
            thread::sleep(Duration::from_millis(10));
        }
        thread.join().unwrap().unwrap();
        drop(requests);
    }
}
