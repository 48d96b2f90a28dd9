//! The suite against a real S3 server: moto, from a virtual environment that the test target makes.
//!
//! What a store is opened with comes from the environment, so the cases run in processes of their own: each
//! test here starts a server and then this program again, for the ignored tests, with the server's address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod suite;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use espalier_artifact::ArtifactStore;
use object_store::ObjectStoreExt;
use object_store::aws::AmazonS3Builder;

/// Which location a process of its own opens.
const LOCATION: &str = "ESPALIER_TEST_LOCATION";

/// A location, the variables set beside it, and what is said of them.
type Refused = (
    &'static str,
    &'static [(&'static str, &'static str)],
    &'static str,
);

struct Server {
    process: Child,
    address: SocketAddr,
    /// What it says is written there.
    _directory: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// Starts one; none where moto is not installed. `open_calls` are answered before keys are checked.
    fn start(open_calls: Option<u32>) -> Option<Self> {
        let installed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.cache/venv-moto/bin/moto_server");
        let program = std::env::var_os("ESPALIER_MOTO_SERVER").map_or(installed, PathBuf::from);
        if !program.is_file() {
            let program = program.display();
            // Not by a macro: what those print is shown of failing tests only.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: no S3 server at {program}: `tests/checks/moto.sh` installs it"
            );
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = Command::new(program);
        // It says which port it was given.
        command.args(["-H", "127.0.0.1", "-p", "0"]);
        if let Some(calls) = open_calls {
            command.env("INITIAL_NO_AUTH_ACTION_COUNT", calls.to_string());
        }
        let process = command
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut server = Self {
            process,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            _directory: directory,
        };
        let start = Instant::now();
        server.address = loop {
            let said = std::fs::read_to_string(&log).unwrap();
            if let Some(address) = listening_on(&said) {
                break address;
            }
            assert!(
                start.elapsed() < Duration::from_secs(120),
                "moto does not listen: {said}"
            );
            std::thread::sleep(Duration::from_millis(50));
        };
        Some(server)
    }

    fn run(&self, test: &str, location: &str, variables: &[(&str, &str)]) -> (bool, String) {
        run(self.address, test, location, variables)
    }
}

/// The address of the server, once it has said it to the end of the line.
fn listening_on(said: &str) -> Option<SocketAddr> {
    let (_, after) = said.split_once("Running on http://")?;
    let (address, _) = after.split_once('\n')?;
    address.trim().parse().ok()
}

/// Runs one of the ignored tests with a server's address, a location and these variables; gives what it printed.
fn run(server: SocketAddr, test: &str, location: &str, variables: &[(&str, &str)]) -> (bool, String) {
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", test, "--nocapture", "--test-threads=1"])
        .env_clear()
        .env("ESPALIER_CACHE_DIR", cache.path())
        .env(LOCATION, location)
        .env("AWS_ENDPOINT", format!("http://{server}"))
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_ACCESS_KEY_ID", "anybody")
        .env("AWS_SECRET_ACCESS_KEY", "anything")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&printed).into_owned(),
    )
}

/// A request without a signature, which moto takes for this.
fn make_bucket(server: SocketAddr, bucket: &str) {
    let mut stream = TcpStream::connect(server).unwrap();
    let request = format!("PUT /{bucket} HTTP/1.0\r\nHost: {server}\r\nContent-Length: 0\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(
        answer
            .split_whitespace()
            .nth(1)
            .is_some_and(|status| status == "200"),
        "{answer}"
    );
}

#[test]
fn everything_that_holds_in_a_directory_holds_in_s3() {
    let Some(server) = Server::start(None) else { return };
    make_bucket(server.address, "orchard");
    let (passed, printed) = server.run("in_s3", "s3://orchard/some/prefix", &[]);
    assert!(passed, "{printed}");
}

