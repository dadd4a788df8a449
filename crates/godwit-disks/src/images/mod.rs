//! Disks created from an image of a repository: the missing parts, and the sources of these parts.

pub mod arrival;
mod blocks;
mod chunks;
pub mod comparison;
pub mod creation;
mod manifests;
pub mod peers;
pub mod serving;
pub mod uses;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use godwit_image::{Location, Repository, RepositoryError};
use tokio::sync::{Mutex, Notify};

use crate::disks::Disks;
use crate::images::chunks::Chunks;
use crate::images::creation::manifest_of;
use crate::images::manifests::Manifests;
use crate::images::peers::giving::Giving;
use crate::images::peers::{Asked, Fetched};
use crate::images::uses::put_back::PuttingBack;
use crate::images::uses::told::{AllTold, Told};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::Context;
use godwit_context::store::BaseImage;

/// Time limit for the repository to confirm an image. The caller of a move waits meanwhile.
const ASKED: Duration = Duration::from_secs(5);

/// The images of a node.
#[derive(Debug)]
pub struct Images {
    context: Arc<Context>,
    /// The disks that fetch parts of images.
    pub disks: Arc<Disks>,
    repository: OnceLock<Repository>,
    folder: PathBuf,
    chunks: Chunks,
    manifests: Manifests,
    /// The other nodes asked for parts of images so far.
    asked: Asked,
    /// The limits on chunks given to other nodes.
    giving: Giving,
    /// Bytes of chunks by their source.
    pub fetched: Fetched,
    /// Notified when a disk is whole or gone, for the repository to be told.
    released: Notify,
    /// Held while a disk's need is noted and its manifest kept, and while unneeded notes and manifests are removed: a
    /// new disk may have the name and the image of a disk just removed.
    noting: Mutex<()>,
    /// Held while the files of a new disk are kept here, and while unneeded files are removed here. Never held during a
    /// wait for the repository.
    keeping: Mutex<()>,
    /// The answers of other nodes about disks' images.
    told: AllTold,
    /// The images being put back into the repository.
    putting_back: PuttingBack,
}

/// The reason why the repository did not do as asked.
#[derive(Debug)]
enum NoAnswer {
    /// The repository is away: its answer is unknown.
    Away(ErrorBody),
    /// The repository refuses, or something else is wrong.
    Refused(ErrorBody),
}

impl From<RepositoryError> for NoAnswer {
    fn from(error: RepositoryError) -> Self {
        match error.is_away() {
            true => Self::Away(body(&error)),
            false => Self::Refused(body(&error)),
        }
    }
}

impl From<ErrorBody> for NoAnswer {
    fn from(error: ErrorBody) -> Self {
        Self::Refused(error)
    }
}

impl Images {
    /// Creates the images of a node. Nothing is opened yet.
    pub fn new(disks: Arc<Disks>) -> Self {
        let context = Arc::clone(&disks.context);
        let folder = context.config.images_dir();
        Self {
            context,
            disks,
            repository: OnceLock::new(),
            chunks: Chunks::default(),
            manifests: Manifests::new(folder.join("manifests")),
            told: AllTold::load(folder.join("told")),
            folder,
            asked: Asked::default(),
            giving: Giving::default(),
            fetched: Fetched::default(),
            released: Notify::new(),
            noting: Mutex::default(),
            keeping: Mutex::default(),
            putting_back: PuttingBack::default(),
        }
    }

    /// Returns the configured place of the repository.
    fn location(&self) -> Option<&Location> {
        self.context.config.images.repository.as_ref()
    }

    /// Returns the repository. A repository's directory may appear later than the node starts.
    ///
    /// # Errors
    /// No repository is configured, or the repository cannot be opened now.
    fn repository(&self) -> Result<&Repository, ErrorBody> {
        self.open().map_err(|error| match error {
            NoAnswer::Away(error) | NoAnswer::Refused(error) => error,
        })
    }

    /// Returns the repository; the error tells whether the repository is away.
    fn open(&self) -> Result<&Repository, NoAnswer> {
        if let Some(open) = self.repository.get() {
            return Ok(open);
        }
        let Some(location) = self.location() else {
            let text = "this node knows no repository of images";
            let error = ErrorBody::new(ErrorCode::Conflict, text).hint(
                "start the node with --repository s3://BUCKET, or with a directory that all nodes share",
            );
            return Err(error.into());
        };
        let opened = Repository::open(location)?;
        Ok(self.repository.get_or_init(|| opened))
    }

    /// Describes a slow repository.
    fn slowness(&self) -> String {
        match self.repository.get() {
            Some(repository) => format!("the repository {} is slow to answer", repository.shown()),
            None => String::from("the repository is slow to answer"),
        }
    }

    /// Returns true if this node has a repository.
    pub(crate) fn has_repository(&self) -> bool {
        self.location().is_some()
    }

    /// Returns true if the repository confirms within [`ASKED`] to have the image's manifest.
    pub async fn has_image(&self, base: &BaseImage) -> bool {
        let asked = async {
            let id = manifest_of(base)?;
            self.repository().ok()?.manifest(id).await.ok()
        };
        matches!(tokio::time::timeout(ASKED, asked).await, Ok(Some(_)))
    }

    /// Returns the answer of another node about the image from which a disk was created, if the repository did not
    /// answer.
    pub fn told(&self, disk: &str, base: &BaseImage) -> Option<Told> {
        self.told.of(disk, &base.fetch)
    }

    /// Wakes [`uses::watch`]: a disk fetches no more, or the repository is to be told of a disk that fetches.
    pub fn release(&self) {
        self.released.notify_one();
    }
}

/// Converts a repository's error for the API.
fn body(error: &RepositoryError) -> ErrorBody {
    let code = match error {
        RepositoryError::NoImage { .. } => ErrorCode::NotFound,
        RepositoryError::Exists { .. } => ErrorCode::Exists,
        RepositoryError::Busy { .. } => ErrorCode::Busy,
        _ => ErrorCode::Conflict,
    };
    let answer = ErrorBody::new(code, error.to_string());
    match error.hint() {
        Some(hint) => answer.hint(hint),
        None => answer,
    }
}
