//! Errors of a repository, each told in one sentence.

use std::path::PathBuf;

use crate::chunk::ChunkId;
use crate::manifest::{ManifestError, ManifestId};
use crate::name::ImageName;

/// The reason why an operation on a repository or an image failed.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// The location or the configuration of the repository is unusable.
    #[error("the repository {repository} cannot be opened: {why}")]
    Open {
        /// The repository's location.
        repository: String,
        /// The reason.
        why: String,
    },
    /// The directory is missing: not created yet, or its file system is not mounted.
    #[error("the repository {repository} cannot be opened: there is no such directory")]
    NoDirectory {
        /// The repository's location.
        repository: String,
    },
    /// The repository does not answer, or not in time.
    #[error("the repository {repository} does not answer: {why}")]
    Down {
        /// The repository's location.
        repository: String,
        /// The reason.
        why: String,
    },
    /// The repository does not know the credentials, or the credentials do not suffice.
    #[error("the repository {repository} refuses the credentials it was shown: {why}")]
    Credentials {
        /// The repository's location.
        repository: String,
        /// The repository's answer.
        why: String,
    },
    /// The certificate comes from an untrusted authority or is not valid for the repository.
    #[error("the repository {repository} shows a certificate that is not trusted: {why}")]
    Untrusted {
        /// The repository's location.
        repository: String,
        /// The fault of the certificate.
        why: String,
    },
    /// The clocks of this host and of the store differ by too much.
    #[error("the repository {repository} finds this host's clock wrong: {why}")]
    Skewed {
        /// The repository's location.
        repository: String,
        /// The repository's answer.
        why: String,
    },
    /// The repository is overloaded.
    #[error("the repository {repository} has too much to do: {why}")]
    Overloaded {
        /// The repository's location.
        repository: String,
        /// The repository's answer.
        why: String,
    },
    /// The repository answers with a failure.
    #[error("the repository {repository} failed: {why}")]
    Failed {
        /// The repository's location.
        repository: String,
        /// The repository's answer.
        why: String,
    },
    /// No image has this name.
    #[error("there is no image '{image}' in the repository {repository}")]
    NoImage {
        /// The image's name.
        image: ImageName,
        /// The repository.
        repository: String,
    },
    /// An image of this name exists.
    #[error("there is an image '{image}' already in the repository {repository}")]
    Exists {
        /// The image's name.
        image: ImageName,
        /// The repository.
        repository: String,
    },
    /// The manifest of an image or a disk is missing.
    #[error("manifest {manifest} is missing in the repository {repository}")]
    NoManifest {
        /// The manifest's name.
        manifest: ManifestId,
        /// The repository.
        repository: String,
    },
    /// A manifest is damaged.
    #[error("manifest {manifest} in the repository {repository} is damaged: {why}")]
    DamagedManifest {
        /// The manifest's name.
        manifest: ManifestId,
        /// The repository.
        repository: String,
        /// The damage.
        why: ManifestError,
    },
    /// The catalog entry of an image cannot be read.
    #[error("the entry of image '{image}' in the repository {repository} is damaged: {why}")]
    DamagedEntry {
        /// The image.
        image: ImageName,
        /// The repository.
        repository: String,
        /// The damage.
        why: String,
    },
    /// A chunk is missing.
    #[error("chunk {chunk} is missing in the repository {repository}")]
    NoChunk {
        /// The chunk's name.
        chunk: ChunkId,
        /// The repository.
        repository: String,
    },
    /// The bytes of a chunk do not have the hash in the chunk's name.
    #[error(
        "chunk {chunk} in the repository {repository} is damaged: its bytes are not those that it is named by"
    )]
    DamagedChunk {
        /// The chunk's name.
        chunk: ChunkId,
        /// The repository.
        repository: String,
    },
    /// Disks still fetch from an image.
    #[error("image '{image}' is in use: {}", disks(.users))]
    InUse {
        /// The image.
        image: ImageName,
        /// The disks, as `NODE/DISK`.
        users: Vec<String>,
    },
    /// A conflicting operation is under way.
    #[error("the repository {repository} is busy: {why}")]
    Busy {
        /// The repository's location.
        repository: String,
        /// The conflicting operation.
        why: String,
    },
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {why}", path.display())]
    File {
        /// The attempted action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The caller cancelled the operation.
    #[error("interrupted: {0}")]
    Interrupted(&'static str),
}

impl RepositoryError {
    /// Returns advice for the operator, if any applies.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::Open { .. } | Self::NoDirectory { .. } => {
                "check --repository, --repository-endpoint and the variables AWS_*"
            }
            Self::Down { .. } => "is it running, and reachable from here? Try again when it is",
            Self::Credentials { .. } => {
                "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE, and what they may do in the bucket"
            }
            Self::Untrusted { .. } => {
                "give the certificate of the store's authority with --repository-ca FILE"
            }
            Self::Skewed { .. } => "set the clock, here or at the store: timedatectl shows it",
            Self::Overloaded { .. } => "try again later, or let the store take more requests",
            Self::Failed { .. } => "see the store's own log",
            Self::NoImage { .. } => "see which there are: godwit image list",
            Self::Exists { .. } => "choose another name, or say --replace",
            Self::NoManifest { .. } | Self::DamagedManifest { .. } | Self::DamagedEntry { .. } => {
                "push the image again with --replace"
            }
            Self::NoChunk { .. } | Self::DamagedChunk { .. } => {
                "push an image that has it again, with --check"
            }
            Self::InUse { .. } => {
                "wait until these disks are whole, or say --force: what they lack is lost with the next gc. The disks of a node that is gone for good are forgotten by godwit image forget-node"
            }
            Self::Busy { .. } => "try again when that is done",
            Self::File { .. } | Self::Interrupted(_) => return None,
        })
    }

    /// Returns true if the repository did not answer: the directory is missing or the store is down.
    pub const fn is_away(&self) -> bool {
        matches!(self, Self::NoDirectory { .. } | Self::Down { .. })
    }

    /// Returns true if a retry may succeed without any intervention.
    pub const fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::NoDirectory { .. }
                | Self::Down { .. }
                | Self::Overloaded { .. }
                | Self::Failed { .. }
                | Self::Busy { .. }
        )
    }

    /// Returns true for an error of a store that may clear up within moments without any intervention.
    pub(crate) const fn passes_by_itself(&self) -> bool {
        matches!(self, Self::Down { .. } | Self::Overloaded { .. })
    }

    pub(crate) fn file(
        action: &'static str,
        path: &std::path::Path,
        why: impl std::fmt::Display,
    ) -> Self {
        Self::File {
            action,
            path: path.to_owned(),
            why: why.to_string(),
        }
    }

    /// Maps an error of a directory that exists.
    pub(crate) fn directory(repository: &str, error: &object_store::Error) -> Self {
        Self::Failed {
            repository: repository.to_owned(),
            why: sentence(error),
        }
    }

    /// Maps an error of a store other than a missing or an existing object.
    pub(crate) fn store(repository: &str, error: &object_store::Error) -> Self {
        let repository = repository.to_owned();
        let why = sentence(error);
        match error {
            _ if why.contains(SKEWED) => Self::Skewed { repository, why },
            _ if why.contains(UNTRUSTED) => Self::Untrusted { repository, why },
            _ if EXPIRED.iter().any(|code| why.contains(code)) => {
                Self::Credentials { repository, why }
            }
            object_store::Error::Unauthenticated { .. }
            | object_store::Error::PermissionDenied { .. } => Self::Credentials { repository, why },
            _ if is_down(error) => Self::Down { repository, why },
            // The store itself answers and is overloaded.
            _ if TOO_MANY.iter().any(|code| why.contains(code)) => {
                Self::Overloaded { repository, why }
            }
            // A gateway in front of the store reports that the store does not answer.
            _ if GATEWAYS.iter().any(|answer| why.contains(answer)) => {
                Self::Down { repository, why }
            }
            // For listings, only the error text tells of a refusal.
            _ if why.contains("401 Unauthorized") || why.contains("403 Forbidden") => {
                Self::Credentials { repository, why }
            }
            _ => Self::Failed { repository, why },
        }
    }
}

