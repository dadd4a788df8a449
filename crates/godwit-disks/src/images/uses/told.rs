//! The answer of another node about an image, kept when a disk was created from the image while the repository was
//! away. Also records whether the repository has been told of the disk since.
//!
//! The answers are kept beside the store, in a file for each such disk. The store's entry of a disk changes with the
//! disk's owner, at any time, and a change of the answer must not bring back an old entry.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// The answer of another node about a disk's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// The disk's `fetch` id, which distinguishes disks of the same name.
    pub(crate) fetch: String,
    /// The answering node.
    pub by: String,
    /// The time of the push of the content under the image's name, according to the answering node.
    pub(crate) pushed: String,
    /// The repository's answer since.
    pub(crate) repository: Repository,
    /// Chunks lost by the repository, and not found at any node by the last attempt to put them back.
    #[serde(default)]
    pub lost: u64,
}

/// The answer of the repository since the disk's creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Repository {
    /// No answer: the repository does not know the disk's need.
    Away,
    /// The repository knows the disk, and the name stood for this manifest.
    Agrees,
    /// The repository knows the disk, but the name stood for another manifest by then, or for none.
    Disagrees,
}

impl Told {
    /// Returns true if the repository knows the disk's need of the image.
    pub fn is_noted(&self) -> bool {
        self.repository != Repository::Away
    }

    /// Returns the substitute for an unreadable answer.
    fn damaged() -> Self {
        Self {
            fetch: String::new(),
            by: String::new(),
            pushed: String::new(),
            repository: Repository::Away,
            lost: 0,
        }
    }

    /// Returns true for the substitute of an unreadable answer, which counts for any disk of the name.
    fn is_damaged(&self) -> bool {
        self.fetch.is_empty()
    }

    /// Returns a warning for the disk's operator, if there is one.
    pub fn warning(&self, image: &str, fetching: bool) -> Option<String> {
        let lost = (fetching && self.lost > 0).then(|| {
            format!(
                "{} chunks of image '{image}' are neither in the repository any more nor at another node: what needs them \
                 waits; they are looked for every minute, and a push of an image that has them brings them back",
                self.lost
            )
        });
        let all: Vec<String> = [self.name_warning(image, fetching), lost]
            .into_iter()
            .flatten()
            .collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    fn name_warning(&self, image: &str, fetching: bool) -> Option<String> {
        let Self { by, pushed, .. } = self;
        if by.is_empty() {
            return match self.repository {
                Repository::Away if fetching => Some(format!(
                    "what was kept of where image '{image}' came from cannot be read: until the repository has been told \
                     that the disk needs it, it may be that neither 'image rm' nor 'image gc' spares it"
                )),
                _ => None,
            };
        }
        match self.repository {
            Repository::Away if fetching => Some(format!(
                "the repository was away, and node '{by}' told what image '{image}' is: as it was pushed at {pushed}. Until \
                 the repository is back nothing there tells that the disk needs it: neither 'image rm' nor 'image gc' spares it"
            )),
            Repository::Disagrees => Some(format!(
                "it was created from image '{image}' as node '{by}' knew it, pushed at {pushed}; in the repository the name \
                 stood for something else when that was back, or for nothing"
            )),
            Repository::Away | Repository::Agrees => None,
        }
    }
}

/// The answers of other nodes, by the disks' names.
#[derive(Debug)]
pub(in crate::images) struct AllTold {
    folder: PathBuf,
    by_disk: Mutex<HashMap<String, Told>>,
}

impl AllTold {
    /// Loads the answers kept in a folder. Blocks.
    pub(in crate::images) fn load(folder: PathBuf) -> Self {
        let mut by_disk = HashMap::new();
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let disk = entry.file_name().to_string_lossy().into_owned();
            if disk.starts_with('.') {
                continue;
            }
            match read(&entry.path()) {
                Ok(told) => _ = by_disk.insert(disk, told),
                Err(error) => {
                    tracing::error!(disk, %error, "it is not known whether the repository knows that the disk needs its image; it will be told");
                    by_disk.insert(disk, Told::damaged());
                }
            }
        }
        Self {
            folder,
            by_disk: Mutex::new(by_disk),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Told>> {
        self.by_disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the answer about this disk.
    pub(in crate::images) fn of(&self, disk: &str, fetch: &str) -> Option<Told> {
        let told = self.lock();
        let told = told.get(disk)?;
        (told.fetch == fetch || told.is_damaged()).then(|| Told {
            fetch: fetch.to_owned(),
            ..told.clone()
        })
    }

    /// Keeps an answer durably. Blocks.
    pub(in crate::images) fn keep(&self, disk: &str, told: Told) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        // A disk's name never begins with a dot.
        let fresh = self.folder.join(format!(".{disk}"));
        let mut file = File::create(&fresh)?;
        file.write_all(&serde_json::to_vec(&told)?)?;
        file.sync_all()?;
        fs::rename(&fresh, self.folder.join(disk))?;
        File::open(&self.folder)?.sync_all()?;
        self.lock().insert(disk.to_owned(), told);
        Ok(())
    }

    /// Forgets the answers about all disks but these, given by name and `fetch` id. Must not run beside [`Self::keep`].
    /// Blocks.
    pub(in crate::images) fn retain(&self, disks: &HashMap<String, String>) {
        let mut gone = Vec::new();
        self.lock().retain(|disk, told| {
            let its = disks.get(disk);
            let stays = its.is_some_and(|fetch| told.is_damaged() || *fetch == told.fetch);
            if !stays {
                gone.push(disk.clone());
            }
            stays
        });
        // A view of a disk holds the disk's lock and waits for this one, so the lock is not held during file
        // operations.
        for disk in gone {
            // A remaining file belongs to another disk than any later one.
            let _ = fs::remove_file(self.folder.join(disk));
        }
    }
}

fn read(path: &Path) -> io::Result<Told> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(repository: Repository) -> Told {
        Told {
            fetch: String::from("0f"),
            by: String::from("b"),
            pushed: String::from("2025-01-31T12:00:00Z"),
            repository,
            lost: 0,
        }
    }

