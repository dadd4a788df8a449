//! Taps: host interfaces whose other end is a program.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Mutex, PoisonError};

use godwit_vhost::features;

use crate::device::queues::features as net;
use crate::device::uplink::Uplink;
use crate::frame::packet::HEADER;

/// Most bytes of an interface's name.
pub const MOST_NAME: usize = libc::IFNAMSIZ - 1;

/// The reason why a tap cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name is not a valid interface name.
    #[error(
        "{0:?} cannot be an interface's name, which has 1 to {MOST_NAME} bytes and no / or space"
    )]
    Name(String),
    /// No interface has this name.
    #[error(
        "there is no interface {0} here: make it with 'ip tuntap add {0} mode tap' and 'ip link set {0} up'"
    )]
    Missing(String),
    /// The kernel has no taps, or the process may not use them.
    #[error(
        "taps cannot be used here (/dev/net/tun: {0}): run the node as root, or give it access to /dev/net/tun"
    )]
    Unavailable(io::Error),
    /// The interface is not a tap with a single queue.
    #[error(
        "interface {0} is no tap with a single queue: make one with 'ip tuntap add NAME mode tap'"
    )]
    Kind(String),
    /// The interface is not a tap with several queues.
    #[error(
        "interface {0} is no tap with several queues: make one with 'ip tuntap add NAME mode tap multi_queue', or give the NIC one queue"
    )]
    Queues(String),
    /// Another program or VM has the tap open.
    #[error("tap {0} is in use by another program or virtual machine: name another tap")]
    Busy(String),
    /// The tap belongs to another user.
    #[error(
        "tap {0} belongs to another user, or the node lacks CAP_NET_ADMIN: make it with 'ip tuntap add {0} mode tap user USER'"
    )]
    NotAllowed(String),
    /// The tap is down.
    #[error("tap {0} is down: 'ip link set {0} up' brings it up")]
    Down(String),
    /// Another error of the kernel.
    #[error("tap {name} cannot be used: {error}")]
    Other {
        /// Name of the tap.
        name: String,
        /// Error of the kernel.
        error: io::Error,
    },
}

/// Held from the check for other users until the tap is open, so two NICs of this process cannot both find the tap
/// free.
static TAKING: Mutex<()> = Mutex::new(());

/// Opens this many queues of an existing tap that is up.
///
/// # Errors
/// The reason, with a remedy.
pub fn open(name: &str, queues: u16) -> Result<Uplink, TapError> {
    check(name)?;
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    // The kernel would give queues of a multi-queue tap to every program.
    if queues > 1 && has_link(name)? {
        return Err(TapError::Busy(name.to_owned()));
    }
    attach(name, queues)
}

/// Makes a tap with this many queues, which disappears when its uplink is closed. The tap is down and in no bridge.
///
/// # Errors
/// If an interface of this name exists, or the kernel refuses.
pub fn make(name: &str, queues: u16) -> Result<Uplink, TapError> {
    check_name(name)?;
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if rustix::net::netdevice::name_to_index(socket(name)?, name).is_ok() {
        return Err(TapError::Busy(name.to_owned()));
    }
    attach(name, queues)
}

/// Checks that a tap exists and is up, not whether the tap is in use.
///
/// # Errors
/// If the tap is missing or down.
pub fn check(name: &str) -> Result<(), TapError> {
    check_name(name)?;
    let socket = socket(name)?;
    if rustix::net::netdevice::name_to_index(&socket, name).is_err() {
        return Err(TapError::Missing(name.to_owned()));
    }
    let mut request = Request::new(name);
    // SAFETY: the operation fills in the flags of the structure that it gets.
    unsafe { control(&socket, libc::SIOCGIFFLAGS, &mut request) }
        .map_err(|error| other(name, error))?;
    if request.flags() & libc::IFF_UP as libc::c_short == 0 {
        return Err(TapError::Down(name.to_owned()));
    }
    Ok(())
}

/// Returns the interface's MTU: most bytes of an IP packet.
///
/// # Errors
/// If no interface has this name.
pub fn mtu(name: &str) -> Result<u32, TapError> {
    check_name(name)?;
    let socket = socket(name)?;
    let mut request = Request::new(name);
    // SAFETY: the operation fills in the number of the structure that it gets.
    unsafe { control(&socket, libc::SIOCGIFMTU, &mut request) }
        .map_err(|_| TapError::Missing(name.to_owned()))?;
    Ok(request.number())
}

