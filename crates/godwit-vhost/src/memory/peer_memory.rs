//! Facts of a front end's memory that only the kernel tells.

use std::fs::{File, read_dir, read_link};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

/// Returns true if pages of the front end's memory are still arriving at any of these addresses of the front end.
///
/// A QEMU that reconnects while its memory arrives does not tell, and would have the missing pages filled with zeroes
/// here. But QEMU itself waits for the missing pages, and the kernel shows these waits. Returns false if the kernel
/// hides them: the front end belongs to another user.
pub(crate) fn is_arriving(socket: &UnixStream, addresses: &[u64]) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(socket) else {
        return false;
    };
    let process = format!("/proc/{}", peer.pid.as_raw_nonzero());
    waits_for_pages(&process) && has_missing_pages(&process, addresses)
}

/// Returns true if the process waits for any pages. A quick check.
fn waits_for_pages(process: &str) -> bool {
    let Ok(descriptors) = read_dir(format!("{process}/fd")) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        read_link(descriptor.path())
            .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
    })
}

/// Returns true if the process waits for pages at any of these addresses.
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

/// Returns the address range in the first line of a mapping's description.
fn range(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    let address = |digits| u64::from_str_radix(digits, 16).ok();
    Some((address(start)?, address(end)?))
}
