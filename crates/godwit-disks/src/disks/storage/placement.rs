//! The placement of arriving disks: in the data directory, in a pool, or at a path within a pool.
//!
//! Another node asks for the place, so this node's configuration must allow the place.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_core::wire::Place;

use crate::disks::Disks;
use crate::disks::disk::Disk;
use crate::disks::lifecycle::create;
use crate::disks::storage::image;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::config::NodeConfig;

/// Returns the path of the image of a disk at `place`. Blocks.
///
/// # Errors
/// The pool does not exist, or the path is in no pool.
pub fn path(config: &NodeConfig, disk: &str, place: Option<&Place>) -> Result<PathBuf, ErrorBody> {
    match place {
        None => Ok(image::managed_path(&config.disks_dir(), disk)),
        Some(Place::Pool(name)) => {
            let Some(pool) = config.pools.iter().find(|pool| pool.name == *name) else {
                let shown: String = name.chars().take(64).collect();
                let text = format!(
                    "node '{}' has no pool {shown:?}{}",
                    config.name,
                    known(config)
                );
                return Err(ErrorBody::new(ErrorCode::Invalid, text));
            };
            within_a_pool(config, &image::managed_path(&pool.folder, disk))
        }
        Some(Place::Path(path)) => within_a_pool(config, Path::new(path)),
    }
}

/// Returns the path with its folder's links followed, if the folder is a pool's or below.
fn within_a_pool(config: &NodeConfig, path: &Path) -> Result<PathBuf, ErrorBody> {
    let refused = |why: &dyn std::fmt::Display| {
        let text = format!(
            "node '{}' puts no disk at {}: {why}",
            config.name,
            path.display()
        );
        Err(ErrorBody::new(ErrorCode::Invalid, text))
    };
    let (true, Some(parent), Some(file)) = (path.is_absolute(), path.parent(), path.file_name())
    else {
        return refused(&"it names no file from /");
    };
    let folder = match std::fs::canonicalize(parent) {
        Ok(folder) => folder,
        Err(error) => return refused(&format_args!("{}: {error}", parent.display())),
    };
    let pools = config.pools.iter();
    let mut roots = pools.filter_map(|pool| std::fs::canonicalize(&pool.folder).ok());
    if !roots.any(|root| folder.starts_with(root)) {
        return refused(&format_args!("it is in none of its pools{}", known(config)));
    }
    // The file names there belong to this node's disks.
    if std::fs::canonicalize(&config.data_dir).is_ok_and(|own| folder.starts_with(own)) {
        return refused(&"it is in the node's data directory");
    }
    Ok(folder.join(file))
}

/// Lists the pools, for the end of a sentence.
fn known(config: &NodeConfig) -> String {
    if config.pools.is_empty() {
        return String::from(": it was started without --pool NAME=FOLDER");
    }
    let pools = config.pools.iter();
    let named: Vec<String> = pools
        .map(|pool| format!("{}={}", pool.name, pool.folder.display()))
        .collect();
    format!("; it has {}", named.join(", "))
}

/// Checks the path of a new disk's image. Returns true for a block device, and false for a file still to be made, which
/// needs room for `needed` bytes. Blocks.
///
/// # Errors
/// Something else is there, another disk uses the path, or there is no room.
pub fn admit(disks: &Arc<Disks>, disk: &str, path: &Path, needed: u64) -> Result<bool, ErrorBody> {
    let here = &disks.context.config.name;
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if path.is_symlink() {
                let text = format!("node '{here}': {} is a link to nothing", path.display());
                return Err(ErrorBody::new(ErrorCode::Exists, text));
            }
            let folder = path.parent().unwrap_or(path);
            // A file there would be in memory. The request meant a device.
            if folder.starts_with("/dev") && !folder.starts_with("/dev/shm") {
                let text = format!("node '{here}' has no device {}", path.display());
                return Err(ErrorBody::new(ErrorCode::Invalid, text));
            }
            image::check_space(here, disk, folder, needed).map(|()| false)
        }
        Ok(found) if found.file_type().is_block_device() => match create::user_of(disks, path) {
            None => Ok(true),
            Some(other) => {
                let text = format!(
                    "{} at node '{here}' is the image of disk {other}",
                    path.display()
                );
                Err(ErrorBody::new(ErrorCode::Exists, text))
            }
        },
        Ok(_) => {
            let text = format!("node '{here}' has a file {} already", path.display());
            Err(ErrorBody::new(ErrorCode::Exists, text))
        }
        Err(error) => {
            let text = format!("node '{here}' cannot look at {}: {error}", path.display());
            Err(ErrorBody::new(ErrorCode::Internal, text))
        }
    }
}

/// Returns another disk with an image, or a planned image, at the path of this one.
pub(crate) fn rival(disks: &Arc<Disks>, disk: &Arc<Disk>) -> Option<String> {
    let path = disk.lock().entry.path.clone();
    let same = |other: &Arc<Disk>| !Arc::ptr_eq(other, disk) && other.lock().entry.path == path;
    let rival = disks.all().into_iter().find(same)?;
    Some(rival.name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_context::config::PoolConfig;

    #[test]
    fn a_disk_is_put_where_the_configuration_allows_it_only() {
        let root = tempfile::tempdir().expect("a folder");
        let base = std::fs::canonicalize(root.path()).expect("a folder");
        for folder in ["fast", "fast/deep", "fast/data", "other"] {
            std::fs::create_dir(base.join(folder)).expect("a folder");
        }
        std::os::unix::fs::symlink(base.join("other"), base.join("fast/out")).expect("a link");
        let config = NodeConfig {
            data_dir: base.join("fast/data"),
            pools: vec![PoolConfig {
                name: String::from("fast"),
                folder: base.join("fast"),
            }],
            ..NodeConfig::on_loopback("a", base.join("data"))
        };
        let at = |place: Option<Place>| path(&config, "d", place.as_ref());
        let named = |path: &str| at(Some(Place::Path(base.join(path).display().to_string())));
        assert_eq!(at(None), Ok(base.join("fast/data/disks/d.raw")));
        let pool = |name: &str| at(Some(Place::Pool(name.to_owned())));
        assert_eq!(pool("fast"), Ok(base.join("fast/d.raw")));
        assert_eq!(named("fast/x"), Ok(base.join("fast/x")));
        assert_eq!(named("fast/deep/x"), Ok(base.join("fast/deep/x")));
        assert_eq!(named("other/../fast/x"), Ok(base.join("fast/x")));
        let refused = pool("slow").expect_err("there is none");
        assert!(refused.message.contains("it has fast="), "{refused}");
        for wrong in [
            "other/x",
            "fast/../other/x",
            "fast/out/x",
            "fast/none/x",
            "fast/data/x",
            "fast/..",
        ] {
            let refused = named(wrong).expect_err(wrong);
            assert_eq!(refused.code, ErrorCode::Invalid, "{refused}");
        }
        let relative = at(Some(Place::Path(String::from("fast/x"))));
        assert!(relative.is_err());
    }
}