/// Returns the kernel's index of an interface.
///
/// # Errors
/// If no interface has this name.
pub fn index(name: &str) -> Result<u32, TapError> {
    check_name(name)?;
    rustix::net::netdevice::name_to_index(socket(name)?, name)
        .map_err(|_| TapError::Missing(name.to_owned()))
}

/// Returns true if an interface is a bridge, by its driver's name. The driver is asked in the network namespace of the
/// process; `/sys` may show another one.
///
/// # Errors
/// If the name is not a valid interface name.
pub fn is_bridge(name: &str) -> Result<bool, TapError> {
    let mut driver = DriverInfo {
        command: ETHTOOL_GDRVINFO,
        driver: [0; 32],
        rest: [0; 160],
    };
    // SAFETY: the structure is Linux's for this command.
    let asked = unsafe { ask_driver(name, &mut driver)? };
    Ok(asked.is_ok() && driver.driver.starts_with(b"bridge\0"))
}

/// Returns true if a program has the tap open.
fn has_link(name: &str) -> Result<bool, TapError> {
    let mut link = DriverValue {
        command: ETHTOOL_GLINK,
        value: 0,
    };
    // SAFETY: the structure is Linux's for this command.
    let asked = unsafe { ask_driver(name, &mut link)? };
    Ok(asked.is_ok() && link.value != 0)
}

/// Sends an ethtool command to an interface's driver.
///
/// # Safety
/// The question is Linux's structure for the command that it begins with.
unsafe fn ask_driver<T>(name: &str, question: &mut T) -> Result<io::Result<()>, TapError> {
    check_name(name)?;
    let socket = socket(name)?;
    let mut request = Request::new(name);
    let place = std::ptr::from_mut(question).expose_provenance();
    request.value[..size_of::<usize>()].copy_from_slice(&place.to_ne_bytes());
    // SAFETY: the operation fills in the structure whose address it gets, which lives, and is what the caller says.
    Ok(unsafe { control(&socket, libc::SIOCETHTOOL as _, &mut request) })
}

/// Returns the kinds of unfinished packets that a guest with these features takes: without a checksum, or unsegmented.
pub(in crate::device) const fn offloads(features: u64) -> libc::c_uint {
    let mut offloads = 0;
    if features & net::GUEST_CSUM == 0 {
        return 0;
    }
    offloads |= libc::TUN_F_CSUM;
    if features & net::GUEST_TSO4 != 0 {
        offloads |= libc::TUN_F_TSO4;
    }
    if features & net::GUEST_TSO6 != 0 {
        offloads |= libc::TUN_F_TSO6;
    }
    if features & net::GUEST_ECN != 0 && features & (net::GUEST_TSO4 | net::GUEST_TSO6) != 0 {
        offloads |= libc::TUN_F_TSO_ECN;
    }
    offloads
}

