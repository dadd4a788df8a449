//! Files beside an image: missing blocks, written blocks, and areas that may differ from a follower's copy.

pub mod activity;
pub mod missing;
pub mod written;

use std::fs::File;
use std::io;
use std::path::Path;

/// Makes the name of a file durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}
