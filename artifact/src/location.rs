//! From a URL and the environment to an open object store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};

use crate::identity::away;
use crate::{Error, Result};

/// One request, body included, unless the environment says otherwise; a longer transfer is made of several.
const REQUEST_DEADLINE: &str = "60 s";
/// Requests that failed in a way that may pass are repeated this long.
const RETRY_DEADLINE: Duration = Duration::from_secs(60);

const CACHE_DIR: &str = "ESPALIER_CACHE_DIR";
const CACHE_BYTES: &str = "ESPALIER_CACHE_BYTES";

/// How a store is used on this machine. The defaults read the environment.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where files of a remote store are kept for reading, and where new ones are written before they are
    /// uploaded. `ESPALIER_CACHE_DIR`; default: `espalier` in the user's cache directory.
    pub cache_dir: PathBuf,
    /// The most bytes that downloaded files may take there; a file larger than that is kept alone.
    /// `ESPALIER_CACHE_BYTES`; default: 64 GiB.
    pub cache_bytes: u64,
}

impl Options {
    /// The defaults, as the environment has them.
    ///
    /// # Errors
    /// When a variable is set to what is not understood.
    pub fn from_env() -> Result<Self> {
        let directory = |variable: &str| {
            std::env::var_os(variable)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let cache_dir = directory(CACHE_DIR)
            .or_else(|| Some(directory("XDG_CACHE_HOME")?.join("espalier")))
            .or_else(|| Some(directory("HOME")?.join(".cache").join("espalier")))
            .unwrap_or_else(|| std::env::temp_dir().join("espalier"));
        let cache_bytes = match std::env::var(CACHE_BYTES) {
            Err(_) => 64 << 30,
            Ok(value) => value.trim().parse().map_err(|_| Error::Setting {
                variable: CACHE_BYTES,
                value,
                expected: "a number of bytes, as in 68719476736",
            })?,
        };
        Ok(Self {
            cache_dir,
            cache_bytes,
        })
    }
}

/// An object store that was opened.
pub(crate) struct Opened {
    pub store: Arc<dyn ObjectStore>,
    /// As others on this machine, or anywhere for a bucket, open the same store.
    pub location: String,
    /// What to set when the store refuses.
    pub remedy: &'static str,
    /// The root, where it is a directory.
    pub root: Option<PathBuf>,
}

const S3_REMEDY: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or run where an instance role \
    gives them), AWS_REGION, and for a server of your own AWS_ENDPOINT, with AWS_ALLOW_HTTP=true for plain HTTP";
const GS_REMEDY: &str = "set GOOGLE_SERVICE_ACCOUNT to the path of a service account's key \
    (or GOOGLE_APPLICATION_CREDENTIALS, or run where an instance identity gives one)";
const AZ_REMEDY: &str = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY \
    (or AZURE_STORAGE_CLIENT_ID, AZURE_STORAGE_CLIENT_SECRET and AZURE_STORAGE_TENANT_ID)";

/// What becomes of a directory that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Absent {
    /// It is made.
    Make,
    /// It is refused: it may be one that is not mounted.
    Refuse,
}

/// Opens what a location names; speaks to nobody.
pub(crate) fn open(location: &str, absent: Absent) -> Result<Opened> {
    let (scheme, rest) = match location.split_once("://") {
        None => return local(location, location, absent),
        Some(parts) => parts,
    };
    if scheme == "file" {
        if !rest.starts_with('/') {
            return Err(refused(location, "a file URL needs an absolute path"));
        }
        return local(location, rest, absent);
    }
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_matches('/');
    if !matches!(scheme, "s3" | "gs" | "az") {
        return Err(refused(location, &format!("scheme {scheme:?} is not supported")));
    }
    if bucket.is_empty() {
        return Err(refused(location, "it names no bucket"));
    }
    if bucket.contains(['?', '#', '@', ':', '%']) || prefix.contains(['?', '#', '%']) {
        return Err(refused(
            location,
            "user names, ports and queries have no place in it: those come from the environment",
        ));
    }
    let prefix =
        object_store::path::Path::parse(prefix).map_err(|error| refused(location, &error.to_string()))?;
    let location = if prefix.as_ref().is_empty() {
        format!("{scheme}://{bucket}")
    } else {
        format!("{scheme}://{bucket}/{prefix}")
    };
    let (store, remedy): (Arc<dyn ObjectStore>, _) = match scheme {
        "s3" => (within(s3(&location, bucket)?, prefix), S3_REMEDY),
        "gs" => (within(gs(&location, bucket)?, prefix), GS_REMEDY),
        _ => (within(az(&location, bucket)?, prefix), AZ_REMEDY),
    };
    Ok(Opened {
        store,
        location,
        remedy,
        root: None,
    })
}