pub(super) fn set_offloads(tap: &OwnedFd, offloads: libc::c_uint) -> io::Result<()> {
    // SAFETY: the operation takes a number and no memory.
    match unsafe {
        libc::ioctl(
            tap.as_raw_fd(),
            libc::TUNSETOFFLOAD as _,
            libc::c_ulong::from(offloads),
        )
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn check_name(name: &str) -> Result<(), TapError> {
    let odd = |letter: char| letter == '/' || letter.is_whitespace() || letter.is_control();
    let fits = (1..=MOST_NAME).contains(&name.len()) && !name.contains(odd);
    // The kernel would replace the percent sign by a number.
    if !fits || name.contains('%') || matches!(name, "." | "..") {
        return Err(TapError::Name(name.chars().take(40).collect()));
    }
    Ok(())
}

fn attach(name: &str, queues: u16) -> Result<Uplink, TapError> {
    let queues: Result<Vec<OwnedFd>, TapError> = (0..queues)
        .map(|_| attach_queue(name, queues > 1))
        .collect();
    Ok(Uplink {
        queues: queues?,
        is_tap: true,
    })
}

fn attach_queue(name: &str, is_one_of_several: bool) -> Result<OwnedFd, TapError> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")
        .map_err(TapError::Unavailable)?;
    let fd = OwnedFd::from(device);
    let mut request = Request::new(name);
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if is_one_of_several {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    request.set_flags(flags as libc::c_short);
    // SAFETY: the operation reads and fills in the structure that it gets.
    unsafe { control(&fd, libc::TUNSETIFF as _, &mut request) }.map_err(|error| {
        let name = name.to_owned();
        match error.raw_os_error() {
            Some(libc::EBUSY) => TapError::Busy(name),
            Some(libc::EPERM) => TapError::NotAllowed(name),
            Some(libc::EINVAL) if is_one_of_several => TapError::Queues(name),
            Some(libc::EINVAL) => TapError::Kind(name),
            _ => TapError::Other { name, error },
        }
    })?;
    let mut header = HEADER as libc::c_int;
    // SAFETY: the operation reads the number behind the pointer.
    unsafe { control(&fd, libc::TUNSETVNETHDRSZ as _, &mut header) }
        .map_err(|error| other(name, error))?;
    Ok(fd)
}

fn other(name: &str, error: io::Error) -> TapError {
    TapError::Other {
        name: name.to_owned(),
        error,
    }
}

/// Opens a socket through which interfaces can be queried.
fn socket(name: &str) -> Result<OwnedFd, TapError> {
    // SAFETY: the call takes no memory and gives a new descriptor.
    unsafe {
        match libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) {
            fd @ 0.. => Ok(OwnedFd::from_raw_fd(fd)),
            _ => Err(other(name, io::Error::last_os_error())),
        }
    }
}

/// Linux's `struct ifreq`.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    /// A union; only its first bytes are used here.
    value: [u8; 24],
}

impl Request {
    fn new(name: &str) -> Self {
        let mut request = Self {
            name: [0; libc::IFNAMSIZ],
            value: [0; 24],
        };
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        request
    }

    fn flags(&self) -> libc::c_short {
        libc::c_short::from_ne_bytes([self.value[0], self.value[1]])
    }

    fn set_flags(&mut self, flags: libc::c_short) {
        self.value[..2].copy_from_slice(&flags.to_ne_bytes());
    }

    fn number(&self) -> u32 {
        u32::from_ne_bytes([self.value[0], self.value[1], self.value[2], self.value[3]])
    }
}

/// Command that queries an interface's driver.
const ETHTOOL_GDRVINFO: u32 = 3;

/// Command that queries an interface's link; a tap has a link while a program has the tap open.
const ETHTOOL_GLINK: u32 = 10;

/// Linux's `struct ethtool_value`.
#[repr(C)]
struct DriverValue {
    command: u32,
    value: u32,
}

/// Linux's `struct ethtool_drvinfo`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

const _: () = assert!(size_of::<DriverInfo>() == 196);

/// # Safety
/// The operation reads and writes nothing but `argument`.
unsafe fn control<T>(fd: &OwnedFd, operation: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: the caller vouches for the operation; the descriptor is open.
    match unsafe { libc::ioctl(fd.as_raw_fd(), operation as _, std::ptr::from_mut(argument)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The kernel's header of 12 bytes requires `VERSION_1`, which every device offers.
const _: () = assert!(features::TRANSPORT & net::VERSION_1 != 0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_interface_has_are_refused() {
        for name in ["", "a/b", "a b", "tap%d", "..", "0123456789abcdef"] {
            assert!(matches!(check(name), Err(TapError::Name(_))), "{name:?}");
        }
        assert!(!is_bridge("lo").expect("a name") && !is_bridge("godwit-none").expect("a name"));
        let error = check("godwit-none").expect_err("is not there");
        assert!(matches!(error, TapError::Missing(_)), "{error}");
    }

    #[test]
    fn the_tap_finishes_what_the_guest_does_not_take_unfinished() {
        assert_eq!(offloads(0), 0);
        assert_eq!(offloads(net::GUEST_TSO4), 0, "needs checksums");
        assert_eq!(offloads(net::GUEST_CSUM), libc::TUN_F_CSUM);
        let all = net::GUEST_CSUM | net::GUEST_TSO4 | net::GUEST_TSO6 | net::GUEST_ECN;
        assert_eq!(
            offloads(all),
            libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN
        );
    }
}
