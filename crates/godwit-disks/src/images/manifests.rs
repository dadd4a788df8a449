//! Manifests of the images from which disks of this node were created: kept here for times when the repository is away.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use godwit_image::{Manifest, ManifestId};

/// The manifests in use, and the folder with all of them.
#[derive(Debug)]
pub(super) struct Manifests {
    folder: PathBuf,
    open: Mutex<HashMap<ManifestId, Weak<Manifest>>>,
}

impl Manifests {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            open: Mutex::default(),
        }
    }

    /// Keeps a manifest durably. Blocks.
    pub(super) fn keep(&self, manifest: &Manifest) -> io::Result<()> {
        let path = self.folder.join(manifest.encode().0.to_string());
        if path.exists() {
            return Ok(());
        }
        self.replace(manifest)
    }

    /// Keeps a manifest durably, and replaces a damaged one. Blocks.
    pub(super) fn replace(&self, manifest: &Manifest) -> io::Result<()> {
        let (id, bytes) = manifest.encode();
        let path = self.folder.join(id.to_string());
        fs::create_dir_all(&self.folder)?;
        let mut fresh = tempfile_in(&self.folder, id)?;
        fresh.1.write_all(&bytes)?;
        fresh.1.sync_all()?;
        fs::rename(&fresh.0, path)?;
        File::open(&self.folder)?.sync_all()
    }

    /// Returns a kept manifest. Blocks.
    ///
    /// # Errors
    /// The manifest is missing or damaged.
    pub(super) fn load(&self, id: ManifestId) -> io::Result<Arc<Manifest>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(manifest) = open.get(&id).and_then(Weak::upgrade) {
            return Ok(manifest);
        }
        let bytes = fs::read(self.folder.join(id.to_string()))?;
        let manifest = Manifest::decode(id, &bytes).map_err(io::Error::other)?;
        let manifest = Arc::new(manifest);
        open.retain(|_, known| known.strong_count() > 0);
        open.insert(id, Arc::downgrade(&manifest));
        Ok(manifest)
    }

    /// Removes the manifests rejected by `needed`. Blocks.
    pub(super) fn retain(&self, needed: impl Fn(ManifestId) -> bool) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Ok(id) = name.parse()
                && !needed(id)
            {
                // A remaining file takes a little space until the next time.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Creates a temporary file in the folder, for a new manifest.
fn tempfile_in(folder: &std::path::Path, id: ManifestId) -> io::Result<(PathBuf, File)> {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = folder.join(format!(".{id}.{number}"));
    let file = File::create(&path)?;
    Ok((path, file))
}

#[cfg(test)]
mod tests {
    use godwit_image::{CHUNK_BYTES, ChunkId, ManifestChunk};

    use super::*;

    #[test]
    fn what_is_kept_is_found_and_what_is_damaged_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let manifests = Manifests::new(folder.path().join("m"));
        let chunk = ManifestChunk {
            number: 1,
            id: ChunkId([7; 32]),
        };
        let manifest = Manifest::new(2 * CHUNK_BYTES, vec![chunk]).expect("valid");
        let id = manifest.encode().0;
        assert!(manifests.load(id).is_err());
        manifests.keep(&manifest).expect("kept");
        manifests.keep(&manifest).expect("kept already");
        let loaded = manifests.load(id).expect("there");
        assert_eq!(*loaded, manifest);
        assert!(Arc::ptr_eq(&loaded, &manifests.load(id).expect("there")));
        drop(loaded);
        fs::write(folder.path().join("m").join(id.to_string()), b"x").expect("damaged");
        assert!(manifests.load(id).is_err());
        manifests.replace(&manifest).expect("kept again");
        assert_eq!(*manifests.load(id).expect("there"), manifest);
        manifests.retain(|_| true);
        assert!(folder.path().join("m").join(id.to_string()).exists());
        manifests.retain(|_| false);
        assert!(!folder.path().join("m").join(id.to_string()).exists());
    }
}
