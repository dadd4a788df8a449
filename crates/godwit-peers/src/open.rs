//! Open TLS connections, by the certificate at the other end. The revocation of a certificate ends its connections,
//! held by a task of the node or by a disk's engine.

use std::collections::HashMap;
use std::fs::read_dir;
use std::os::fd::{AsFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

use rustix::fs::fstat;
use rustix::net::{Shutdown, shutdown};
use rustls::pki_types::CertificateDer;

/// Connections remembered before ended ones are dropped.
const MANY: usize = 1024;

/// A socket of this process, by its inode number. The number is not reused for as long as an entry with the number is
/// kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketNumber(u64);

impl SocketNumber {
    /// Returns the number of a socket, which stays the same across owners.
    pub fn of(socket: impl AsFd) -> Option<Self> {
        fstat(socket).ok().map(|status| Self(status.st_ino))
    }
}

/// The open connections.
#[derive(Debug, Default)]
pub(crate) struct OpenConnections {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    chains: HashMap<SocketNumber, Vec<CertificateDer<'static>>>,
    /// Connections that were open when ended ones were last dropped.
    open: usize,
}

impl OpenConnections {
    /// Remembers the certificate at the other end.
    pub(crate) fn note(&self, socket: SocketNumber, chain: &[CertificateDer<'_>]) {
        let chain = chain.iter().map(|one| one.clone().into_owned()).collect();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.chains.insert(socket, chain);
        if known.chains.len() >= MANY.max(2 * known.open) {
            let open = sockets();
            known.chains.retain(|socket, _| open.contains_key(socket));
            known.open = known.chains.len();
        }
    }

    /// Ends the connections of matching certificates. Returns their number.
    pub(crate) fn end(&self, ends: impl Fn(&[CertificateDer<'static>]) -> bool) -> usize {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let open = sockets();
        let ended = known.chains.extract_if(|_, chain| ends(chain));
        let ended = ended.filter(|(socket, _)| {
            let number = open.get(socket);
            number.is_some_and(|&number| end(number, *socket))
        });
        ended.count()
    }
}

/// Returns the descriptors of this process's sockets.
fn sockets() -> HashMap<SocketNumber, RawFd> {
    let entries = read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let sockets = entries.filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let number = target.to_str()?.strip_prefix("socket:[")?;
        let number = number.strip_suffix(']')?.parse().ok()?;
        Some((
            SocketNumber(number),
            entry.file_name().to_str()?.parse().ok()?,
        ))
    });
    sockets.collect()
}

/// Ends a connection whose socket had this descriptor a moment ago. Returns false if the descriptor is not the socket's
/// now.
fn end(descriptor: RawFd, socket: SocketNumber) -> bool {
    // SAFETY: the call takes any number. A number without a descriptor is an error. A number now used for another file
    // gives a copy of the other file's descriptor, which is checked below.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return false;
    }
    // SAFETY: the copy was just made, and nothing else owns the copy.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    SocketNumber::of(&copy) == Some(socket) && shutdown(&copy, Shutdown::Both).is_ok()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn chain(name: &'static [u8]) -> [CertificateDer<'static>; 1] {
        [CertificateDer::from(name)]
    }

    #[test]
    fn connections_end_by_their_certificate_and_others_stay() {
        let open = OpenConnections::default();
        let pairs = [b"one", b"two"].map(|name| {
            let (near, far) = UnixStream::pair().expect("a pair");
            open.note(SocketNumber::of(&near).expect("a number"), &chain(name));
            far.set_nonblocking(true).expect("sets it");
            (near, far)
        });
        assert_eq!(open.end(|known| known == chain(b"one")), 1);
        let [(_near, mut ended), (_other, mut stays)] = pairs;
        assert_eq!(ended.read(&mut [0]).expect("its end"), 0);
        stays.read(&mut [0]).expect_err("nothing came");
        assert_eq!(open.end(|known| known == chain(b"one")), 0, "ended once");
    }

    #[test]
    fn connections_that_have_ended_are_forgotten() {
        let open = OpenConnections::default();
        for _ in 0..3 * MANY {
            let (near, _far) = UnixStream::pair().expect("a pair");
            open.note(SocketNumber::of(&near).expect("a number"), &chain(b"one"));
        }
        let known = open.known.lock().expect("not poisoned").chains.len();
        assert!(known < MANY, "{known} are remembered");
    }
}
