use std::os::unix::fs::FileExt;

use godwit_core::request::RequestTag;
use godwit_core::units::{Bytes, Lba};

use super::*;
use godwit_io::ring::Completion;

/// Hands the completion of the only operation to the disk. Returns the ring's result, and true if the operation
/// succeeded.
fn wait(disk: &mut Disk, ring: &mut Ring) -> (i32, bool) {
    let Completion { token, result, .. } = ring.next_completion().expect("a wait");
    let Token::Disk(index) = token else {
        panic!("a foreign token")
    };
    let finished = disk.completed(ring, index, result);
    let done = finished.is_some_and(|finished| finished.result == Ok(Content::Data));
    (result, done)
}

#[test]
fn where_the_kernel_can_start_no_thread_the_disk_works_all_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = Image::create(&folder.path().join("disk"), Bytes(1 << 20)).expect("an image");
    let path = image.path.clone();
    let mut disk = Disk::new(image, String::from("full"), 4).expect("a disk");
    let mut ring = Ring::new().expect("a ring");
    let memory = Mapping::new(4096).expect("memory");
    // SAFETY: the mapping is as long, and nothing else uses it.
    unsafe { memory.at(0).write_bytes(7, 4096) };
    let extent = Extent::new(Lba(8), 8).expect("an extent");
    let write = DiskOperation::Write { extent, fua: true };
    let start = |disk: &mut Disk, ring: &mut Ring| {
        let tag = DiskTag::Barrier;
        // SAFETY: the memory lives longer than the ring is used.
        unsafe { disk.start(ring, tag, write, memory.at(0), &mut Vec::new(), None) };
    };

    let file = std::fs::File::open(path).expect("the image");
    let holds = |byte| {
        let mut found = [0; 4096];
        file.read_exact_at(&mut found, 4096).expect("a read");
        found == [byte; 4096]
    };
    // As the ring reports it: this ring never carries out the operation.
    start(&mut disk, &mut ring);
    let finished = disk.completed(&mut ring, 0, -libc::ECANCELED);
    drop(ring);
    assert!(finished.is_some_and(|finished| finished.result == Ok(Content::Data)));
    assert!(holds(7));

    let mut ring = Ring::new().expect("a ring");
    // SAFETY: as above; no operation is in flight.
    unsafe { memory.at(0).write_bytes(9, 4096) };
    for _ in 0..IN_PLACE {
        start(&mut disk, &mut ring);
        assert_eq!(wait(&mut disk, &mut ring), (0, true), "the ring wrote");
        assert!(holds(9));
    }
    start(&mut disk, &mut ring);
    let again = wait(&mut disk, &mut ring);
    assert_eq!(again, (4096, true), "the ring was not asked again");
}

#[test]
fn zeroes_are_not_written_into_a_new_image_without_holes() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = Image::create(&folder.path().join("disk"), Bytes(4 << 20)).expect("an image");
    let file = std::fs::File::open(&image.path).expect("the image");
    let mut disk = Disk::new(image, String::from("nfs"), 4).expect("a disk");
    // As over NFS 3, which punches no holes and reports none.
    disk.zeroing = Zeroing::by_writing(disk.capacity());
    let mut ring = Ring::new().expect("a ring");
    let memory = Mapping::new(8192).expect("memory");
    // SAFETY: the mapping is as long, and nothing else uses it.
    unsafe { memory.at(0).write_bytes(7, 4096) };
    let mut does = |operation| {
        let tag = DiskTag::Replica(RequestTag(0));
        // SAFETY: the memory lives longer than the ring is used.
        unsafe {
            disk.start(
                &mut ring,
                tag,
                operation,
                memory.at(0),
                &mut Vec::new(),
                None,
            )
        };
        while !wait(&mut disk, &mut ring).1 {}
    };
    let extent = |first, sectors| Extent::new(Lba(first), sectors).expect("an extent");
    let zeroes = |extent, fua| DiskOperation::WriteZeroes {
        extent,
        fua,
        unmap: true,
    };
    let allocated = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("a file"));
    does(zeroes(extent(0, 8192), false));
    does(zeroes(extent(2048, 2048), true));
    assert_eq!(allocated(), 0);
    // A block of data and a block of zeroes.
    let write = DiskOperation::Write {
        extent: extent(4096, 16),
        fua: false,
    };
    does(write);
    let one = allocated();
    assert!((8..=128).contains(&one), "{one} sectors");
    // Written data is overwritten.
    let mut found = [1; 4096];
    does(zeroes(extent(4096, 8), false));
    file.read_exact_at(&mut found, 4096 * 512).expect("a read");
    assert_eq!(found, [0; 4096]);
    assert_eq!(allocated(), one);
}