/// Answers of a gateway between this host and the store.
const GATEWAYS: [&str; 3] = [
    "502 Bad Gateway",
    "503 Service Unavailable",
    "504 Gateway Timeout",
];

/// Answers of an overloaded store.
const TOO_MANY: [&str; 2] = ["SlowDown", "429 Too Many Requests"];

/// Answer of a store to a request whose time is off.
const SKEWED: &str = "RequestTimeTooSkewed";

/// Error text of TLS for an untrusted certificate.
const UNTRUSTED: &str = "invalid peer certificate";

/// Answers of a store to expired credentials.
const EXPIRED: [&str; 3] = ["ExpiredToken", "InvalidToken", "TokenRefreshRequired"];

fn disks(users: &[String]) -> String {
    match users {
        [one] => format!("disk {one} still fetches from it"),
        many => format!("disks {} still fetch from it", many.join(", ")),
    }
}

/// Returns the innermost cause on one line.
fn sentence(error: &dyn std::error::Error) -> String {
    let mut texts = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        texts.push(error.to_string());
        next = error.source();
    }
    let text = texts.pop().unwrap_or_default();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = without_xml(&text).unwrap_or(text);
    let mut short: String = text.chars().take(300).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// Replaces the XML document of an S3 store by its error code and message.
fn without_xml(text: &str) -> Option<String> {
    let (before, document) = text
        .split_once("<?xml")
        .or_else(|| text.split_once("<Error>"))?;
    let part = |name: &str| {
        let (_, rest) = document.split_once(&format!("<{name}>"))?;
        Some(rest.split_once("</")?.0)
    };
    let told = [part("Code"), part("Message")].into_iter().flatten();
    let told = told.collect::<Vec<_>>().join(": ");
    Some(format!("{before}{told}"))
}

