//! Base images for new disks, kept in a repository that all nodes reach.
//!
//! A repository is a directory or a bucket of an S3-compatible store:
//!
//! ```text
//! chunks/ab/abcd…            256 KiB of an image, named by their BLAKE3 hash
//! manifests/1234…            the chunks of an image and their positions, named by the hash of this object
//! images/NAME                the manifest of the image of this name
//! uses/1234…/NODE/ID/DISK    a disk still fetches from this manifest's chunks
//! leases/…                   an operation relies on chunks that no manifest names yet
//! collecting                 chunks that no manifest names are being removed
//! ```
//!
//! Chunks and manifests never change. Manifests list neither the holes of an image nor chunks of zeroes.

mod chunk;
pub mod convert;
mod credentials;
mod error;
mod location;
mod manifest;
mod name;
mod push_time;
mod qcow2;
mod repository;

pub use chunk::{CHUNK_BYTES, ChunkId};
pub use error::RepositoryError;
pub use location::{Keys, Location};
pub use manifest::{Manifest, ManifestChunk, ManifestError, ManifestId};
pub use name::ImageName;
pub use push_time::PushTime;
pub use repository::Repository;
pub use repository::catalog::{ImageInfo, Removed};
pub use repository::progress::Progress;
pub use repository::pull::Pulled;
pub use repository::push::{PushOptions, Pushed};
pub use repository::removal::collect::Collected;
pub use repository::removal::uses::{Used, User};
pub use repository::restore::PutBack;
