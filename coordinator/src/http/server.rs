//! One listener for HTTP/1.1 and HTTP/2 with prior knowledge, so for browsers and for gRPC.
//!
//! Every connection is a task of its own, bounded in number, and none can hold up the end: after the drain
//! time what is left is cut.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Connections at a time; more wait in the listener's queue.
const CONNECTIONS: usize = 2048;
/// Requests at a time on one connection.
const STREAMS: u32 = 256;
/// How long a new connection may take to say which protocol it speaks, and an HTTP/1 one to say its request.
const FIRST_WORDS: Duration = Duration::from_secs(10);
/// An HTTP/1 connection is ended after so long: pages are short, and a reader that has stopped must not stay.
const HTTP1_LIFE: Duration = Duration::from_secs(300);
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// How long connections may take to end what they do, once told to stop.
const DRAIN: Duration = Duration::from_secs(5);
/// How long to leave the listener alone when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// What HTTP/2 with prior knowledge begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Serves until told to stop, then lets connections end what they do, within a deadline.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accept(&listener, &room) => accepted,
        };
        let (stream, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "no connection can be taken");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (router, stop) = (router.clone(), stop.clone());
        connections.spawn(async move {
            if let Err(error) = connection(stream, router, stop).await {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(permit);
        });
    }
    drop(listener);
    let drained = timeout(DRAIN, async { while connections.join_next().await.is_some() {} });
    if drained.await.is_err() {
        tracing::info!(
            connections = connections.len(),
            "connections that do not end are cut"
        );
        connections.shutdown().await;
    }
}

async fn accept(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
) -> io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = Arc::clone(room).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken) -> Result<(), Failure> {
    stream.set_nodelay(true)?;
    let spoken = tokio::select! {
        () = stop.cancelled() => return Ok(()),
        spoken = timeout(FIRST_WORDS, speaks_http2(&stream)) => spoken,
    };
    let is_http2 = spoken.map_err(|_| "it did not say which protocol it speaks")??;
    let builder = builder(is_http2);
    let serving = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut serving = pin!(serving);
    let life = async {
        match is_http2 {
            // Pings tell whether anybody is there.
            true => std::future::pending().await,
            false => sleep(HTTP1_LIFE).await,
        }
    };
    tokio::select! {
        ended = serving.as_mut() => return ended,
        () = stop.cancelled() => {}
        () = life => {}
    }
    serving.as_mut().graceful_shutdown();
    timeout(DRAIN, serving)
        .await
        .map_err(|_| "it did not end in time")?
}

/// Waits until the client has said enough to tell its protocol; takes none of it.
async fn speaks_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut start = [0; PREFACE.len()];
    loop {
        let seen = stream.peek(&mut start).await?;
        let said = start.get(..seen).unwrap_or_default();
        if said.is_empty() || !PREFACE.starts_with(said) {
            return Ok(false);
        }
        if seen == PREFACE.len() {
            return Ok(true);
        }
        // A part of the preface: peeking does not wait for the rest.
        sleep(Duration::from_millis(5)).await;
    }
}

fn builder(is_http2: bool) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_concurrent_streams(STREAMS)
        // Clients that follow and leave reset their streams; that is no attack.
        .max_pending_accept_reset_streams(usize::try_from(STREAMS).ok());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(FIRST_WORDS);
    if is_http2 {
        builder.http2_only()
    } else {
        builder.http1_only()
    }
}
