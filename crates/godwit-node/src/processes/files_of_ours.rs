//! What is stored of a move, each in a file of JSON that is whole or not there.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Stores a value durably in place of what is there.
///
/// # Errors
/// One sentence.
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result<(), String> {
    let stored = || -> std::io::Result<()> {
        let folder = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
        let aside = path.with_extension("new");
        let mut file = File::create(&aside)?;
        file.write_all(&serde_json::to_vec(value)?)?;
        file.sync_all()?;
        std::fs::rename(&aside, path)?;
        File::open(folder)?.sync_all()
    };
    stored().map_err(|error| format!("cannot store {}: {error}", path.display()))
}

/// What is stored there; nothing if there is none, or nothing that can be read.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = std::fs::read(path).ok()?;
    serde_json::from_slice(&bytes)
        .inspect_err(|error| tracing::error!(path = %path.display(), %error, "cannot be read"))
        .ok()
}
