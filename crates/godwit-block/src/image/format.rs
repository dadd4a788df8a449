//! Formats of disk images other than raw. Served as raw, such a file would give a guest the container's bytes as its
//! disk.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io;

use super::{ImageError, open};

/// Bytes at the start of a file that identify formats.
const START: usize = 512;
/// Bytes at the end of a file: the place of a fixed VHD's footer.
const END: usize = 512;

/// A format that a virtual machine's disk may have and Godwit does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// QEMU's copy-on-write formats.
    Qcow,
    /// QEMU's enhanced disk.
    Qed,
    /// VMware's format, of any kind.
    Vmdk,
    /// Hyper-V's format.
    Vhdx,
    /// Virtual PC's format, of fixed size or not.
    Vhd,
    /// VirtualBox's format.
    Vdi,
}

impl ImageFormat {
    /// Returns the name that `qemu-img` uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qcow => "qcow2",
            Self::Qed => "qed",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vhd => "vpc",
            Self::Vdi => "vdi",
        }
    }

    /// Returns the format of a file that starts and ends with these bytes; `None` if the file counts as raw.
    fn recognise(start: &[u8], end: &[u8]) -> Option<Self> {
        const VDI: [u8; 4] = 0xBEDA_107F_u32.to_le_bytes();
        let starts = |magic: &[u8]| start.starts_with(magic);
        let fixed_vhd = end.starts_with(b"conectix");
        Some(match () {
            () if starts(b"QFI\xfb") => Self::Qcow,
            () if starts(b"QED\0") => Self::Qed,
            () if starts(b"KDMV") || starts(b"COWD") => Self::Vmdk,
            () if starts(b"# Disk DescriptorFile") => Self::Vmdk,
            () if starts(b"vhdxfile") => Self::Vhdx,
            () if starts(b"conectix") || fixed_vhd => Self::Vhd,
            () if start.get(64..68) == Some(&VDI) => Self::Vdi,
            () => return None,
        })
    }
}

/// Refuses an image of another format than raw at `path`. Must come before a look at the size, which need not be a
/// disk's.
///
/// # Errors
/// [`ImageError::Format`], [`ImageError::Missing`], [`ImageError::Kind`], or the error of the file system.
pub fn refuse_formats(path: &Path) -> Result<(), ImageError> {
    let kind = open::kind(path)?;
    let file =
        open::open(path, kind, OFlags::RDONLY).map_err(|errno| open::open_error(path, errno))?;
    let size = open::size(file.as_fd(), path, kind)?.0;
    let read = |at: u64, buffer: &mut [u8]| {
        io::pread(&file, buffer, at).map_err(|errno| ImageError::io("read", path, errno))
    };
    let (mut start, mut end) = ([0; START], [0; END]);
    let length = read(0, &mut start)?;
    read(size.saturating_sub(END as u64), &mut end)?;
    match ImageFormat::recognise(&start[..length], &end) {
        None => Ok(()),
        Some(format) => Err(ImageError::Format {
            path: path.to_owned(),
            format,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_their_first_bytes_or_a_footer() {
        let mut vdi = [0; 512];
        vdi[64..68].copy_from_slice(&[0x7F, 0x10, 0xDA, 0xBE]);
        for (start, end, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], &b""[..], Some(ImageFormat::Qcow)),
            (b"QED\0", b"", Some(ImageFormat::Qed)),
            (b"KDMV\x01", b"", Some(ImageFormat::Vmdk)),
            (
                b"# Disk DescriptorFile\nversion=1",
                b"",
                Some(ImageFormat::Vmdk),
            ),
            (b"vhdxfile", b"", Some(ImageFormat::Vhdx)),
            (b"conectix", b"", Some(ImageFormat::Vhd)),
            (b"\xeb\x63\x90", b"conectix", Some(ImageFormat::Vhd)),
            (&vdi, b"", Some(ImageFormat::Vdi)),
            (&[0; 512], &[0; 512], None),
            (b"LUKS\xba\xbe", b"", None),
            (b"", b"", None),
            (b"QF", b"con", None),
        ] {
            assert_eq!(ImageFormat::recognise(start, end), format, "{start:?}");
        }
    }
}
