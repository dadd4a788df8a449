//! Memory rounds that arrive before their process. A folder of their own keeps the rounds until the image that builds
//! on them arrives.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use godwit_verbs::mover::MOST_ROUNDS;
use tokio::io::AsyncRead;

use super::arrivals;
use crate::Processes;
use crate::images;
use crate::messages::MemoryOffer;
use godwit_context::failpoint;

/// The folder of the rounds in a move's folder, each round in a folder named by number.
pub(crate) const KEPT: &str = "rounds";
/// CRIU's name for the link to the image that an image builds on.
const PARENT: &str = "parent";
/// Prefix, before the move's id, of folders with rounds whose image has not arrived.
const COMING: &str = "rounds-";

fn coming(all: &Path, id: &str) -> PathBuf {
    all.join(format!("{COMING}{id}"))
}

/// Checks that a round may come after `before` others.
///
/// # Errors
/// One sentence.
pub fn admit(
    processes: &Processes,
    id: &str,
    offer: &MemoryOffer,
    before: u32,
) -> Result<(), String> {
    arrivals::check_new(processes, id)?;
    check(
        offer,
        before,
        images::free(&processes.context.config.processes_dir()),
    )
}

fn check(offer: &MemoryOffer, before: u32, free: u64) -> Result<(), String> {
    if offer.round != before + 1 || offer.round > MOST_ROUNDS {
        return Err(format!(
            "round {} of the memory of a process cannot come after {before} of at most {MOST_ROUNDS}",
            offer.round
        ));
    }
    images::check_memory(offer, free)
}

/// Receives an admitted round. `all` is the folder of all moves.
///
/// # Errors
/// One sentence; nothing of any round is left.
pub async fn take(
    all: &Path,
    id: &str,
    offer: &MemoryOffer,
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<(), String> {
    let image = coming(all, id).join(offer.round.to_string());
    let taken = async {
        std::fs::create_dir_all(&image)?;
        if offer.round > 1 {
            symlink(format!("../{}", offer.round - 1), image.join(PARENT))?;
        }
        let files = offer.image.iter();
        let files = files.map(|file| (image.join(&file.name), file.bytes));
        images::receive(stream, files).await
    };
    let taken = taken.await;
    failpoint::reach("process-arrival-round".to_owned()).await;
    taken.map_err(|error| {
        forget(all, id);
        format!("the memory of a process did not come: {error}")
    })
}

/// Moves the received rounds into the move's folder for the image, which builds on `rounds` rounds. Removes the rounds
/// if the image needs none.
///
/// # Errors
/// The errors of the file system.
pub(super) fn keep(
    all: &Path,
    id: &str,
    place: &Path,
    image: &Path,
    rounds: u32,
) -> io::Result<()> {
    if rounds == 0 {
        forget(all, id);
        return Ok(());
    }
    std::fs::rename(coming(all, id), place.join(KEPT))?;
    symlink(since(rounds), image.join(PARENT))
}

/// Returns the path of the last of `rounds` rounds, relative to the image.
pub fn since(rounds: u32) -> String {
    format!("../{KEPT}/{rounds}")
}

/// Removes the rounds of a move whose image does not come.
pub fn forget(all: &Path, id: &str) {
    remove(&coming(all, id));
}

/// Removes, after the node's start, all rounds whose images have not come.
pub(crate) fn forget_all(all: &Path) {
    let entries = std::fs::read_dir(all).into_iter().flatten().flatten();
    let brought = entries.filter(|entry| {
        let name = entry.file_name();
        name.as_encoded_bytes().starts_with(COMING.as_bytes())
    });
    brought.for_each(|entry| remove(&entry.path()));
}

fn remove(place: &Path) {
    if let Err(error) = std::fs::remove_dir_all(place)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(place = %place.display(), %error, "cannot remove memory of a process that did not come");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{ImageFile, Source, send};

    fn offer(round: u32, names: &[&str]) -> MemoryOffer {
        let file = |name: &&str| ImageFile {
            name: (*name).to_owned(),
            bytes: 5,
            mode: 0o600,
            uid: 0,
            gid: 0,
        };
        MemoryOffer {
            round,
            image: names.iter().map(file).collect(),
        }
    }

    /// Receives a round with one file of this content.
    async fn comes(all: &Path, round: u32, content: &str) -> Result<(), String> {
        let from = all.join("from");
        std::fs::write(&from, content).expect("writes");
        let (mut here, mut there) = tokio::io::duplex(1 << 16);
        let files = [(Source::Own(from), content.len() as u64)].into_iter();
        send(&mut here, files, drop).await.expect("sends");
        drop(here);
        take(all, "7", &offer(round, &["pages-1.img"]), &mut there).await
    }

    #[test]
    fn rounds_come_in_their_order_and_with_plain_names() {
        let free = 1 << 30;
        let good = ["pages-1.img", "inventory.img"];
        check(&offer(1, &good), 0, free).expect("is the first");
        check(&offer(MOST_ROUNDS, &good), MOST_ROUNDS - 1, free).expect("is the last");
        for (round, before) in [(0, 0), (2, 0), (1, 1), (MOST_ROUNDS + 1, MOST_ROUNDS)] {
            let error = check(&offer(round, &good), before, free).expect_err("out of order");
            assert!(error.contains("cannot come after"), "{error}");
        }
        for name in ["parent", "../x.img", "descriptors.json"] {
            check(&offer(1, &[name]), 0, free).expect_err(name);
        }
        check(&offer(1, &good), 0, 9).expect_err("has no room");
    }

    #[tokio::test]
    async fn an_image_finds_the_memory_that_came_before_it() {
        let all = tempfile::tempdir().expect("a folder");
        let all = all.path();
        comes(all, 1, "first").await.expect("comes");
        comes(all, 2, "other").await.expect("comes");
        let (place, image) = (all.join("7"), all.join("7/image"));
        std::fs::create_dir_all(&image).expect("a folder");
        keep(all, "7", &place, &image, 2).expect("keeps");
        let read = |path: &str| std::fs::read_to_string(image.join(path)).expect("is there");
        assert_eq!(read("parent/pages-1.img"), "other");
        assert_eq!(read("parent/parent/pages-1.img"), "first");
        assert!(!coming(all, "7").exists());
        // The rounds cannot be kept twice.
        keep(all, "7", &place, &image, 2).expect_err("has gone");
    }

    #[tokio::test]
    async fn memory_that_no_image_needs_is_forgotten() {
        let all = tempfile::tempdir().expect("a folder");
        let all = all.path();
        comes(all, 1, "first").await.expect("comes");
        keep(all, "7", &all.join("7"), &all.join("7/image"), 0).expect("forgets");
        assert!(!coming(all, "7").exists());
        comes(all, 1, "first").await.expect("comes");
        // After a cut-off round no round is left.
        let error = comes(all, 2, "few").await.expect_err("is cut off");
        assert!(error.contains("did not come"), "{error}");
        assert!(!coming(all, "7").exists());
        comes(all, 1, "first").await.expect("comes");
        std::fs::create_dir(all.join("8")).expect("a folder");
        forget_all(all);
        assert!(!coming(all, "7").exists() && all.join("8").exists());
    }
}