    #[test]
    fn what_cannot_be_read_counts_as_not_noted_until_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        fs::write(path.join("d"), "{").expect("written");
        let all = AllTold::load(path.clone());
        let damaged = all.of("d", "0f").expect("it is not taken for noted");
        assert!(!damaged.is_noted() && damaged.fetch == "0f", "{damaged:?}");
        let warning = damaged.warning("base", true).expect("it is told of");
        assert!(warning.contains("cannot be read"), "{warning}");
        all.retain(&[("d".into(), "0f".into())].into());
        let repository = Repository::Agrees;
        let noted = Told {
            repository,
            ..damaged
        };
        all.keep("d", noted.clone()).expect("kept");
        assert_eq!(AllTold::load(path).of("d", "0f"), Some(noted));
        all.retain(&HashMap::new());
        assert_eq!(all.of("d", "0f"), None);
    }

    #[test]
    fn what_is_lost_is_counted_and_what_an_earlier_version_kept_is_read() {
        let text =
            r#"{"fetch":"0f","by":"b","pushed":"2025-01-31T12:00:00Z","repository":"agrees"}"#;
        let mut read: Told = serde_json::from_str(text).expect("read");
        assert_eq!(read, told(Repository::Agrees));
        read.lost = 3;
        let warning = read.warning("base", true).expect("it is told of");
        assert!(warning.starts_with("3 chunks of image 'base'"), "{warning}");
        assert_eq!(read.warning("base", false), None, "it needs them no more");
        read.repository = Repository::Disagrees;
        let both = read.warning("base", true).expect("both");
        assert!(
            both.contains("something else") && both.contains("3 chunks"),
            "{both}"
        );
    }

    #[test]
    fn what_was_told_outlasts_the_node_and_is_of_one_disk_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("told");
        let all = AllTold::load(path.clone());
        all.keep("d", told(Repository::Away)).expect("kept");
        all.keep("e", told(Repository::Away)).expect("kept");
        all.keep("e", told(Repository::Agrees)).expect("changed");
        let again = AllTold::load(path.clone());
        assert_eq!(again.of("d", "0f"), Some(told(Repository::Away)));
        assert_eq!(again.of("e", "0f"), Some(told(Repository::Agrees)));
        assert_eq!(again.of("d", "another"), None);
        let disks = [("d", "another"), ("e", "0f")];
        again.retain(
            &disks
                .map(|(disk, fetch)| (disk.into(), fetch.into()))
                .into(),
        );
        assert_eq!(again.of("d", "0f"), None);
        let again = AllTold::load(path);
        assert_eq!(again.of("d", "0f"), None);
        assert!(again.of("e", "0f").is_some());
    }

    #[test]
    fn only_what_somebody_should_know_is_said() {
        let warning = |repository, fetching| told(repository).warning("base", fetching);
        let away = warning(Repository::Away, true).expect("it is not protected");
        assert!(
            away.contains("node 'b'") && away.contains("2025-01-31T12:00:00Z"),
            "{away}"
        );
        assert_eq!(warning(Repository::Away, false), None);
        assert_eq!(warning(Repository::Agrees, true), None);
        let other = warning(Repository::Disagrees, false).expect("it is another image");
        assert!(other.contains("something else"), "{other}");
    }
}
