#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use super::*;

const JOB: JobId = JobId(1);

fn attempt(number: u64) -> AttemptId {
    AttemptId(number)
}

fn lines(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|line| format!("line {line:06}")).collect()
}

/// Small enough to overflow in a test: a line with its time takes 37 bytes.
fn small() -> Options {
    Options {
        head_bytes: 370,
        tail_bytes: 740,
        total_bytes: 1 << 20,
        attempts: 100,
    }
}

struct Place {
    directory: tempfile::TempDir,
    logs: Logs,
    thread: JoinHandle<()>,
}

impl Place {
    fn new(options: Options) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (logs, thread) = Logs::open(directory.path(), options).unwrap();
        Self {
            directory,
            logs,
            thread,
        }
    }

    /// Another coordinator on the same disk.
    fn again(self, options: Options) -> Self {
        let Self {
            directory,
            logs,
            thread,
        } = self;
        drop(logs);
        thread.join().unwrap();
        let (logs, thread) = Logs::open(directory.path(), options).unwrap();
        Self {
            directory,
            logs,
            thread,
        }
    }

    async fn read(&self, number: u64, tail: usize) -> Kept {
        self.logs.read(JOB, attempt(number), tail).await.unwrap()
    }
}

#[tokio::test]
async fn logs_outlive_their_worker() {
    let place = Place::new(Options::default());
    place.logs.append(
        JOB,
        attempt(7),
        0,
        vec!["loss 3.2".to_owned(), "out of memory".to_owned()],
    );
    place.logs.ended(attempt(7));
    // The worker is gone, and so is the coordinator that it told.
    let place = place.again(Options::default());
    let kept = place.read(7, 0).await;
    assert_eq!(kept.left_out, 0);
    assert_eq!(
        kept.lines,
        [
            "1970-01-01T00:00:00.000Z loss 3.2",
            "1970-01-01T00:00:00.000Z out of memory"
        ]
    );
    assert_eq!(
        place.read(7, 1).await.lines,
        ["1970-01-01T00:00:00.000Z out of memory"]
    );
    assert_eq!(place.read(8, 0).await, Kept::default());
}

#[tokio::test]
async fn a_long_log_keeps_its_beginning_and_its_end_and_says_what_is_missing() {
    let place = Place::new(small());
    for batch in 0..100 {
        place
            .logs
            .append(JOB, attempt(1), 0, lines(batch * 10..batch * 10 + 10));
    }
    let kept = place.read(1, 0).await;
    let shown = kept.lines.len() - 1;
    assert_eq!(usize::try_from(kept.left_out).unwrap() + shown, 1000, "{kept:?}");
    assert!(kept.lines[0].ends_with("line 000000"));
    assert!(kept.lines[9].ends_with("line 000009"));
    assert_eq!(
        kept.lines[10],
        format!("… {} lines were left out here", kept.left_out)
    );
    assert!(kept.lines.last().unwrap().ends_with("line 000999"));
    let size = std::fs::metadata(index::path(
        place.directory.path(),
        LogId {
            job: JOB,
            attempt: attempt(1),
        },
    ));
    assert!(size.unwrap().len() < 370 + 2 * 740 + 64);
}

#[tokio::test]
async fn all_logs_together_are_bounded_and_the_oldest_go() {
    let options = Options {
        attempts: 3,
        ..small()
    };
    let place = Place::new(options.clone());
    for number in [1, 2, 3, 1, 4] {
        place.logs.append(JOB, attempt(number), 0, lines(0..1));
    }
    assert!(place.read(2, 0).await.lines.is_empty(), "written to longest ago");
    assert_eq!(place.read(1, 0).await.lines.len(), 2);
    let place = place.again(Options {
        attempts: 1,
        ..options
    });
    let mut left = 0;
    for number in 1..5 {
        left += usize::from(!place.read(number, 0).await.lines.is_empty());
    }
    assert_eq!(left, 1, "what an earlier coordinator left counts too");
}

#[tokio::test]
async fn who_follows_gets_every_line_once_and_is_let_go_at_the_end() {
    let place = Place::new(Options::default());
    place.logs.append(JOB, attempt(1), 0, lines(0..3));
    let (kept, mut news) = place.logs.follow(JOB, attempt(1), 2).await.unwrap();
    assert_eq!((kept.lines.len(), kept.left_out), (2, 1));
    place.logs.append(JOB, attempt(2), 0, lines(0..1));
    place.logs.append(JOB, attempt(1), 0, lines(3..5));
    place.logs.ended(attempt(1));
    let followed = async {
        let mut seen = Vec::new();
        while let Ok(News(lines)) = news.recv().await {
            seen.extend(lines.iter().cloned());
        }
        seen
    };
    let seen = tokio::time::timeout(Duration::from_secs(30), followed)
        .await
        .unwrap();
    assert_eq!(seen.len(), 2);
    assert!(seen[0].ends_with("line 000003") && seen[1].ends_with("line 000004"));
}

#[tokio::test]
async fn lines_that_found_no_room_are_counted_in_the_log() {
    let place = Place::new(Options::default());
    let log = LogId {
        job: JOB,
        attempt: attempt(1),
    };
    place.logs.append(JOB, attempt(1), 0, lines(0..1));
    assert_eq!(place.read(1, 0).await.left_out, 0);
    place.logs.shared.miss(log, 4);
    place.logs.append(JOB, attempt(1), 0, lines(5..6));
    let kept = place.read(1, 0).await;
    assert_eq!(kept.left_out, 4);
    assert_eq!(kept.lines[1], "… 4 lines were left out here");
    place.logs.shared.miss(log, 2);
    assert_eq!(
        place.read(1, 0).await.left_out,
        6,
        "even when nothing more is written"
    );
    place.logs.append_after(3, JOB, attempt(1), 0, lines(9..10));
    let kept = place.read(1, 0).await;
    assert_eq!(kept.left_out, 9);
    assert!(
        kept.lines[kept.lines.len() - 2].contains("3 lines")
            && kept.lines[kept.lines.len() - 1].ends_with("9"),
        "in their place: {:?}",
        kept.lines
    );
}

#[test]
fn a_full_queue_never_waits() {
    let (queue, _messages) = sync_channel(1);
    let logs = Logs {
        queue: Some(queue),
        shared: Arc::default(),
    };
    for _ in 0..3 {
        logs.append(JOB, attempt(1), 0, lines(0..10));
    }
    assert_eq!(
        logs.shared.take_missed(LogId {
            job: JOB,
            attempt: attempt(1)
        }),
        20
    );
}

#[tokio::test]
async fn a_forged_mark_is_only_text() {
    let place = Place::new(Options::default());
    place.logs.append(JOB, attempt(1), 0, vec![file::mark(1_000_000)]);
    let kept = place.read(1, 0).await;
    assert_eq!(kept.left_out, 0);
    assert!(kept.lines[0].contains("\\u{1e}1000000"));
}
