//! The file that a process watches (inotify(7)). The kernel shows the file's handle, but not its name.

use std::ffi::c_int;
use std::fs::{File, metadata, read_link};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// Longest handle of a file (`MAX_HANDLE_SZ`).
const MOST_HANDLE: usize = 128;

/// `struct file_handle` with room for any handle.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: c_int,
    handle: [u8; MOST_HANDLE],
}

/// A watched file or folder.
pub(in crate::host) enum Watched {
    /// Exists under this name.
    Named(String),
    /// Exists no more.
    Gone,
}

/// Finds the file that a line of proc_pid_fdinfo(5) describes, on the file system with the kernel's number `device`.
/// Returns `None` if the file cannot be found out.
pub(in crate::host) fn watched(pid: u32, line: &str, device: u64) -> Option<Watched> {
    let field = |name: &str| {
        line.split_whitespace()
            .find_map(|word| word.strip_prefix(name))
    };
    let text = field("f_handle:")?;
    let kind = field("fhandle-type:").and_then(|kind| c_int::from_str_radix(kind, 16).ok())?;
    let mut handle = Handle {
        bytes: u32::try_from(text.len() / 2).ok()?,
        kind,
        handle: [0; MOST_HANDLE],
    };
    let places = handle.handle.iter_mut();
    if text.len() / 2 > places.len() {
        return None;
    }
    for (place, byte) in
        places.zip((0..text.len() / 2).map(|number| text.get(number * 2..number * 2 + 2)))
    {
        *place = u8::from_str_radix(byte?, 16).ok()?;
    }
    let file_system = mounted(pid, device)?;
    // SAFETY: the handle has as many bytes as it says, and the returned descriptor is new.
    let opened = unsafe {
        let opened = libc::open_by_handle_at(
            file_system.as_raw_fd(),
            (&raw mut handle).cast(),
            libc::O_PATH | libc::O_CLOEXEC,
        );
        if opened < 0 {
            let gone = std::io::Error::last_os_error().raw_os_error() == Some(libc::ESTALE);
            return gone.then_some(Watched::Gone);
        }
        OwnedFd::from_raw_fd(opened)
    };
    let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
    let name = read_link(&link).ok()?.to_str()?.to_owned();
    let gone = metadata(&link).ok()?.nlink() == 0 || name.ends_with(" (deleted)");
    Some(if gone {
        Watched::Gone
    } else {
        Watched::Named(name)
    })
}

/// Opens a folder of the file system with the kernel's number `device`, as the process sees the folder.
fn mounted(pid: u32, device: u64) -> Option<File> {
    // The kernel prints its internal device number here, whose low twenty bits are the minor number.
    let wanted = format!("{}:{}", device >> 20, device & 0xf_ffff);
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).ok()?;
    mounts.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (Some(number), Some(folder)) = (words.get(2), words.get(4)) else {
            return None;
        };
        (*number == wanted).then(|| File::open(format!("/proc/{pid}/root{folder}")).ok())?
    })
}
