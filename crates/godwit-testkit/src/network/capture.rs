//! A capture of the frames that a switch sends to every port, taken at a port without another user.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Namespace, inside};

/// Time between two looks for frames.
const TURN: Duration = Duration::from_millis(1);
/// Longest frame.
const LONGEST: usize = 1 << 16;

/// The frames arriving at a tap of a namespace, with their VLAN tags.
#[derive(Debug)]
pub struct Capture {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    frames: Mutex<Vec<Vec<u8>>>,
}

impl Capture {
    /// Captures the frames of an existing tap.
    pub(super) fn start(namespace: &Namespace, tap: &str) -> io::Result<Self> {
        let name = tap.to_owned();
        let opened = inside(namespace, move || open(&name)).join();
        let tap = opened.map_err(|_| io::Error::other("no tap"))??;
        let shared = Arc::new(Shared::default());
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || take(tap, &shared))
        };
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Returns the frames since the last call.
    pub fn take(&self) -> Vec<Vec<u8>> {
        let mut frames = self
            .shared
            .frames
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut frames)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn take(mut tap: File, shared: &Shared) -> io::Result<()> {
    let mut frame = vec![0; LONGEST];
    while !shared.stop.load(Ordering::Relaxed) {
        match tap.read(&mut frame) {
            Ok(length) => {
                let mut frames = shared.frames.lock().unwrap_or_else(PoisonError::into_inner);
                frames.push(frame[..length].to_vec());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(TURN),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn open(name: &str) -> io::Result<File> {
    let tap = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // Linux's `struct ifreq`.
    let mut request = [0_u8; 40];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = (libc::IFF_TAP | libc::IFF_NO_PI) as u16;
    request[libc::IFNAMSIZ..libc::IFNAMSIZ + 2].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: the operation reads and fills in the structure passed to it.
    match unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF as _, request.as_mut_ptr()) } {
        0 => Ok(tap),
        _ => Err(io::Error::last_os_error()),
    }
}
