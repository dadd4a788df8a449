//! What the kernel tells of a front end's memory that the front end itself does not.

use std::fs::{File, read_dir, read_link};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

/// Whether pages of the front end's memory at one of these of its addresses have yet to arrive.
///
/// A QEMU that connects again while its memory arrives does not say so, and would have it filled
/// with zeroes here. But what arrives is memory whose missing pages QEMU waits for itself, and that
/// can be seen. When it cannot, because the front end belongs to another user, the answer is no.
pub(crate) fn is_arriving(socket: &UnixStream, addresses: &[u64]) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(socket) else {
        return false;
    };
    let process = format!("/proc/{}", peer.pid.as_raw_nonzero());
    waits_for_pages(&process) && has_missing_pages(&process, addresses)
}

/// Whether the process waits for any pages. This is quick to find out.
fn waits_for_pages(process: &str) -> bool {
    let Ok(descriptors) = read_dir(format!("{process}/fd")) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        read_link(descriptor.path())
            .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
    })
}

/// Whether it does so at one of these addresses.
fn has_missing_pages(process: &str, addresses: &[u64]) -> bool {
    let Ok(maps) = File::open(format!("{process}/smaps")) else {
        return false;
    };
    let mut concerned = false;
    for line in BufReader::new(maps).lines().map_while(Result::ok) {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if concerned && flags.split_whitespace().any(|flag| flag == "um") {
                return true;
            }
        } else if let Some((start, end)) = range(&line) {
            concerned = addresses.iter().any(|at| (start..end).contains(at));
        }
    }
    false
}

/// The addresses of a mapping whose description begins with this line.
fn range(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    let address = |digits| u64::from_str_radix(digits, 16).ok();
    Some((address(start)?, address(end)?))
}
