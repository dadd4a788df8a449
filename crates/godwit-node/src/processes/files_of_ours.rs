//! Durable records of a move, each a JSON file written whole or not at all.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Stores a value durably in place of the present record.
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

/// Returns the record at the path, or `None` without a file.
///
/// # Errors
/// One sentence: a file exists, or may exist, and is unreadable.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, String> {
    let read = match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(std::io::Error::from),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    read.map_err(|error| {
        let text = format!("{} cannot be read: {error}", path.display());
        tracing::error!(text, "a record of a move of a process");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_not_absent() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("record.json");
        assert_eq!(read::<u32>(&path), Ok(None));
        write(&path, &7).expect("stores");
        assert_eq!(read::<u32>(&path), Ok(Some(7)));
        std::fs::write(&path, "{").expect("writes");
        read::<u32>(&path).expect_err("half of it");
        std::fs::remove_file(&path).expect("removes");
        std::fs::create_dir(&path).expect("a folder");
        read::<u32>(&path).expect_err("it is no file");
    }
}
