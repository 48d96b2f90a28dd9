//! The way to the loop for the services: every question has a deadline, and who asked in vain is told why.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tonic::Status;

use super::owner::Request;
use crate::http::Vitals;

const ANSWER_DEADLINE: Duration = Duration::from_secs(30);
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// The loop's inbox, and how the loop does. Clones are the same.
#[derive(Debug, Clone)]
pub struct Inbox {
    requests: mpsc::Sender<Request>,
    vitals: Vitals,
    patience: Duration,
}

impl Inbox {
    /// The inbox of the loop that notes what it does in `vitals`.
    pub fn new(requests: mpsc::Sender<Request>, vitals: Vitals) -> Self {
        Self {
            requests,
            vitals,
            patience: ANSWER_DEADLINE,
        }
    }

    /// Asks the loop and waits for its answer, within a deadline.
    ///
    /// # Errors
    /// As the loop answers; DEADLINE_EXCEEDED with what is in its way; UNAVAILABLE while want of room keeps it from
    /// beginning, and when it has stopped.
    pub async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, Status>>) -> Request,
    ) -> Result<T, Status> {
        let stopping = || Status::unavailable("the coordinator is stopping");
        let (reply, answer) = oneshot::channel();
        let exchange = async {
            // Nobody is asked while the journal is replayed: a client that gives up meanwhile has asked nothing.
            while !self.vitals.is_replayed() {
                if let Some(reason) = self.vitals.lacks_room() {
                    return Err(Status::unavailable(reason));
                }
                sleep(BETWEEN_LOOKS).await;
            }
            self.requests.send(request(reply)).await.map_err(|_| stopping())?;
            answer.await.map_err(|_| stopping())?
        };
        let late = |_| Status::deadline_exceeded(self.why_late());
        timeout(self.patience, exchange).await.map_err(late)?
    }

    /// Tells the loop; whether it was there to be told.
    pub async fn tell(&self, request: Request) -> bool {
        self.requests.send(request).await.is_ok()
    }

    fn why_late(&self) -> String {
        let reason = match self.vitals.ready() {
            Ok(()) => "it is too busy".to_owned(),
            Err(reason) => reason,
        };
        let waited = self.patience.as_secs();
        format!(
            "the coordinator has not answered for {waited} s: {reason}; what was asked for may still be done"
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::super::owner::Query;
    use super::*;

    #[tokio::test]
    async fn who_asked_in_vain_is_told_what_is_in_the_way() {
        let vitals = Vitals::default();
        vitals.replayed();
        vitals.set_authority(false);
        let (requests, _silent) = mpsc::channel(1);
        let mut inbox = Inbox::new(requests, vitals);
        inbox.patience = Duration::from_millis(20);
        let asked = inbox.ask(|reply| Request::Query(Query::Workers { reply }));
        let late = asked.await.unwrap_err();
        assert_eq!(late.code(), tonic::Code::DeadlineExceeded);
        assert!(late.message().contains("authority is not held"), "{late}");
    }

    #[tokio::test]
    async fn nothing_is_asked_of_a_loop_whose_journal_is_still_replayed() {
        let (requests, mut loops) = mpsc::channel(1);
        let vitals = Vitals::default();
        let mut inbox = Inbox::new(requests, vitals.clone());
        inbox.patience = Duration::from_millis(60);
        let late = inbox.ask(|reply| Request::Query(Query::Workers { reply })).await;
        assert!(
            late.unwrap_err()
                .message()
                .contains("the journal is being replayed")
        );
        assert!(
            loops.try_recv().is_err(),
            "it would be done though nobody waits for it"
        );
        inbox.patience = Duration::from_secs(60);
        let asking =
            tokio::spawn(async move { inbox.ask(|reply| Request::Query(Query::Workers { reply })).await });
        vitals.replayed();
        match loops.recv().await {
            Some(Request::Query(Query::Workers { reply })) => reply.send(Ok(Vec::new())).unwrap(),
            other => panic!("{other:?}"),
        }
        assert!(asking.await.unwrap().unwrap().is_empty());
    }
}