/// Returns true if no answer arrived.
fn is_down(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<object_store::client::HttpError>() {
            use object_store::client::HttpErrorKind::{Connect, Interrupted, Request, Timeout};
            return matches!(error.kind(), Connect | Interrupted | Request | Timeout);
        }
        if error.is::<std::io::Error>() {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(why: &str) -> RepositoryError {
        let error = object_store::Error::Generic {
            store: "S3",
            source: why.into(),
        };
        RepositoryError::store("s3://x", &error)
    }

    #[test]
    fn a_store_that_has_too_much_to_do_is_not_away_and_one_behind_a_gateway_that_does_not_answer_is()
     {
        let status = "Server returned non-2xx status code: 503 Service Unavailable";
        let document = "<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>";
        let busy = says(&format!("{status}: {document}"));
        assert!(!busy.is_away() && busy.may_pass(), "{busy}");
        assert!(matches!(busy, RepositoryError::Overloaded { .. }) && busy.passes_by_itself());
        assert!(says(status).is_away());
    }

    #[test]
    fn wrong_clocks_and_expired_keys_are_told_as_such() {
        let document = |code: &str| {
            says(&format!(
                "403 Forbidden: <?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>"
            ))
        };
        let skewed = document("RequestTimeTooSkewed");
        assert!(matches!(skewed, RepositoryError::Skewed { .. }), "{skewed}");
        assert!(skewed.hint().is_some_and(|hint| hint.contains("clock")));
        let expired = document("ExpiredToken");
        assert!(
            matches!(expired, RepositoryError::Credentials { .. }),
            "{expired}"
        );
        for error in [skewed, expired] {
            assert!(!error.is_away() && !error.passes_by_itself());
        }
    }
}
