//! Small files that are made, renamed and removed, to keep a file system's metadata busy.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::random::{Random, mix};
use crate::stats::Stats;

/// Names in use at most.
const NAMES: usize = 64;
const LARGEST: u64 = 16 << 10;
const PAUSE: Duration = Duration::from_millis(50);
/// Operations between two syncs of the directory.
const OPERATIONS_A_SYNC: u64 = 16;

/// The small files on one disk.
pub(crate) struct Files<'a> {
    directory: PathBuf,
    /// The content's seed for each name in use.
    model: Vec<Option<u64>>,
    random: Random,
    stats: &'a Stats,
}

impl<'a> Files<'a> {
    /// Creates the directory, without the files of an earlier boot.
    pub(crate) fn create(mount: &Path, seed: u64, stats: &'a Stats) -> io::Result<Self> {
        let directory = mount.join("files");
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        fs::create_dir(&directory)?;
        Ok(Self {
            directory,
            model: vec![None; NAMES],
            random: Random::new(mix(seed)),
            stats,
        })
    }

    /// Changes files until told to stop.
    pub(crate) fn run(&mut self, stop: &AtomicBool) {
        let mut operations = 0;
        while !stop.load(Relaxed) {
            if let Err(error) = self.step() {
                self.failed(&error);
            }
            operations += 1;
            if operations % OPERATIONS_A_SYNC == 0
                && let Err(error) = self.sync()
            {
                self.failed(&error);
            }
            self.stats.file_operation();
            thread::sleep(PAUSE);
        }
    }

    fn failed(&self, error: &io::Error) {
        self.stats
            .error(&format!("{}: {error}", self.directory.display()));
    }

    fn path(&self, name: usize) -> PathBuf {
        self.directory.join(name.to_string())
    }

    fn step(&mut self) -> io::Result<()> {
        let name = self.random.below(NAMES as u64) as usize;
        let Some(seed) = self.model[name] else {
            let seed = self.random.below(u64::MAX);
            fs::write(self.path(name), content(seed))?;
            self.model[name] = Some(seed);
            return Ok(());
        };
        match self.random.below(3) {
            0 => {
                fs::remove_file(self.path(name))?;
                self.model[name] = None;
            }
            1 => {
                // A rename onto a name in use replaces the other file.
                let other = self.random.below(NAMES as u64) as usize;
                if other != name {
                    fs::rename(self.path(name), self.path(other))?;
                    self.model[other] = self.model[name].take();
                }
            }
            _ => self.check(name, seed)?,
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.directory)?.sync_all()
    }

    fn check(&self, name: usize, seed: u64) -> io::Result<()> {
        if fs::read(self.path(name))? != content(seed) {
            self.stats
                .mismatch(&format!("{} has other content", self.path(name).display()));
        }
        Ok(())
    }

    /// Compares every file with its written content, from the disk and not from the page cache.
    pub(crate) fn finish(&self) {
        if let Err(error) = self.check_all() {
            self.failed(&error);
        }
    }

    fn check_all(&self) -> io::Result<()> {
        rustix::fs::syncfs(File::open(&self.directory)?)?;
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        let mut used = 0;
        for (name, seed) in self.model.iter().enumerate() {
            if let Some(seed) = seed {
                used += 1;
                self.check(name, *seed)?;
            }
        }
        let found = fs::read_dir(&self.directory)?.count();
        if found != used {
            self.stats.mismatch(&format!(
                "{} has {found} files instead of {used}",
                self.directory.display()
            ));
        }
        Ok(())
    }
}

fn content(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let length = random.below(LARGEST);
    (0..length / 8 + 1)
        .flat_map(|_| random.below(u64::MAX).to_le_bytes())
        .collect()
}
