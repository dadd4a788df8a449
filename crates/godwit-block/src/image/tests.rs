use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;

use godwit_core::units::{Bytes, Sectors};

use super::*;

const MIB: u64 = 1 << 20;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn keep_going(_: CopyProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Creates an image with data, written zeroes, and a hole, which does not end on a block.
fn sample(path: &Path) -> Vec<u8> {
    let mut content = vec![0; 9 * MIB as usize + 512];
    for (index, byte) in content[..MIB as usize + 700].iter_mut().enumerate() {
        *byte = index as u8 | 1;
    }
    content[5 * MIB as usize] = 7;
    *content.last_mut().expect("not empty") = 9;
    let mut file = File::create(path).expect("created");
    file.set_len(content.len() as u64).expect("extended");
    file.write_all(&content[..3 * MIB as usize])
        .expect("written");
    for block in [5 * MIB as usize, 9 * MIB as usize] {
        file.write_all_at(&content[block..block + 512], block as u64)
            .expect("written");
    }
    content
}

#[test]
fn a_new_image_is_sparse_and_reads_as_zeroes() {
    let directory = directory();
    let path = directory.path().join("disk");
    let image = Image::create(&path, Bytes(64 * MIB)).expect("created");
    assert_eq!(image.capacity, Sectors(64 * MIB / 512));
    assert_eq!(image.kind, ImageKind::File);
    assert!(image.allocated().expect("inspected").0 < MIB);
    let mut content = Vec::new();
    File::open(&path)
        .expect("opened")
        .read_to_end(&mut content)
        .expect("read");
    assert_eq!(content.len() as u64, 64 * MIB);
    assert!(content.iter().all(|&byte| byte == 0));
    assert_eq!(fs::metadata(&path).expect("metadata").mode() & 0o777, 0o600);
}

#[test]
fn what_was_written_counts_as_allocated() {
    let directory = directory();
    let path = directory.path().join("disk");
    let image = Image::create(&path, Bytes(64 * MIB)).expect("created");
    File::options()
        .write(true)
        .open(&path)
        .and_then(|mut file| {
            file.write_all(&vec![1; 4 * MIB as usize])
                .and_then(|()| file.sync_all())
        })
        .expect("written");
    assert!(image.allocated().expect("inspected").0 >= 4 * MIB);
}

#[test]
fn a_new_image_with_storage_takes_it_and_reads_as_zeroes() {
    let directory = directory();
    let path = directory.path().join("disk");
    let image = Image::create_with_storage(&path, Bytes(8 * MIB)).expect("created");
    assert!(image.allocated().expect("inspected").0 >= 8 * MIB);
    let content = fs::read(&path).expect("read");
    assert_eq!(content.len() as u64, 8 * MIB);
    assert!(content.iter().all(|&byte| byte == 0));
}

#[test]
fn impossible_sizes_are_refused_and_leave_nothing() {
    let directory = directory();
    let path = directory.path().join("disk");
    for size in [0, 1, 511, 513, MIB + 1, u64::MAX] {
        let error = Image::create(&path, Bytes(size)).expect_err("refused");
        assert!(
            matches!(error, ImageError::Size { bytes, .. } if bytes == size),
            "{error}"
        );
        assert!(
            error.to_string().contains(path.to_str().expect("UTF-8")),
            "{error}"
        );
    }
    let error = Image::create(&path, Bytes(u64::MAX - 511)).expect_err("refused");
    assert!(matches!(error, ImageError::TooLarge { .. }), "{error}");
    assert!(!path.exists());

    fs::write(&path, [0; 513]).expect("written");
    let error = Image::open(&path).expect_err("refused");
    assert!(
        error.to_string().contains("513") && error.to_string().contains("cut short"),
        "{error}"
    );
}

#[test]
fn an_existing_file_is_never_replaced() {
    let directory = directory();
    let path = directory.path().join("disk");
    fs::write(&path, b"precious").expect("written");
    let error = Image::create(&path, Bytes(MIB)).expect_err("refused");
    assert!(matches!(error, ImageError::Exists { .. }), "{error}");
    let source = directory.path().join("source");
    sample(&source);
    let error = import(&source, &path, keep_going).expect_err("refused");
    assert!(matches!(error, ImageError::Exists { .. }), "{error}");
    assert_eq!(fs::read(&path).expect("read"), b"precious");
}

#[test]
fn an_image_is_opened_once_at_a_time() {
    let directory = directory();
    let path = directory.path().join("disk");
    let image = Image::create(&path, Bytes(MIB)).expect("created");
    let error = Image::open(&path).expect_err("refused");
    assert!(matches!(error, ImageError::Locked { .. }), "{error}");
    let error = import(&path, &directory.path().join("copy"), keep_going).expect_err("refused");
    assert!(matches!(error, ImageError::Locked { .. }), "{error}");
    drop(image);
    Image::open(&path).expect("opened once the first is closed");
}

#[test]
fn only_files_and_block_devices_are_images() {
    let directory = directory();
    let missing = directory.path().join("missing");
    assert!(matches!(
        Image::open(&missing),
        Err(ImageError::Missing { .. })
    ));
    let inside = missing.join("disk");
    let error = Image::create(&inside, Bytes(MIB)).expect_err("refused");
    assert!(
        matches!(&error, ImageError::Missing { path } if *path == missing),
        "{error}"
    );
    for path in [directory.path(), Path::new("/dev/null")] {
        assert!(
            matches!(Image::open(path), Err(ImageError::Kind { .. })),
            "{}",
            path.display()
        );
    }
    let link = directory.path().join("link");
    symlink("link", &link).expect("linked");
    assert!(matches!(Image::open(&link), Err(ImageError::Io { .. })));
}

/// Checks that a write through `file` and one through `buffered`, in the same block, are visible through both.
fn views_agree(image: &Image) {
    let Some(buffered) = &image.buffered else {
        return;
    };
    let mut page = Box::new(Page([3; 4096]));
    rustix::io::pwrite(&image.file, &page.0, 0).expect("direct write");
    rustix::io::pwrite(buffered, &[4; 512], 512).expect("buffered write");
    rustix::io::pread(&image.file, &mut page.0, 0).expect("direct read");
    assert!(page.0[..512].iter().all(|&byte| byte == 3));
    assert!(page.0[512..1024].iter().all(|&byte| byte == 4));
    page.0.fill(5);
    rustix::io::pwrite(&image.file, &page.0, 0).expect("direct write");
    rustix::io::pread(buffered, &mut page.0[..512], 1024).expect("buffered read");
    assert!(page.0.iter().all(|&byte| byte == 5));
}

#[repr(align(4096))]
struct Page([u8; 4096]);

#[test]
fn the_alignment_found_is_one_that_works() {
    for parent in [Path::new("."), Path::new("/dev/shm"), Path::new("/var/tmp")] {
        let directory = tempfile::tempdir_in(parent).expect("a temporary directory");
        let path = directory.path().join("disk");
        let image = Image::create(&path, Bytes(MIB + 512)).expect("created");
        assert!(image.alignment == 512 || (image.direct && image.alignment == 4096));
        assert_eq!(image.buffered.is_some(), image.alignment == 4096);
        let mut page = Box::new(Page([1; 4096]));
        let length = image.alignment as usize;
        let at = u64::from(image.alignment);
        assert_eq!(
            rustix::io::pwrite(&image.file, &page.0[..length], at),
            Ok(length)
        );
        page.0.fill(0);
        assert_eq!(
            rustix::io::pread(&image.file, &mut page.0[..length], at),
            Ok(length)
        );
        assert!(page.0[..length].iter().all(|&byte| byte == 1));
        views_agree(&image);
    }
}

#[test]
fn an_import_is_equal_and_sparse_and_so_is_its_export() {
    let directory = directory();
    let [source, disk, back] = ["source", "disk", "back"].map(|name| directory.path().join(name));
    let content = sample(&source);
    let mut seen = Vec::new();
    let image = import(&source, &disk, |progress| {
        seen.push(progress);
        ControlFlow::Continue(())
    })
    .expect("imported");
    assert_eq!(image.capacity.bytes().0, content.len() as u64);
    assert!(fs::read(&disk).expect("read") == content);
    // Of the 3 MiB that the source takes, 2 MiB are zeroes.
    assert!(image.allocated().expect("inspected").0 < 2 * MIB);
    assert!(seen.is_sorted_by_key(|progress| progress.done));
    assert!(
        seen.iter()
            .all(|progress| progress.total.0 == content.len() as u64)
    );
    assert_eq!(
        seen.last().map(|progress| progress.done),
        Some(Bytes(content.len() as u64))
    );

    export(&image, &back, keep_going).expect("exported");
    assert!(fs::read(&back).expect("read") == content);
}

#[test]
fn a_cancelled_import_leaves_nothing() {
    let directory = directory();
    let [source, disk] = ["source", "disk"].map(|name| directory.path().join(name));
    sample(&source);
    let error = import(&source, &disk, |_| ControlFlow::Break(())).expect_err("cancelled");
    assert!(matches!(error, ImageError::Cancelled { .. }), "{error}");
    assert!(!disk.exists());
}

#[test]
fn a_source_cut_short_meanwhile_is_told() {
    let directory = directory();
    let [source, disk] = ["source", "disk"].map(|name| directory.path().join(name));
    let mut file = File::create(&source).expect("created");
    file.write_all(&vec![1; 12 * MIB as usize])
        .expect("written");
    let error = import(&source, &disk, |_| {
        file.set_len(0).expect("truncated");
        file.seek(SeekFrom::Start(0)).expect("sought");
        ControlFlow::Continue(())
    })
    .expect_err("refused");
    assert!(matches!(error, ImageError::Changed { .. }), "{error}");
    assert!(!disk.exists());
}

#[test]
fn free_space_is_that_of_the_file_system() {
    let directory = directory();
    assert!(free_space(directory.path()).expect("asked").0 > MIB);
    assert!(free_space(&directory.path().join("missing")).is_err());
}
