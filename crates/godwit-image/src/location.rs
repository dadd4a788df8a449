//! The location of a repository, and opening the repository there.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, Certificate, ClientOptions, ObjectStore, RetryConfig};

use crate::credentials::CredentialsFile;
use crate::error::RepositoryError;

/// Longest wait for a connection to a store.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest wait for the next bytes of an answer.
const READ: Duration = Duration::from_secs(15);
/// Longest wait for a whole answer: a manifest may have 160 MiB.
const WHOLE: Duration = Duration::from_secs(300);
/// Time after which no request is retried.
const RETRY: Duration = Duration::from_secs(10);

/// Variables that name a source of credentials.
const SOURCES: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_METADATA_ENDPOINT",
];

/// Credentials for an S3 store.
#[derive(Clone)]
pub struct Keys {
    /// The access key's id.
    pub id: String,
    /// The secret.
    pub secret: String,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// The location of a repository: `s3://BUCKET[/FOLDER]` or a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A directory that exists.
    Directory(PathBuf),
    /// A bucket of an S3-compatible store. Region and credentials come from the environment: `AWS_REGION`,
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, or `AWS_PROFILE` and
    /// `AWS_SHARED_CREDENTIALS_FILE`, a file that is read for each request.
    S3 {
        /// The bucket.
        bucket: String,
        /// The folder in the bucket; empty for the whole bucket.
        folder: String,
        /// The address of a store other than Amazon's: `http[s]://HOST[:PORT]`.
        endpoint: Option<String>,
        /// A PEM file with certificates of authorities that are trusted beside the system's.
        authority: Option<PathBuf>,
    },
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("s3://") {
            let (bucket, folder) = rest.split_once('/').unwrap_or((rest, ""));
            let folder = folder.trim_matches('/');
            let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
            if bucket.is_empty() || !bucket.chars().all(plain) || folder.contains("..") {
                return Err(format!("{text:?} is not s3://BUCKET or s3://BUCKET/FOLDER"));
            }
            return Ok(Self::S3 {
                bucket: bucket.to_owned(),
                folder: folder.to_owned(),
                endpoint: None,
                authority: None,
            });
        }
        let path = text.strip_prefix("file://").unwrap_or(text);
        if path.starts_with('/') {
            return Ok(Self::Directory(PathBuf::from(path)));
        }
        Err(format!(
            "{text:?} is no repository: give s3://BUCKET, s3://BUCKET/FOLDER, or a directory's path from /"
        ))
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::S3 {
                bucket,
                folder,
                endpoint,
                ..
            } => {
                write!(f, "s3://{bucket}")?;
                if !folder.is_empty() {
                    write!(f, "/{folder}")?;
                }
                match endpoint {
                    Some(endpoint) => write!(f, " at {endpoint}"),
                    None => Ok(()),
                }
            }
        }
    }
}

