//! Disks that were created from an image of a repository: what they have not fetched yet, and from where it comes.

pub(crate) mod arrival;
mod blocks;
mod chunks;
pub(crate) mod comparison;
pub(crate) mod creation;
mod manifests;
pub(crate) mod peers;
pub(crate) mod serving;
pub(crate) mod uses;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use godwit_image::{Repository, RepositoryError};
use tokio::sync::{Mutex, Notify};

use crate::config::{ImagesConfig, NodeConfig};
use crate::images::chunks::Chunks;
use crate::images::creation::manifest_of;
use crate::images::manifests::Manifests;
use crate::images::peers::giving::Giving;
use crate::images::peers::{Asked, Fetched};
use crate::images::uses::put_back::PuttingBack;
use crate::images::uses::told::{AllTold, Told};
use crate::store::BaseImage;
use godwit_api::{ErrorBody, ErrorCode};

/// How long the repository may take to say whether it has an image: whoever asked for a move waits meanwhile.
const ASKED: Duration = Duration::from_secs(5);

/// What a node has to do with images.
#[derive(Debug)]
pub(crate) struct Images {
    config: ImagesConfig,
    repository: OnceLock<Repository>,
    folder: PathBuf,
    chunks: Chunks,
    manifests: Manifests,
    /// Other nodes that were asked for parts of images.
    asked: Asked,
    /// What other nodes are given.
    giving: Giving,
    /// From where chunks came.
    pub(crate) fetched: Fetched,
    /// A disk is whole, or gone: the repository is to be told.
    released: Notify,
    /// Held while a disk's need is noted and its manifest kept, and while what nobody needs is removed: a new disk may
    /// have the name and the image of one that was just removed.
    noting: Mutex<()>,
    /// Held while what a new disk needs is kept here, and while what nobody needs is removed here. Nobody waits for the
    /// repository who holds it.
    keeping: Mutex<()>,
    /// What other nodes told of disks' images.
    told: AllTold,
    /// What is being put back into the repository.
    putting_back: PuttingBack,
}

/// Why the repository has not done what it was asked for.
#[derive(Debug)]
enum NoAnswer {
    /// It is away: nobody knows what it would say.
    Away(ErrorBody),
    /// It says no, or something else is wrong.
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
    /// The images of a node that was told this. Nothing is opened yet.
    pub(crate) fn new(config: &NodeConfig) -> Self {
        Self::in_folder(config.images.clone(), config.images_dir())
    }

    fn in_folder(config: ImagesConfig, folder: PathBuf) -> Self {
        Self {
            config,
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

    /// The repository. A directory may be there only later than the node.
    ///
    /// # Errors
    /// There is none, or it cannot be opened now.
    fn repository(&self) -> Result<&Repository, ErrorBody> {
        self.open().map_err(|error| match error {
            NoAnswer::Away(error) | NoAnswer::Refused(error) => error,
        })
    }

    /// The same, and whether it is away.
    fn open(&self) -> Result<&Repository, NoAnswer> {
        if let Some(open) = self.repository.get() {
            return Ok(open);
        }
        let Some(location) = &self.config.repository else {
            let text = "this node knows no repository of images";
            let error = ErrorBody::new(ErrorCode::Conflict, text).hint(
                "start the node with --repository s3://BUCKET, or with a directory that all nodes share",
            );
            return Err(error.into());
        };
        let opened = Repository::open(location)?;
        Ok(self.repository.get_or_init(|| opened))
    }

    /// What is said while no answer comes.
    fn slowness(&self) -> String {
        match self.repository.get() {
            Some(repository) => format!("the repository {} is slow to answer", repository.shown()),
            None => String::from("the repository is slow to answer"),
        }
    }

    /// Whether this node knows a repository.
    pub(crate) const fn has_repository(&self) -> bool {
        self.config.repository.is_some()
    }

    /// Whether the repository says, in a moment, that it has what the image consists of.
    pub(crate) async fn has_image(&self, base: &BaseImage) -> bool {
        let asked = async {
            let id = manifest_of(base)?;
            self.repository().ok()?.manifest(id).await.ok()
        };
        matches!(tokio::time::timeout(ASKED, asked).await, Ok(Some(_)))
    }

    /// What another node told of the image that a disk was created from, if it was not the repository.
    pub(crate) fn told(&self, disk: &str, base: &BaseImage) -> Option<Told> {
        self.told.of(disk, &base.fetch)
    }

    /// A disk fetches no more, or the repository is to be told of one that does.
    pub(crate) fn release(&self) {
        self.released.notify_one();
    }
}

/// A repository's error for the API.
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
