//! Names of control sockets. The names are abstract, so that a name ends with its process and survives a restore by
//! CRIU.
//!
//! A process is named after its number. In a PID namespace of its own, as in a container, other processes have the same
//! number. Such a process draws a random name, and its socket is found by its descriptors or by the listener's
//! credentials.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::SocketAddr;

/// Prefix of every name.
const NAME: &str = "godwit-verbs-";
/// Prefix of a drawn name after [`NAME`]; otherwise a number follows.
const DRAWN: char = 'x';
/// The inode of the first PID namespace's file, which the kernel fixes (include/linux/proc_ns.h).
const FIRST_NAMESPACE: u64 = 0xeffffffc;

/// A control socket in the kernel's list.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Socket {
    pub(super) name: String,
    inode: u64,
}

impl Socket {
    /// Returns the number in the name; none for a drawn name.
    pub(super) fn number(&self) -> Option<u32> {
        self.name.strip_prefix(NAME)?.parse().ok()
    }

    /// Reads a line of /proc/net/unix.
    fn read(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, _, _, _, inode, name] = words[..] else {
            return None;
        };
        let name = name.strip_prefix('@')?;
        let rest = name.strip_prefix(NAME)?;
        let drawn =
            |rest: &str| rest.len() == 16 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
        let known = rest.parse::<u32>().is_ok() || rest.strip_prefix(DRAWN).is_some_and(drawn);
        known.then_some(Self {
            name: name.to_owned(),
            inode: inode.parse().ok()?,
        })
    }
}

/// Returns the socket name of the process with this number in the first PID namespace.
pub(super) fn numbered(pid: u32) -> String {
    format!("{NAME}{pid}")
}

/// Returns the name for this process's own socket.
///
/// # Errors
/// No name can be drawn.
pub(super) fn own() -> io::Result<String> {
    // Without /proc the namespace is unknown. A name by number is right except in containers.
    let namespace = std::fs::metadata("/proc/self/ns/pid").map(|about| about.ino());
    if namespace.unwrap_or(FIRST_NAMESPACE) == FIRST_NAMESPACE {
        return Ok(numbered(std::process::id()));
    }
    let mut drawn = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut drawn)?;
    Ok(format!("{NAME}{DRAWN}{:016x}", u64::from_ne_bytes(drawn)))
}

/// Returns the address of a name.
///
/// # Errors
/// The name is too long.
pub(super) fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

/// Returns all control sockets in this network namespace.
///
/// # Errors
/// The kernel's list of sockets cannot be read.
pub(super) fn all() -> io::Result<Vec<Socket>> {
    let list = std::fs::read_to_string("/proc/net/unix")?;
    Ok(list.lines().filter_map(Socket::read).collect())
}

/// Returns the drawn name of a socket that the process has open, if any.
///
/// # Errors
/// The process's descriptors or the kernel's list cannot be read.
pub(super) fn of_process(pid: u32) -> io::Result<Option<String>> {
    let mut own = BTreeSet::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        let Ok(target) = std::fs::read_link(entry?.path()) else {
            continue;
        };
        let target = target.to_string_lossy();
        let inode = target.strip_prefix("socket:[");
        own.extend(inode.and_then(|rest| rest.strip_suffix(']')?.parse::<u64>().ok()));
    }
    let found = all()?
        .into_iter()
        .find(|socket| socket.number().is_none() && own.contains(&socket.inode));
    Ok(found.map(|socket| socket.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_numbers_or_drawn_and_nothing_else() {
        let line = |name: &str| {
            format!("0000000000000000: 00000002 00000000 00010000 0001 01 4711 {name}")
        };
        let read =
            |name: &str| Socket::read(&line(name)).map(|socket| (socket.number(), socket.inode));
        assert_eq!(read("@godwit-verbs-17"), Some((Some(17), 4711)));
        assert_eq!(read("@godwit-verbs-x00112233445566aa"), Some((None, 4711)));
        for other in [
            "",
            "@godwit-verbs-",
            "@godwit-verbs-x",
            "@godwit-verbs-x00112233445566a",
            "@godwit-verbs-x00112233445566aag",
            "@godwit-verbs--1",
            "/godwit-verbs-17",
            "@other",
        ] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn a_process_of_the_first_namespace_has_its_number_and_another_does_not() {
        let name = own().unwrap();
        let namespace = std::fs::metadata("/proc/self/ns/pid").unwrap().ino();
        assert_eq!(
            name == numbered(std::process::id()),
            namespace == FIRST_NAMESPACE,
            "{name}"
        );
    }
}
