//! A log as a stream of messages: what was kept, then what comes.

use espalier_proto::v1::TaskLogsResponse;
use futures::Stream;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tonic::Status;

use crate::logs::{Kept, News};
use crate::scheduler::AttemptId;

/// Lines in a message: at most so many, so that a message stays far below its limit.
const LINES: usize = 256;

type Message = Result<TaskLogsResponse, Status>;

/// What was kept.
pub fn kept(attempt: AttemptId, kept: Kept) -> impl Stream<Item = Message> + Send {
    let lagged = kept.left_out > 0;
    let chunks: Vec<Vec<String>> = kept.lines.chunks(LINES).map(<[String]>::to_vec).collect();
    let messages = chunks.into_iter().enumerate().map(move |(index, lines)| {
        Ok(TaskLogsResponse {
            attempt: attempt.0,
            lines,
            lagged: lagged && index == 0,
        })
    });
    futures::stream::iter(messages)
}

/// What comes, until the attempt has ended.
pub fn news(attempt: AttemptId, news: broadcast::Receiver<News>) -> impl Stream<Item = Message> + Send {
    futures::stream::unfold((news, false), move |(mut news, mut lagged)| async move {
        loop {
            match news.recv().await {
                Ok(News(lines)) => {
                    let message = TaskLogsResponse {
                        attempt: attempt.0,
                        lines: lines.to_vec(),
                        lagged,
                    };
                    return Some((Ok(message), (news, false)));
                }
                Err(RecvError::Lagged(_)) => lagged = true,
                Err(RecvError::Closed) => return None,
            }
        }
    })
}
