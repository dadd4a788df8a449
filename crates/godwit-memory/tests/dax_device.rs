//! Tests on a real DAX device named by the environment. `make test-slow` boots a machine with such a device. All data on
//! the device is overwritten.

use std::fs::File;
use std::path::PathBuf;

use godwit_memory::dax::Geometry;
use godwit_memory::ownership::Arrival;
use godwit_memory::pool::device::space::Extent;
use godwit_memory::pool::segment::Segment;
use godwit_memory::pool::{Pool, PoolError, proof};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Variable that names the device.
const DEVICE: &str = "GODWIT_DAX_DEVICE";

/// Runs `work` on a part of the device, mapped like QEMU's mappings.
fn with_part<R>(file: &File, part: Extent, work: impl FnOnce(&mut [u8]) -> R) -> R {
    let bytes = usize::try_from(part.bytes).unwrap();
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses a free place, and no other code uses this part of the device.
    let mapped = unsafe {
        let null = std::ptr::null_mut();
        mmap(null, bytes, prot, MapFlags::SHARED, file, part.offset)
    };
    let mapped = mapped.unwrap();
    // SAFETY: the part was mapped above.
    let done = work(unsafe { std::slice::from_raw_parts_mut(mapped.cast(), bytes) });
    // SAFETY: no reference into the mapping is left.
    unsafe { munmap(mapped, bytes) }.unwrap();
    done
}

#[test]
#[ignore = "needs a DAX device: make test-slow"]
fn a_dax_device_is_a_pool() {
    let path = PathBuf::from(std::env::var_os(DEVICE).expect(DEVICE));
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let geometry = Geometry::of(&file).unwrap().expect("is a DAX device");
    println!("{geometry:?}");
    assert!(geometry.is_device && geometry.align >= 4096);
    let align = geometry.align;
    // Old content of the device is not a pool.
    let table = Extent {
        offset: 0,
        bytes: align,
    };
    with_part(&file, table, |bytes| bytes.fill(0x11));
    assert!(matches!(Pool::open(&path), Err(PoolError::Foreign(_))));
    assert!(matches!(
        Pool::format(&path, false),
        Err(PoolError::Foreign(_))
    ));
    with_part(&file, table, |bytes| bytes.fill(0));
    assert!(matches!(Pool::open(&path), Err(PoolError::NotFormatted(_))));
    let here = Pool::format(&path, false).unwrap();
    let there = Pool::open(&path).unwrap();
    assert_eq!(here.page_bytes(), align);
    assert!(
        !here.lets_memory_move().unwrap(),
        "its pages cannot be held"
    );

    let odd = Segment::allocate(&here, "v", align + 4096, "a");
    assert!(matches!(odd, Err(PoolError::PageSize { .. })), "{odd:?}");
    let first = Segment::allocate(&here, "v", 2 * align, "a").unwrap();
    let part = first.place().extent;
    assert_eq!((part.offset % align, part.bytes), (0, 2 * align));
    let zero = |bytes: &mut [u8]| bytes.iter().all(|byte| *byte == 0);
    assert!(with_part(&file, part, zero), "nothing of an earlier guest");
    with_part(&file, part, |bytes| bytes.fill(0x5a));

    let question = proof::Question::ask(&here, "v", "m").unwrap();
    proof::answer(&there, "v", "m", &question.nonce(), "b").unwrap();
    question.answered_by("b").unwrap();
    first.decide("a", 1, "b").unwrap();
    let seen = Segment::open(&there, "v").unwrap();
    assert_eq!(seen.title().unwrap().arrival("b", 1), Arrival::Given);
    let kept = with_part(&file, part, |bytes| bytes.iter().all(|byte| *byte == 0x5a));
    assert!(kept, "its memory is as it was");

    seen.remove(&there).unwrap();
    let next = Segment::allocate(&here, "w", 2 * align, "a").unwrap();
    assert_eq!(next.place().extent, part, "the same part");
    assert!(with_part(&file, part, zero), "nothing of the earlier guest");
    let room = here.room().unwrap();
    Segment::allocate(&there, "x", room.free, "b").unwrap();
    assert_eq!(here.room().unwrap().free, 0);
    let full = Segment::allocate(&here, "y", align, "a");
    assert!(matches!(full, Err(PoolError::Full { .. })), "{full:?}");
    for name in ["w", "x"] {
        let segment = Segment::open(&here, name).unwrap();
        segment.remove(&here).unwrap();
    }
    assert_eq!(here.room().unwrap().free, room.total);
}
