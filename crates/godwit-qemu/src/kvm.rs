//! Checks of KVM on this host.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::user::QemuUser;

const DEVICE: &str = "/dev/kvm";

/// Version of KVM's interface, unchanged since 2007.
const API_VERSION: i32 = 12;

// From linux/kvm.h: _IO(0xAE, number).
const GET_API_VERSION: libc::Ioctl = 0xAE00;
const CREATE_VM: libc::Ioctl = 0xAE01;
const CREATE_VCPU: libc::Ioctl = 0xAE41;

/// Checks that QEMU can run a guest with KVM as this user, or as this process's own. Opens the device, creates a
/// machine and a processor, and releases everything.
///
/// # Errors
/// The obstacle, as a sentence.
pub fn check(user: Option<&QemuUser>) -> Result<(), String> {
    let device = OpenOptions::new().read(true).write(true).open(DEVICE);
    let device = device.map_err(|error| format!("{DEVICE} cannot be opened: {error}"))?;
    if let Some(user) = user.filter(|user| !user.may_write(Path::new(DEVICE))) {
        return Err(format!("user {} may not write to {DEVICE}", user.name()));
    }
    works(&device).map_err(|error| format!("{DEVICE} makes no virtual machine: {error}"))
}

/// Checks the same for a guest that need not run with KVM: the processor must virtualize, too. Without hardware
/// virtualization a kernel may offer a KVM for adapted guests only (kvm-pvm); others stand still.
///
/// # Errors
/// The obstacle, as a sentence.
pub fn check_for_any_guest(user: Option<&QemuUser>) -> Result<(), String> {
    check(user)?;
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if cfg!(target_arch = "x86_64") && !virtualizes(&processors) {
        return Err(String::from(
            "the processor has neither vmx nor svm, so KVM here runs no ordinary guest",
        ));
    }
    Ok(())
}

fn works(device: &File) -> io::Result<()> {
    let version = call(device, GET_API_VERSION)?;
    if version != API_VERSION {
        let text = format!("its interface has version {version} instead of {API_VERSION}");
        return Err(io::Error::other(text));
    }
    let machine = descriptor(call(device, CREATE_VM)?);
    descriptor(call(&machine, CREATE_VCPU)?);
    Ok(())
}

/// Sends KVM a request with the argument 0.
fn call(of: &impl AsRawFd, request: libc::Ioctl) -> io::Result<i32> {
    // SAFETY: these requests take a number, which is 0, and no pointer; the descriptor is open as long as `of` is.
    match unsafe { libc::ioctl(of.as_raw_fd(), request, 0) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer),
    }
}

/// Takes ownership of a descriptor just made by KVM.
fn descriptor(made: i32) -> OwnedFd {
    // SAFETY: KVM returned a new descriptor, which nothing else owns.
    unsafe { OwnedFd::from_raw_fd(made) }
}

/// Returns true if a `/proc/cpuinfo` shows hardware virtualization.
fn virtualizes(processors: &str) -> bool {
    let mut flags = processors.lines().filter(|line| line.starts_with("flags"));
    flags.any(|line| {
        line.split_whitespace()
            .any(|flag| matches!(flag, "vmx" | "svm"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_vmx_or_svm_means_virtualization() {
        for (flags, virtualizes_guests) in [
            ("flags\t\t: fpu vmx sse", true),
            ("processor : 0\nflags : fpu svm\n", true),
            ("flags\t\t: fpu svmx vmxon hypervisor", false),
            ("vmx flags\t: ept", false),
            ("", false),
        ] {
            assert_eq!(virtualizes(flags), virtualizes_guests, "{flags:?}");
        }
    }

    #[test]
    fn kvm_without_virtualization_runs_no_ordinary_guest() {
        let processors = std::fs::read_to_string("/proc/cpuinfo").expect("is told");
        if cfg!(target_arch = "x86_64") && !virtualizes(&processors) {
            check_for_any_guest(None).expect_err("guests would stand still");
        }
    }

    #[test]
    fn a_device_that_is_not_kvm_is_told() {
        let other = File::open("/dev/null").expect("opens");
        works(&other).expect_err("it makes no machines");
    }
}