impl Location {
    /// Returns this location at the store with this address.
    ///
    /// # Errors
    /// The location is a directory, or the address is not the URL of a host.
    pub fn at(self, address: String) -> Result<Self, String> {
        let rest = address
            .strip_prefix("http://")
            .or_else(|| address.strip_prefix("https://"));
        match (self, rest) {
            // Locations are shown and logged, so this error does not repeat the address either.
            _ if address.contains('@') => Err(String::from(
                "an endpoint with a user in it is refused: credentials belong into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )),
            (_, None | Some("")) => Err(format!(
                "{address:?} is not http://HOST:PORT or https://HOST"
            )),
            (Self::Directory(path), _) => Err(format!(
                "{} is a directory, which has no endpoint",
                path.display()
            )),
            (
                Self::S3 {
                    bucket,
                    folder,
                    authority,
                    ..
                },
                Some(_),
            ) => Ok(Self::S3 {
                bucket,
                folder,
                endpoint: Some(address.trim_end_matches('/').to_owned()),
                authority,
            }),
        }
    }

    /// Returns this location with the certificate authorities in this PEM file trusted too.
    ///
    /// # Errors
    /// The location is a directory.
    pub fn trusting(self, file: PathBuf) -> Result<Self, String> {
        match self {
            Self::Directory(path) => Err(format!(
                "{} is a directory, which shows no certificate",
                path.display()
            )),
            Self::S3 {
                bucket,
                folder,
                endpoint,
                ..
            } => Ok(Self::S3 {
                bucket,
                folder,
                endpoint,
                authority: Some(file),
            }),
        }
    }

    /// Opens the store with these credentials or those of the environment. Sends no request to an S3 store.
    pub(crate) fn open(
        &self,
        keys: Option<&Keys>,
    ) -> Result<Arc<dyn ObjectStore>, RepositoryError> {
        let refused = |why: String| RepositoryError::Open {
            repository: self.to_string(),
            why,
        };
        match self {
            Self::Directory(path) => {
                if !path.is_dir() {
                    return Err(RepositoryError::NoDirectory {
                        repository: self.to_string(),
                    });
                }
                let store = LocalFileSystem::new_with_prefix(path)
                    .map_err(|error| refused(error.to_string()))?;
                Ok(Arc::new(store.with_fsync(true)))
            }
            Self::S3 {
                bucket,
                folder,
                endpoint,
                authority,
            } => {
                let mut client = ClientOptions::new()
                    .with_connect_timeout(CONNECT)
                    .with_read_timeout(READ)
                    .with_timeout(WHOLE)
                    .with_allow_http(
                        endpoint
                            .as_ref()
                            .is_some_and(|url| url.starts_with("http://")),
                    );
                if let Some(file) = authority {
                    for certificate in certificates(file).map_err(refused)? {
                        client = client.with_root_certificate(certificate);
                    }
                }
                let mut builder = AmazonS3Builder::from_env()
                    .with_bucket_name(bucket)
                    .with_client_options(client)
                    .with_retry(RetryConfig {
                        backoff: BackoffConfig::default(),
                        max_retries: 2,
                        retry_timeout: RETRY,
                    });
                if let Some(endpoint) = endpoint {
                    builder = builder.with_endpoint(endpoint);
                }
                if let Some(keys) = keys {
                    builder = builder
                        .with_access_key_id(&keys.id)
                        .with_secret_access_key(&keys.secret);
                } else if std::env::var_os(SOURCES[0]).is_some() {
                    // As in other S3 clients, keys in the environment take precedence over the file that the
                    // environment names.
                } else if let Some(file) = CredentialsFile::of_environment() {
                    builder = builder.with_credentials(Arc::new(file));
                } else if !SOURCES.iter().any(|name| std::env::var_os(name).is_some()) {
                    // Without this check the client would ask the cloud's metadata service and wait for an answer.
                    return Err(refused(String::from(
                        "neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY nor AWS_SHARED_CREDENTIALS_FILE are in the environment",
                    )));
                }
                let store = builder
                    .build()
                    .map_err(|error| refused(error.to_string()))?;
                if folder.is_empty() {
                    return Ok(Arc::new(store));
                }
                Ok(Arc::new(PrefixStore::new(store, folder.as_str())))
            }
        }
    }
}

fn certificates(file: &Path) -> Result<Vec<Certificate>, String> {
    let shown = file.display();
    let pem = std::fs::read(file)
        .map_err(|error| format!("the authority's certificate {shown} cannot be read: {error}"))?;
    match Certificate::from_pem_bundle(&pem) {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(format!("{shown} has no certificate in PEM")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_read_as_they_are_shown() {
        for text in ["s3://images", "s3://images/a/b", "/srv/images"] {
            let location: Location = text.parse().expect(text);
            assert_eq!(location.to_string(), text);
        }
        let at = "s3://x"
            .parse::<Location>()
            .unwrap()
            .at(String::from("http://h:9000/"));
        assert_eq!(at.unwrap().to_string(), "s3://x at http://h:9000");
        for wrong in [
            "",
            "images",
            "s3://",
            "s3:///x",
            "s3://a b",
            "s3://a/../b",
            "http://x",
        ] {
            assert!(wrong.parse::<Location>().is_err(), "{wrong}");
        }
        let directory: Location = "/srv".parse().unwrap();
        assert!(directory.clone().at(String::from("http://h")).is_err());
        assert!(directory.trusting(PathBuf::from("/ca.pem")).is_err());
        let bucket: Location = "s3://x".parse().unwrap();
        assert!(bucket.clone().at(String::from("h:9000")).is_err());
        let refused = bucket.at(String::from("https://me:secret@h")).unwrap_err();
        assert!(!refused.contains("secret"), "{refused}");
    }
}
