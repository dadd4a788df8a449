//! Memory that a device could write is marked as changed once nothing is in flight, and no other memory is.

use std::ptr;

use godwit_verbs::abi::IBV_ACCESS_LOCAL_WRITE;
use godwit_verbs::shim;

use crate::{Application, suspend_and_release};

const PAGE: usize = 4096;
const PAGES: usize = 4;

/// Maps new memory of [`PAGES`] pages without content.
fn memory() -> *mut libc::c_void {
    let (length, access) = (PAGES * PAGE, libc::PROT_READ | libc::PROT_WRITE);
    let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: new memory at a place of the kernel's choice.
    let place = unsafe { libc::mmap(ptr::null_mut(), length, access, shared, -1, 0) };
    assert_ne!(place, libc::MAP_FAILED);
    place
}

/// Returns the number of pages that were written.
fn written(memory: *mut libc::c_void) -> usize {
    let mut seen = [0u8; PAGES];
    // SAFETY: one byte for each page of what is mapped.
    let looked = unsafe { libc::mincore(memory, PAGES * PAGE, seen.as_mut_ptr()) };
    assert_eq!(looked, 0);
    seen.iter().filter(|page| **page & 1 == 1).count()
}

fn go_on(application: &Application) {
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
}

#[test]
fn memory_that_the_device_could_write_is_marked() {
    let application = Application::start();
    let places = [memory(), memory(), memory()];
    let register = |place: *mut libc::c_void, bytes: usize, access: i32| {
        // SAFETY: the memory is mapped, and the domain lives.
        let region = unsafe {
            shim::reg_mr(
                application.pd,
                place,
                bytes,
                place.addr() as u64,
                access as u32,
            )
        };
        assert!(!region.is_null());
        region
    };
    let mut regions = vec![
        // From the middle of one page into the next.
        register(
            places[0].wrapping_byte_add(100),
            PAGE,
            IBV_ACCESS_LOCAL_WRITE,
        ),
        register(places[1], PAGES * PAGE, 0),
    ];
    let gone = register(places[2], PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE);
    // SAFETY: the region lives.
    assert_eq!(unsafe { shim::dereg_mr(gone) }, 0);
    shim::mark_written().expect_err("the device may write still");
    suspend_and_release(&application, 0);
    let error = shim::mark_written().unwrap_err();
    assert!(error.contains("nobody has asked"), "{error}");
    shim::track_written();
    assert_eq!(places.map(written), [0, 0, 0]);
    shim::mark_written().unwrap();
    assert_eq!(places.map(written), [2, 0, 0]);
    go_on(&application);
    // The next move has to ask again.
    suspend_and_release(&application, 0);
    shim::mark_written().expect_err("nobody has asked");
    go_on(&application);
    shim::track_written();
    let lost = register(places[2], PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE);
    regions.push(lost);
    // The application may unmap registered memory. The process continues, and all of its memory has to be copied.
    // SAFETY: nobody uses it.
    assert_eq!(unsafe { libc::munmap(places[2], PAGES * PAGE) }, 0);
    suspend_and_release(&application, 0);
    let error = shim::mark_written().unwrap_err();
    assert!(
        error.contains(&format!("{:#x}", places[2].addr())),
        "{error}"
    );
    go_on(&application);
    for region in regions {
        // SAFETY: the region lives.
        assert_eq!(unsafe { shim::dereg_mr(region) }, 0);
    }
}

#[test]
fn memory_of_a_region_that_is_given_back_before_the_stop_is_marked() {
    let application = Application::start();
    let (given_back, gone) = (memory(), memory());
    let give_back = |place: *mut libc::c_void| {
        let (length, access) = (PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE as u32);
        // SAFETY: the memory is mapped, the domain lives, and the region after it.
        unsafe {
            let region = shim::reg_mr(application.pd, place, length, place.addr() as u64, access);
            assert!(!region.is_null());
            if place == gone {
                assert_eq!(libc::munmap(place, length), 0);
            }
            assert_eq!(shim::dereg_mr(region), 0);
        }
    };
    give_back(given_back);
    assert_eq!(written(given_back), 0, "nobody has asked for it");
    shim::track_written();
    give_back(given_back);
    assert_eq!(written(given_back), PAGES);
    suspend_and_release(&application, 0);
    shim::mark_written().unwrap();
    go_on(&application);
    // Memory that cannot be marked is not forgotten.
    shim::track_written();
    give_back(gone);
    give_back(given_back);
    suspend_and_release(&application, 0);
    let error = shim::mark_written().unwrap_err();
    assert!(error.contains(&format!("{:#x}", gone.addr())), "{error}");
    go_on(&application);
}
