//! Conversion from and to qcow2 through `qemu-img`.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Stdio;

use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, pread};
use serde_json::json;

use crate::error::RepositoryError;
use crate::qcow2;

const PROGRAM: &str = "qemu-img";

/// Writes the content of the qcow2 image at `from`, a file or a block device, into a new raw file at `to`. Dropping the
/// future kills `qemu-img`.
///
/// # Errors
/// The image is not qcow2, refers to other files, or is in use; `qemu-img` is missing or fails. After an error the
/// content of `to` is undefined.
pub async fn from_qcow2(from: &Path, to: &Path) -> Result<(), RepositoryError> {
    check(from)?;
    let metadata = std::fs::metadata(from);
    let is_device = metadata.is_ok_and(|metadata| metadata.file_type().is_block_device());
    let driver = if is_device { "host_device" } else { "file" };
    let source = json!({
        "driver": "qcow2",
        "file": { "driver": driver, "filename": shown(from) },
        "backing": null,
    });
    let words = ["convert", "-O", "raw"].map(String::from);
    let words = words
        .into_iter()
        .chain([format!("json:{source}"), shown(to)]);
    run(from, words).await?;
    // If the header changed meanwhile, `qemu-img` may have read another file too.
    check(from)
}

/// Writes the raw image at `from` into a new qcow2 file at `to`. Dropping the future kills `qemu-img`.
///
/// # Errors
/// `qemu-img` is missing or fails.
pub async fn to_qcow2(from: &Path, to: &Path) -> Result<(), RepositoryError> {
    let words = ["convert", "-f", "raw", "-O", "qcow2"].map(String::from);
    run(from, words.into_iter().chain([shown(from), shown(to)])).await
}

/// Refuses an image that is not qcow2, refers to other files, or is a disk that a node serves: the guest of a served
/// disk could change the header.
fn check(path: &Path) -> Result<(), RepositoryError> {
    let failed = |error: std::io::Error| RepositoryError::file("read", path, error);
    let file = File::open(path).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let why = "a node serves it as a disk: export the disk, and push what that writes";
            return Err(RepositoryError::file("push", path, why));
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    let mut header = [0; qcow2::HEADER];
    let length = pread(&file, &mut header, 0).map_err(|errno| failed(errno.into()))?;
    qcow2::check(&header[..length]).map_err(|refused| refused.error(path))
}

/// Returns an absolute path, so that `qemu-img` cannot take the text for an option or a protocol.
fn shown(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.display().to_string()
}

async fn run(path: &Path, words: impl Iterator<Item = String>) -> Result<(), RepositoryError> {
    let failed = |why: String| RepositoryError::file("convert", path, why);
    let output = tokio::process::Command::new(PROGRAM)
        .args(words)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| {
            failed(format!(
                "{PROGRAM} cannot be run ({error}): install qemu-utils"
            ))
        })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().next().unwrap_or("it said nothing").trim();
    Err(failed(format!("{PROGRAM} said: {line}")))
}