#[test]
fn a_store_that_cannot_be_used_is_said_at_the_start_with_what_to_set() {
    let Some(server) = Server::start(None) else { return };
    let cases: &[Refused] = &[
        ("s3://no-such-bucket", &[], "there is no such bucket"),
        ("s3://", &[], "it names no bucket"),
        ("s4://orchard", &[], "scheme \"s4\" is not supported"),
        (
            "s3://key:secret@orchard/x",
            &[],
            "those come from the environment",
        ),
        (
            "s3://orchard",
            &[("AWS_ALLOW_HTTP", "false")],
            "set AWS_ALLOW_HTTP=true",
        ),
        (
            "s3://orchard",
            &[("AWS_SECRET_ACCESS_KEY", "")],
            "AWS_SECRET_ACCESS_KEY is not set",
        ),
        (
            "s3://orchard",
            &[("AWS_ENDPOINT", "nonsense")],
            "AWS_ENDPOINT is \"nonsense\", which is no URL",
        ),
        (
            "s3://orchard",
            &[("ESPALIER_CACHE_BYTES", "lots")],
            "ESPALIER_CACHE_BYTES is \"lots\"",
        ),
        ("az://orchard", &[], "AZURE_STORAGE_ACCOUNT_NAME is not set"),
    ];
    for (location, variables, expected) in cases {
        let (passed, printed) = server.run("is_refused", location, variables);
        assert!(passed, "{location} {variables:?}: {printed}");
        assert!(printed.contains(expected), "{location} {variables:?}: {printed}");
    }
}

#[test]
fn wrong_credentials_are_said_at_the_start_with_the_variables_that_hold_them() {
    let Some(server) = Server::start(Some(0)) else {
        return;
    };
    let (passed, printed) = server.run("is_refused", "s3://orchard", &[]);
    assert!(passed, "{printed}");
    assert!(
        printed.contains("access is denied") && printed.contains("set AWS_ACCESS_KEY_ID"),
        "{printed}"
    );
}

#[test]
fn a_proxy_that_the_environment_names_is_the_one_that_is_asked() {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap();
    let asked = std::thread::spawn(move || {
        let (mut stream, _) = proxy.accept().unwrap();
        let mut request = [0_u8; 4096];
        let read = stream.read(&mut request).unwrap();
        let answer = "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(answer.as_bytes()).unwrap();
        String::from_utf8_lossy(request.get(..read).unwrap()).into_owned()
    });
    // Nobody listens at the server's own address.
    let server = SocketAddr::from(([127, 0, 0, 1], 9));
    let proxy = format!("http://{address}");
    let (passed, printed) = run(server, "is_refused", "s3://orchard", &[("AWS_PROXY_URL", &proxy)]);
    assert!(passed, "{printed}");
    assert!(printed.contains("access is denied"), "{printed}");
    let request = asked.join().unwrap();
    assert!(request.starts_with("GET http://127.0.0.1:9/orchard"), "{request}");
}

#[tokio::test]
#[ignore = "run by everything_that_holds_in_a_directory_holds_in_s3, with a server"]
async fn in_s3() {
    let store = ArtifactStore::open(&std::env::var(LOCATION).unwrap()).unwrap();
    store.check().await.unwrap();
    assert_eq!(store.location(), "s3://orchard/some/prefix");
    suite::bytes_come_back_under_the_name_of_their_content(&store).await;
    suite::a_file_is_taken_in_whole_and_read_back(&store).await;
    let bucket = AmazonS3Builder::from_env()
        .with_bucket_name("orchard")
        .build()
        .unwrap();
    let damage = async |key: &str, bytes: &[u8]| {
        let key = format!("some/prefix/{key}").into();
        bucket.put(&key, bytes.to_vec().into()).await.unwrap();
    };
    suite::damage_is_refused(&store, damage).await;
    suite::every_attempt_has_a_record_of_its_own(&store).await;
    suite::an_area_keeps_what_its_owner_puts_and_lists_it_in_order(&store).await;
    suite::of_sixteen_claims_at_once_exactly_one_wins(&store).await;
    suite::an_interrupted_upload_leaves_nothing_visible(&store).await;
    suite::a_store_has_one_id_for_good(&store).await;
    a_damaged_copy_in_the_cache_is_fetched_again(&store).await;
}

async fn a_damaged_copy_in_the_cache_is_fetched_again(store: &ArtifactStore) {
    let name = store.put_bytes(b"medlar".to_vec()).await.unwrap();
    let copy = store.get_file(name.as_str()).await.unwrap();
    std::fs::write(&copy, b"rotten").unwrap();
    let again = store.get_file(name.as_str()).await.unwrap();
    assert_eq!(std::fs::read(again).unwrap(), b"medlar");
}

#[tokio::test]
#[ignore = "run by the tests of what is refused, with a server"]
async fn is_refused() {
    let opened = ArtifactStore::open(&std::env::var(LOCATION).unwrap());
    let refused = match opened {
        Ok(store) => store.check().await.unwrap_err(),
        Err(error) => error,
    };
    println!("{refused}");
}
