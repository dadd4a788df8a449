//! The first network card: its queue pairs, and an XDP program in its driver or in the network stack.

use std::ffi::c_ulong;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::console;

const CARD: &[u8] = b"eth0";
/// `linux/ethtool.h`.
const ETHTOOL_SCHANNELS: u32 = 0x3d;
/// `linux/bpf.h`.
const BPF_PROG_LOAD: u32 = 5;
const BPF_LINK_CREATE: u32 = 28;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;

/// The place of an XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the driver (`xdpdrv`).
    Driver,
    /// In front of the network stack (`xdpgeneric`).
    Stack,
}

impl Place {
    pub(crate) fn of(word: &str) -> Option<Self> {
        match word {
            "driver" => Some(Self::Driver),
            "stack" => Some(Self::Stack),
            _ => None,
        }
    }

    /// `linux/if_link.h`.
    const fn flags(self) -> u32 {
        match self {
            Self::Stack => 1 << 1,
            Self::Driver => 1 << 2,
        }
    }
}

/// Prints the outcome of a command to the card.
pub(crate) fn say(command: &str, outcome: io::Result<()>) {
    let outcome = outcome.map_or_else(|error| error.to_string(), |()| String::from("done"));
    console::say_text("card", &format!("{command}: {outcome}"));
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    most: [u32; 4],
    receive: u32,
    transmit: u32,
    other: u32,
    combined: u32,
}

/// Does the same as `ethtool -L eth0 combined PAIRS`.
pub(crate) fn set_channels(pairs: u32) -> io::Result<()> {
    let mut channels = Channels {
        command: ETHTOOL_SCHANNELS,
        combined: pairs,
        ..Channels::default()
    };
    // SAFETY: all zeroes are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(CARD) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: `request` names a card and points to `channels`; both outlive the call.
    let answer = unsafe {
        let socket = socket.as_raw_fd();
        libc::ioctl(socket, 0x8946 as c_ulong as _, &raw mut request)
    };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The attributes of `BPF_PROG_LOAD`: the beginning of `union bpf_attr`.
#[repr(C)]
struct Load {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
}

/// The attributes of `BPF_LINK_CREATE`.
#[repr(C)]
struct Link {
    program: u32,
    card: u32,
    attach_type: u32,
    flags: u32,
}

/// Attaches a program that passes every packet, until the machine is switched off.
pub(crate) fn attach_xdp(place: Place) -> io::Result<()> {
    // r0 = XDP_PASS; exit
    let code: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];
    let load = Load {
        kind: BPF_PROG_TYPE_XDP,
        instructions: code.len() as u32,
        code: code.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
    };
    let program = bpf(BPF_PROG_LOAD, &load)?;
    let mut name = [0; libc::IFNAMSIZ];
    name[..CARD.len()].copy_from_slice(CARD);
    // SAFETY: `name` ends with a zero.
    let card = unsafe { libc::if_nametoindex(name.as_ptr().cast()) };
    let link = Link {
        program: program.as_raw_fd().cast_unsigned(),
        card,
        attach_type: BPF_XDP,
        flags: place.flags(),
    };
    // The program stays attached for as long as its link is open.
    std::mem::forget(bpf(BPF_LINK_CREATE, &link)?);
    Ok(())
}

/// Runs a bpf(2) command; returns the descriptor that it made.
fn bpf<T>(command: u32, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads no more than the given size, and the memory behind the attributes' pointers outlives the
    // call.
    let made = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}
