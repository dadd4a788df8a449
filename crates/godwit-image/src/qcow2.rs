//! The header of a qcow2 image, checked before `qemu-img` opens the image. A header may name other files of this host,
//! and the author of the image chose those names.

use crate::error::RepositoryError;

/// Bytes of a header that are checked.
pub(crate) const HEADER: usize = 104;

const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Incompatible feature: the data is in a separate file.
const EXTERNAL_DATA: u64 = 1 << 2;

/// A reason to refuse a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("it is no image in the format qcow2, version 2 or 3")]
    Format,
    #[error("it has a backing file")]
    Backing,
    #[error("its data is in another file")]
    ExternalData,
}

impl Refused {
    /// Returns the whole error for an image at this path.
    pub(crate) fn error(self, path: &std::path::Path) -> RepositoryError {
        let why = match self {
            Self::Format => self.to_string(),
            Self::Backing | Self::ExternalData => format!(
                "{self}, which is not followed: if you trust whoever made the image, flatten it first with 'qemu-img \
                 convert -f qcow2 -O qcow2 {} NEW', and push that; if a guest wrote it, it is raw: say --format raw",
                path.display()
            ),
        };
        RepositoryError::file("push", path, why)
    }
}

/// Refuses an image that refers to other files, by its first bytes.
pub(crate) fn check(header: &[u8]) -> Result<(), Refused> {
    let field = |at: usize| {
        header
            .get(at..)?
            .first_chunk()
            .map(|bytes| u64::from_be_bytes(*bytes))
    };
    let version = header.get(4..8);
    if !header.starts_with(&MAGIC) {
        return Err(Refused::Format);
    }
    let features = match version {
        Some([0, 0, 0, 2]) => Some(0),
        Some([0, 0, 0, 3]) => field(72),
        _ => None,
    };
    match field(8).zip(features) {
        None => Err(Refused::Format),
        Some((1.., _)) => Err(Refused::Backing),
        Some((_, features)) if features & EXTERNAL_DATA != 0 => Err(Refused::ExternalData),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(version: u8, backing: u64, features: u64) -> Vec<u8> {
        let mut header = vec![0; HEADER];
        header[..4].copy_from_slice(&MAGIC);
        header[7] = version;
        header[8..16].copy_from_slice(&backing.to_be_bytes());
        header[72..80].copy_from_slice(&features.to_be_bytes());
        header
    }

    #[test]
    fn only_headers_that_name_no_other_file_pass() {
        for (header, expected) in [
            (header(3, 0, 0), Ok(())),
            // A dirty image with compressed clusters of another type refers to no other file.
            (header(3, 0, 0b1001), Ok(())),
            (header(2, 0, EXTERNAL_DATA), Ok(())),
            (header(3, 1 << 40, 0), Err(Refused::Backing)),
            (header(2, 112, 0), Err(Refused::Backing)),
            (header(3, 0, EXTERNAL_DATA | 1), Err(Refused::ExternalData)),
            (header(1, 0, 0), Err(Refused::Format)),
            (header(4, 0, 0), Err(Refused::Format)),
            (header(3, 0, 0)[..79].to_vec(), Err(Refused::Format)),
            (header(2, 0, 0)[..15].to_vec(), Err(Refused::Format)),
            (vec![0; HEADER], Err(Refused::Format)),
            (Vec::new(), Err(Refused::Format)),
        ] {
            assert_eq!(check(&header), expected, "{header:?}");
        }
    }
}
