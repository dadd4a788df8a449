//! Base images: what disks are created from, kept in a repository that all nodes reach.
//!
//! A repository is a directory or a bucket of an S3-compatible store:
//!
//! ```text
//! chunks/ab/abcd…            256 KiB of an image, named by their BLAKE3 hash
//! manifests/1234…            which chunks an image has where, named by the hash of this object
//! images/NAME                which manifest the name stands for
//! uses/1234…/NODE/ID/DISK    a disk still fetches from this manifest's chunks
//! leases/…                   somebody relies on chunks that no manifest names yet
//! collecting                 chunks that no manifest names are being removed
//! ```
//!
//! Chunks and manifests never change. An image's holes, and chunks of zeroes, are in no manifest.

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
pub use repository::collect::Collected;
pub use repository::progress::Progress;
pub use repository::pull::Pulled;
pub use repository::push::{PushOptions, Pushed};
pub use repository::restore::PutBack;
pub use repository::uses::{Used, User};