fn refused(location: &str, reason: &str) -> Error {
    Error::Location {
        location: location.to_owned(),
        reason: reason.to_owned(),
    }
}

fn within(store: impl ObjectStore, prefix: object_store::path::Path) -> Arc<dyn ObjectStore> {
    if prefix.as_ref().is_empty() {
        Arc::new(store)
    } else {
        Arc::new(PrefixStore::new(store, prefix))
    }
}

fn local(location: &str, directory: &str, absent: Absent) -> Result<Opened> {
    if directory.is_empty() {
        return Err(refused(location, "it is empty"));
    }
    let failed = |source| Error::Io {
        path: PathBuf::from(directory),
        source,
    };
    match absent {
        Absent::Make => std::fs::create_dir_all(directory).map_err(failed)?,
        Absent::Refuse if Path::new(directory).is_dir() => {}
        Absent::Refuse => return Err(away(directory, "there is no such directory")),
    }
    let root = std::fs::canonicalize(Path::new(directory)).map_err(failed)?;
    let store = LocalFileSystem::new_with_prefix(&root)
        .map_err(|source| refused(location, &source.to_string()))?
        .with_fsync(true);
    Ok(Opened {
        store: Arc::new(store),
        location: root.display().to_string(),
        remedy: "make the directory readable and writable",
        root: Some(root),
    })
}

fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            max_backoff: Duration::from_secs(5),
            ..BackoffConfig::default()
        },
        max_retries: 8,
        retry_timeout: RETRY_DEADLINE,
    }
}

fn set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

fn missing(location: &str, variable: &str, remedy: &str) -> Error {
    Error::Access {
        location: location.to_owned(),
        reason: format!("{variable} is not set"),
        remedy: remedy.to_owned(),
    }
}

fn s3(location: &str, bucket: &str) -> Result<impl ObjectStore> {
    for (given, needed) in [
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
    ] {
        if set(given) && !set(needed) {
            return Err(missing(location, needed, S3_REMEDY));
        }
    }
    let allows_http = std::env::var("AWS_ALLOW_HTTP")
        .is_ok_and(|value| matches!(value.to_lowercase().as_str(), "true" | "1" | "yes" | "on"));
    for variable in ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"] {
        let Ok(endpoint) = std::env::var(variable) else {
            continue;
        };
        let reason = if endpoint.starts_with("http://") && !allows_http {
            format!("{variable} is {endpoint:?}, which is not encrypted")
        } else if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            format!("{variable} is {endpoint:?}, which is no URL")
        } else {
            continue;
        };
        return Err(Error::Access {
            location: location.to_owned(),
            reason,
            remedy: "give an https:// URL, or set AWS_ALLOW_HTTP=true for a network you trust".to_owned(),
        });
    }
    let mut builder = AmazonS3Builder::from_env();
    if !set("AWS_TIMEOUT") {
        let timeout = AmazonS3ConfigKey::Client(ClientConfigKey::Timeout);
        builder = builder.with_config(timeout, REQUEST_DEADLINE);
    }
    builder
        .with_allow_http(allows_http)
        .with_retry(retry())
        .with_bucket_name(bucket)
        .build()
        .map_err(|source| unusable(location, &source, S3_REMEDY))
}

fn gs(location: &str, bucket: &str) -> Result<impl ObjectStore> {
    let mut builder = GoogleCloudStorageBuilder::from_env();
    if !set("GOOGLE_TIMEOUT") {
        let timeout = GoogleConfigKey::Client(ClientConfigKey::Timeout);
        builder = builder.with_config(timeout, REQUEST_DEADLINE);
    }
    builder
        .with_retry(retry())
        .with_bucket_name(bucket)
        .build()
        .map_err(|source| unusable(location, &source, GS_REMEDY))
}

fn az(location: &str, container: &str) -> Result<impl ObjectStore> {
    if !set("AZURE_STORAGE_ACCOUNT_NAME") && !set("AZURE_STORAGE_USE_EMULATOR") {
        return Err(missing(location, "AZURE_STORAGE_ACCOUNT_NAME", AZ_REMEDY));
    }
    let mut builder = MicrosoftAzureBuilder::from_env();
    if !set("AZURE_TIMEOUT") {
        let timeout = AzureConfigKey::Client(ClientConfigKey::Timeout);
        builder = builder.with_config(timeout, REQUEST_DEADLINE);
    }
    builder
        .with_retry(retry())
        .with_container_name(container)
        .build()
        .map_err(|source| unusable(location, &source, AZ_REMEDY))
}

fn unusable(location: &str, source: &object_store::Error, remedy: &str) -> Error {
    Error::Access {
        location: location.to_owned(),
        reason: source.to_string(),
        remedy: remedy.to_owned(),
    }
}
