//! What a browser, a probe and a scraper see on the port that gRPC has too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use common::{DEADLINE, Place, client};

/// The status and body of a page.
async fn page(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    tokio::time::timeout(DEADLINE, read)
        .await
        .expect("no answer")
        .unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

#[tokio::test]
async fn probes_and_grpc_share_a_port() {
    let place = Place::new();
    let coordinator = place.coordinator().await;
    let address = coordinator.address();
    assert_eq!(page(address, "/healthz").await.0, 200);
    assert_eq!(
        page(address, "/readyz").await,
        (200, r#"{"status":"ok"}"#.to_owned())
    );
    assert_eq!(page(address, "/nothing").await.0, 404);
    let (jobs, _) = client(&coordinator).await.list(10, "", &[]).await.unwrap();
    assert!(jobs.is_empty());
    coordinator.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn a_client_that_says_nothing_does_not_hold_up_the_end() {
    let place = Place::new();
    let coordinator = place.coordinator().await;
    let silent = TcpStream::connect(coordinator.address()).await.unwrap();
    let mut halting = TcpStream::connect(coordinator.address()).await.unwrap();
    halting
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: x")
        .await
        .unwrap();
    let mut half_open = TcpStream::connect(coordinator.address()).await.unwrap();
    half_open
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let asked = Instant::now();
    coordinator.shutdown(DEADLINE).await.unwrap();
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    drop((silent, halting, half_open));
}
