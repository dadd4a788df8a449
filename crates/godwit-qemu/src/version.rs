//! The version of a QEMU program, and the consequences for command lines.

use std::collections::HashMap;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::user::QemuUser;

/// Longest wait for a program's output.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Most programs with a remembered version.
const MOST_KNOWN: usize = 64;

/// The version of a QEMU: major, minor, micro.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub [u64; 3]);

impl Version {
    /// The first version with `reconnect-ms` for a character device; older ones take `reconnect`, in seconds.
    pub const RECONNECT_MS: Self = Self([9, 2, 0]);

    /// Parses `QEMU emulator version 10.0.2 (...)`.
    pub fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("version ")?;
        let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.'));
        let mut numbers = rest[..end.unwrap_or(rest.len())].split('.');
        let mut next = || numbers.next().and_then(|number| number.parse().ok());
        Some(Self([next()?, next().unwrap_or(0), next().unwrap_or(0)]))
    }

    /// Returns the version of a program. The program is run once, and again only after the file has changed.
    ///
    /// # Errors
    /// A sentence: the program cannot be run, or does not tell its version.
    pub async fn of(program: &str, user: Option<&QemuUser>) -> Result<Self, String> {
        let file = File::find(program);
        if let Some(known) = file.as_ref().and_then(File::version) {
            return Ok(known);
        }
        let text = printed(program, &["--version"], user).await;
        let text = text.map_err(|why| format!("cannot run {program}: {why}"))?;
        let version = Self::parse(&text);
        let version = version.ok_or_else(|| format!("{program} does not tell its version"))?;
        if let Some(file) = file {
            file.remember(version);
        }
        Ok(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, micro] = self.0;
        write!(f, "{major}.{minor}.{micro}")
    }
}

/// A program's file in the current state, which a package's update changes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct File {
    path: PathBuf,
    inode: u64,
    modified: (i64, i64),
}

/// The versions of files that were run.
static KNOWN: Mutex<Option<HashMap<File, Version>>> = Mutex::new(None);

impl File {
    /// Finds the file of a program: a path, or a name in `PATH`.
    fn find(program: &str) -> Option<Self> {
        let of = |path: PathBuf| {
            let found = std::fs::metadata(&path)
                .ok()
                .filter(|file| file.is_file())?;
            Some(Self {
                path,
                inode: found.ino(),
                modified: (found.mtime(), found.mtime_nsec()),
            })
        };
        if program.contains('/') {
            return of(PathBuf::from(program));
        }
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).find_map(|folder| of(folder.join(program)))
    }

    fn version(&self) -> Option<Version> {
        let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref()?.get(self).copied()
    }

    fn remember(self, version: Version) {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = known.get_or_insert_default();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(self, version);
    }
}

/// Returns the output of a program that succeeds.
///
/// # Errors
/// A sentence: the program cannot be run, does not end, or fails.
pub async fn printed(
    program: &str,
    arguments: &[&str],
    user: Option<&QemuUser>,
) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(arguments);
    if let Some(user) = user {
        user.run_as(&mut command);
    }
    let running = tokio::process::Command::from(command)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(ANSWER_TIMEOUT, running)
        .await
        .map_err(|_| String::from("it does not answer"))?
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("it ended with {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds)\nCopyright";
        assert_eq!(Version::parse(text), Some(Version([10, 0, 2])));
        assert_eq!(Version::parse("version 9.1"), Some(Version([9, 1, 0])));
        assert_eq!(Version::parse("version x"), None);
        assert_eq!(Version::parse(""), None);
        assert!(Version([7, 2, 22]) < Version::RECONNECT_MS);
        assert_eq!(Version([7, 2, 22]).to_string(), "7.2.22");
    }

    #[tokio::test]
    async fn a_program_is_run_once_until_its_file_changes() {
        let folder = tempfile::tempdir().expect("a folder");
        let (program, runs) = (folder.path().join("qemu"), folder.path().join("runs"));
        let write = |version: &str| {
            let script = format!(
                "#!/bin/sh\necho run >>{}\necho QEMU emulator version {version}\n",
                runs.display()
            );
            let new = folder.path().join("new");
            std::fs::write(&new, script).expect("writes");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(&new, mode).expect("sets the mode");
            std::fs::rename(&new, &program).expect("renames");
        };
        let name = program.to_str().expect("UTF-8");
        let ran = || std::fs::read_to_string(&runs).map_or(0, |runs| runs.lines().count());
        write("7.2.22");
        for _ in 0..3 {
            assert_eq!(Version::of(name, None).await, Ok(Version([7, 2, 22])));
        }
        assert_eq!(ran(), 1);
        write("10.0.2");
        assert_eq!(Version::of(name, None).await, Ok(Version([10, 0, 2])));
        assert_eq!(ran(), 2);
        std::fs::remove_file(&program).expect("removes");
        let gone = Version::of(name, None).await.expect_err("no program");
        assert!(gone.starts_with("cannot run "), "{gone}");
    }
}
