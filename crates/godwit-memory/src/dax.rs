//! Sizes of files and DAX devices, and the alignment of their mappings.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::pool::PAGE_BYTES;

/// Alignment of mappings in bytes for a file used as a device: the usual alignment of DAX devices.
pub const USUAL_ALIGN_BYTES: u64 = 2 << 20;

/// Size and alignment of a mappable file or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes.
    pub bytes: u64,
    /// Alignment of mappings in bytes: a power of two.
    pub align: u64,
    /// True for a character device, whose pages Linux can neither hold nor free.
    pub is_device: bool,
}

impl Geometry {
    /// Returns the geometry of an open file; `None` for anything but an ordinary file or a DAX device.
    ///
    /// # Errors
    /// If the system refuses, or reports invalid values.
    pub fn of(file: &File) -> io::Result<Option<Self>> {
        let metadata = file.metadata()?;
        if metadata.is_file() {
            let align = huge_page_bytes(file)?.max(USUAL_ALIGN_BYTES);
            return Ok(Some(Self {
                bytes: metadata.len(),
                align,
                is_device: false,
            }));
        }
        if !metadata.file_type().is_char_device() {
            return Ok(None);
        }
        let device = metadata.rdev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        of_device(&PathBuf::from(format!("/sys/dev/char/{major}:{minor}")))
    }

    /// Returns the first byte and the length of the smallest aligned part that contains this part.
    pub const fn around(&self, offset: u64, bytes: u64) -> Option<(u64, u64)> {
        let first = offset - offset % self.align;
        let Some(end) = offset.checked_add(bytes) else {
            return None;
        };
        match end.checked_next_multiple_of(self.align) {
            Some(end) => Some((first, end - first)),
            None => None,
        }
    }
}

/// Returns the page size of hugetlbfs files; the page size of other files does not matter.
fn huge_page_bytes(file: &File) -> io::Result<u64> {
    const HUGETLBFS: u64 = 0x9584_58f6;
    let system = rustix::fs::fstatfs(file)?;
    Ok(match system.f_type as u64 {
        HUGETLBFS => system.f_bsize as u64,
        _ => PAGE_BYTES,
    })
}

/// Reads a character device's geometry from its folder in sysfs; returns `None` for devices other than DAX.
fn of_device(folder: &Path) -> io::Result<Option<Geometry>> {
    let Ok(subsystem) = std::fs::read_link(folder.join("subsystem")) else {
        return Ok(None);
    };
    if subsystem.file_name() != Some("dax".as_ref()) {
        return Ok(None);
    }
    let number = |name: &str| -> io::Result<u64> {
        let text = std::fs::read_to_string(folder.join(name))?;
        let parsed = text.trim().parse();
        parsed.map_err(|_| io::Error::other(format!("its {name} in sysfs is no number")))
    };
    let (bytes, align) = (number("size")?, number("align")?);
    if !align.is_power_of_two() || align < PAGE_BYTES {
        return Err(io::Error::other("its align in sysfs makes no sense"));
    }
    Ok(Some(Geometry {
        bytes,
        align,
        is_device: true,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a device's folder with these files.
    fn device(subsystem: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink(
            format!("../../../bus/{subsystem}"),
            folder.path().join("subsystem"),
        )
        .expect("links");
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).expect("writes");
        }
        folder
    }

    #[test]
    fn a_dax_device_says_how_large_it_is_and_how_its_mappings_lie() {
        let dax = device(
            "dax",
            &[("size", "17179869184\n"), ("align", "1073741824\n")],
        );
        let found = of_device(dax.path()).expect("is readable").expect("is one");
        assert_eq!((found.bytes, found.align), (16 << 30, 1 << 30));
        assert!(found.is_device);
        let other = device("mem", &[("size", "4096"), ("align", "4096")]);
        assert_eq!(of_device(other.path()).expect("is readable"), None);
        assert_eq!(of_device(Path::new("/nowhere")).expect("is none"), None);
        for (size, align) in [
            ("x", "2097152"),
            ("4096", "3000000"),
            ("4096", "8"),
            ("-1", "4096"),
        ] {
            let odd = device("dax", &[("size", size), ("align", align)]);
            assert!(of_device(odd.path()).is_err(), "{size} {align}");
        }
        assert!(of_device(device("dax", &[("size", "4096")]).path()).is_err());
    }

    #[test]
    fn a_file_is_as_large_as_it_is_and_other_devices_are_none() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(12345).expect("grows");
        let found = Geometry::of(&file).expect("is readable").expect("is one");
        assert_eq!((found.bytes, found.align), (12345, USUAL_ALIGN_BYTES));
        let null = File::open("/dev/null").expect("opens");
        assert_eq!(Geometry::of(&null).expect("is readable"), None);
    }

    #[test]
    fn what_is_mapped_around_a_part_begins_and_ends_where_it_may() {
        let geometry = Geometry {
            bytes: 1 << 30,
            align: 2 << 20,
            is_device: true,
        };
        let mib = |from: u64, bytes: u64| geometry.around(from, bytes);
        assert_eq!(mib(4 << 20, 2 << 20), Some((4 << 20, 2 << 20)));
        assert_eq!(mib((4 << 20) + 0xc_0000, 4096), Some((4 << 20, 2 << 20)));
        assert_eq!(mib((6 << 20) - 4096, 8192), Some((4 << 20, 4 << 20)));
        assert_eq!(mib(u64::MAX - 4096, 8192), None);
        assert_eq!(mib(u64::MAX - 8192, 4096), None);
    }
}
