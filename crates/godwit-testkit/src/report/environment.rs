//! The environment of a measurement.

use std::io;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::cluster::release_binary;
use crate::process::run;

/// The machine and the programs, without the machine's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Model name of the CPU.
    pub cpu: String,
    /// CPUs that the suite may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Version of the kernel.
    pub kernel: String,
    /// Kind of the file system that holds the images.
    pub file_system: String,
    /// Versions of the programs.
    pub programs: Vec<Program>,
}

/// A program that took part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Name of the program.
    pub name: String,
    /// First line of the program's version output.
    pub version: String,
}

impl Environment {
    pub(super) fn read(images: &Path, programs: &[&str]) -> io::Result<Self> {
        let read = std::fs::read_to_string;
        let mut programs = programs
            .iter()
            .map(|name| version(Command::new(name), name))
            .collect::<io::Result<Vec<_>>>()?;
        if let Ok(godwit) = release_binary() {
            programs.push(version(Command::new(godwit), "godwit")?);
        }
        Ok(Self {
            cpu: field(&read("/proc/cpuinfo")?, "model name")
                .unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism()?.get(),
            memory_bytes: field(&read("/proc/meminfo")?, "MemTotal")
                .and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok())
                .map_or(0, |kib| kib << 10),
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            file_system: file_system(&read("/proc/mounts")?, &images.canonicalize()?),
            programs,
        })
    }
}

fn version(mut command: Command, name: &str) -> io::Result<Program> {
    let output = run(command.arg("--version"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(Program {
        name: name.to_owned(),
        version: text.lines().next().unwrap_or_default().to_owned(),
    })
}

/// Returns the value of `NAME : VALUE` in a file of `/proc`.
fn field(text: &str, name: &str) -> Option<String> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut found = lines.filter(|(key, _)| key.trim() == name);
    found.next().map(|(_, value)| value.trim().to_owned())
}

/// Returns the kind of the file system mounted closest above the path.
fn file_system(mounts: &str, path: &Path) -> String {
    let fields = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?, words.next()?))
    });
    fields
        .filter(|(point, _)| path.starts_with(point))
        // Of two mounts at one place, the later one hides the other.
        .max_by_key(|(point, _)| point.len())
        .map_or_else(|| "unknown".to_owned(), |(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_mount_counts() {
        let mounts = "a / ext4 rw 0 0\nb /srv tmpfs rw 0 0\nc /srvfiles xfs rw 0 0\n";
        let kind = |path| file_system(mounts, Path::new(path));
        assert_eq!(kind("/srv/target"), "tmpfs");
        assert_eq!(kind("/home"), "ext4");
    }

    #[test]
    fn fields_of_proc_are_found() {
        let text = "processor\t: 0\nmodel name\t: Some CPU: fast\n";
        assert_eq!(field(text, "model name").unwrap(), "Some CPU: fast");
        assert!(field(text, "model").is_none());
    }
}
