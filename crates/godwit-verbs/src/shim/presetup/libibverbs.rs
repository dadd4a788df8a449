//! The place in this process's memory where libibverbs keeps the address of ioctl(2).
//!
//! A function of this name in the library would take every program's calls. The dynamic linker has written the address
//! into one place of libibverbs (the global offset table), and only this place is changed.

use std::ffi::{CStr, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::shim::real::real;

/// ioctl(2) as libibverbs calls it.
pub(super) type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;

/// `Elf64_Dyn`
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// `Elf64_Rela`
#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

/// `DT_*` of <elf.h>
const END: i64 = 0;
const PLT_SIZE: i64 = 2;
const STRINGS: i64 = 5;
const SYMBOLS: i64 = 6;
const RELOCATIONS: i64 = 7;
const RELOCATIONS_SIZE: i64 = 8;
const PLT: i64 = 23;

/// Makes libibverbs call `replacement` from now on.
///
/// # Errors
/// One sentence, if libibverbs is not loaded or calls ioctl(2) in an unknown way.
pub(super) fn replace_ioctl(replacement: Ioctl) -> Result<(), String> {
    real();
    let mut place: *mut *mut c_void = std::ptr::null_mut();
    // SAFETY: `look` is called with the address of `place`, which lives meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut place).cast()) };
    if place.is_null() {
        return Err("this libibverbs does not call ioctl(2) in the way that is known".to_owned());
    }
    // SAFETY: takes no pointer.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let begin = place.addr() / page * page;
    // SAFETY: the page is libibverbs' own table, which the linker may have write-protected; it stays readable.
    let allowed = unsafe {
        libc::mprotect(
            begin as *mut c_void,
            page,
            libc::PROT_READ | libc::PROT_WRITE,
        )
    };
    if allowed != 0 {
        return Err(format!(
            "libibverbs' table of functions cannot be changed: {}",
            std::io::Error::last_os_error()
        ));
    }
    // SAFETY: the place is aligned as the linker's relocations are, and holds the address of a function.
    unsafe { AtomicPtr::from_ptr(place) }.store(replacement as *mut c_void, Ordering::Release);
    Ok(())
}

/// Looks for the place in one loaded library; a result other than 0 ends the search.
unsafe extern "C" fn look(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    let info = &*info;
    if info.dlpi_name.is_null()
        || !CStr::from_ptr(info.dlpi_name)
            .to_bytes()
            .windows(b"/libibverbs.so".len())
            .any(|part| part == b"/libibverbs.so")
    {
        return 0;
    }
    let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
    let Some(dynamic) = headers
        .iter()
        .find(|header| header.p_type == libc::PT_DYNAMIC)
    else {
        return 0;
    };
    // SAFETY: the linker has loaded the segments that the headers describe.
    let place = ioctl_in(
        info.dlpi_addr,
        (info.dlpi_addr + dynamic.p_vaddr) as *const Dynamic,
    );
    found.cast::<*mut *mut c_void>().write(place);
    1
}

/// Returns the place, or null. `entry` is the first entry of the library's dynamic section.
unsafe fn ioctl_in(base: u64, mut entry: *const Dynamic) -> *mut *mut c_void {
    let (mut strings, mut symbols) = (0, 0);
    // Each with its size in bytes.
    let (mut plt, mut others) = ((0, 0), (0, 0));
    while (*entry).tag != END {
        let value = (*entry).value;
        match (*entry).tag {
            STRINGS => strings = value,
            SYMBOLS => symbols = value,
            PLT => plt.0 = value,
            PLT_SIZE => plt.1 = value,
            RELOCATIONS => others.0 = value,
            RELOCATIONS_SIZE => others.1 = value,
            _ => {}
        }
        entry = entry.add(1);
    }
    if strings == 0 || symbols == 0 {
        return std::ptr::null_mut();
    }
    for (table, size) in [plt, others].into_iter().filter(|table| table.0 != 0) {
        let count = size as usize / size_of::<Relocation>();
        // SAFETY: the linker has applied this very table.
        for relocation in std::slice::from_raw_parts(table as *const Relocation, count) {
            let symbol = (symbols as *const libc::Elf64_Sym).add((relocation.info >> 32) as usize);
            let name = CStr::from_ptr((strings + u64::from((*symbol).st_name)) as *const _);
            if relocation.info >> 32 != 0 && name == c"ioctl" {
                return (base + relocation.offset) as *mut *mut c_void;
            }
        }
    }
    std::ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine without libibverbs has no such place.
    #[test]
    fn libibverbs_is_found_where_it_is_loaded() {
        // SAFETY: a constant name; libibverbs' constructors are those that applications run.
        let loaded = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
        let mut place: *mut *mut c_void = std::ptr::null_mut();
        // SAFETY: as in `replace_ioctl`.
        unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut place).cast()) };
        assert_eq!(place.is_null(), loaded.is_null());
        if !place.is_null() {
            // SAFETY: the place holds the address that the linker wrote.
            assert_eq!(unsafe { *place }, libc::ioctl as *mut c_void);
        }
    }
}
