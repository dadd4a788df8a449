//! Transfer of CRIU's files, each followed by its hash. The receiver takes no more bytes than announced, and writes
//! only plain names below the move's own folder.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::messages::{ImageOffer, MemoryOffer};

/// Most files of an image, and most files brought along.
const MAX_FILES: usize = 4096;
/// Bytes to leave free in the file system of an image.
pub(crate) const LEFT_FREE: u64 = 64 << 20;
/// Bytes read at a time.
const PIECE: usize = 256 << 10;
/// Longest time for a piece.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);
/// The file that runc adds to CRIU's files: the targets of standard input and output.
const OF_RUNC: &str = "descriptors.json";
const HASH: usize = blake3::OUT_LEN;

/// A file to send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// The name of CRIU's file, or the path of a file brought along.
    pub name: String,
    /// The length in bytes.
    pub bytes: u64,
    /// The permissions.
    pub mode: u32,
    /// The owning user.
    pub(crate) uid: u32,
    /// The owning group.
    pub(crate) gid: u32,
}

impl ImageFile {
    fn of(name: String, about: &std::fs::Metadata) -> Result<Self, String> {
        if !about.is_file() {
            return Err(format!("{name} is no regular file"));
        }
        Ok(Self {
            name,
            bytes: about.len(),
            mode: about.mode() & 0o7777,
            uid: about.uid(),
            gid: about.gid(),
        })
    }
}

/// Opens a regular file by its absolute path, and refuses symbolic links on the path. Otherwise a user who may change a
/// folder of the path would choose the file that root reads.
///
/// # Errors
/// One sentence with the file.
pub(crate) fn open_plain(path: &Path) -> Result<std::fs::File, String> {
    let cannot = |error: std::io::Error| format!("the file {path:?}: {error}");
    if !path.is_absolute() {
        return Err(format!("the file {path:?} is not named by its whole path"));
    }
    // With `NONBLOCK`, opening a pipe does not wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
    let file = opened.map_err(|error| match error {
        Errno::LOOP => {
            format!("the file {path:?} has a symbolic link on its path; name it without one")
        }
        error => cannot(error.into()),
    })?;
    let file = std::fs::File::from(file);
    if !file.metadata().map_err(cannot)?.is_file() {
        return Err(format!("the file {path:?} is no regular file"));
    }
    Ok(file)
}

/// The source of a file's bytes.
#[derive(Debug)]
pub enum Source {
    /// A file in a folder of the node, which no other process changes.
    Own(PathBuf),
    /// A file opened at the inspection, wherever its path leads by now.
    Opened(std::fs::File),
}

/// CRIU's files in a folder, and the opened files to bring along.
pub type Gathered = (Vec<ImageFile>, Vec<(ImageFile, std::fs::File)>);

/// Inspects the files to send.
///
/// # Errors
/// One sentence with the unsuitable file.
pub fn gather(image: &Path, files: &[String]) -> Result<Gathered, String> {
    let cannot = |error: std::io::Error| format!("the image in {}: {error}", image.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(image).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Other files are CRIU's own descriptors and logs.
        if name.ends_with(".img") || name == OF_RUNC {
            // An image may have thousands of files, so they are not kept open.
            found.push(ImageFile::of(name, &entry.metadata().map_err(cannot)?)?);
        }
    }
    found.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    let along = files.iter().map(|path| {
        let file = open_plain(Path::new(path))?;
        let about = file
            .metadata()
            .map_err(|error| format!("the file {path:?}: {error}"))?;
        Ok((ImageFile::of(path.clone(), &about)?, file))
    });
    Ok((found, along.collect::<Result<_, String>>()?))
}

/// Checks that an offered image is plausible and fits into `free` bytes.
///
/// # Errors
/// One sentence.
pub fn check(offer: &ImageOffer, free: u64) -> Result<(), String> {
    check_files(&offer.image, &offer.files, offer.container.is_some(), free)
}

/// Checks that an offered round of a process's memory is plausible and fits into `free` bytes.
///
/// # Errors
/// One sentence.
pub(crate) fn check_memory(offer: &MemoryOffer, free: u64) -> Result<(), String> {
    check_files(&offer.image, &[], false, free)
}

fn check_files(
    image: &[ImageFile],
    along: &[ImageFile],
    of_runc: bool,
    free: u64,
) -> Result<(), String> {
    if image.is_empty() || image.len() > MAX_FILES || along.len() > MAX_FILES {
        return Err(format!(
            "an image has 1 to {MAX_FILES} files, and this one has {} and brings {}",
            image.len(),
            along.len()
        ));
    }
    let mut names = BTreeSet::new();
    for file in image {
        if !is_image_name(&file.name) && (file.name != OF_RUNC || !of_runc) {
            let shown: String = file.name.chars().take(64).collect();
            return Err(format!("{shown:?} is no name of a file of an image"));
        }
        if !names.insert(&file.name) {
            return Err(format!("the image has two files {}", file.name));
        }
    }
    let lengths = image.iter().chain(along).map(|file| file.bytes);
    let total = lengths.fold(0u64, u64::saturating_add);
    if total.saturating_add(LEFT_FREE) > free {
        return Err(format!("the image has {total} bytes, and {free} are free"));
    }
    Ok(())
}

fn is_image_name(name: &str) -> bool {
    let stem = name.strip_suffix(".img").unwrap_or_default();
    (1..=96).contains(&stem.len())
        && !stem.starts_with(['.', '-'])
        && stem
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

/// Returns the free bytes of a folder's file system.
pub(crate) fn free(folder: &Path) -> u64 {
    rustix::fs::statvfs(folder).map_or(0, |about| about.f_bavail.saturating_mul(about.f_frsize))
}

async fn in_time<T>(work: impl Future<Output = std::io::Result<T>>) -> std::io::Result<T> {
    tokio::time::timeout(PIECE_TIMEOUT, work)
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// Sends the bytes of these files and their hashes.
///
/// # Errors
/// Reading or sending fails, or a file has become shorter.
pub async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    files: impl Iterator<Item = (Source, u64)>,
    mut sent: impl FnMut(u64),
) -> std::io::Result<()> {
    let mut piece = vec![0; PIECE];
    for (source, bytes) in files {
        let mut file = match source {
            Source::Own(path) => File::open(&path).await?,
            Source::Opened(file) => File::from_std(file),
        };
        let (mut hash, mut left) = (blake3::Hasher::new(), bytes);
        while left > 0 {
            let now = PIECE.min(usize::try_from(left).unwrap_or(PIECE));
            file.read_exact(&mut piece[..now]).await?;
            hash.update(&piece[..now]);
            in_time(stream.write_all(&piece[..now])).await?;
            left -= now as u64;
            sent(now as u64);
        }
        in_time(stream.write_all(hash.finalize().as_bytes())).await?;
    }
    in_time(stream.flush()).await
}

/// Receives the bytes of these files into new files. The files are durable on success.
///
/// # Errors
/// Reading or writing fails, or a hash differs.
pub async fn receive(
    stream: &mut (impl AsyncRead + Unpin),
    files: impl Iterator<Item = (PathBuf, u64)>,
) -> std::io::Result<()> {
    let mut piece = vec![0; PIECE];
    for (path, bytes) in files {
        let mut options = tokio::fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .await?;
        let (mut hash, mut left) = (blake3::Hasher::new(), bytes);
        while left > 0 {
            let now = PIECE.min(usize::try_from(left).unwrap_or(PIECE));
            in_time(stream.read_exact(&mut piece[..now])).await?;
            hash.update(&piece[..now]);
            file.write_all(&piece[..now]).await?;
            left -= now as u64;
        }
        let mut said = [0; HASH];
        in_time(stream.read_exact(&mut said)).await?;
        if hash.finalize() != blake3::Hash::from_bytes(said) {
            let text = format!("{} came with another content than was sent", path.display());
            return Err(std::io::Error::other(text));
        }
        file.flush().await?;
        file.sync_all().await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(names: &[&str], bytes: u64) -> ImageOffer {
        let file = |name: &&str| ImageFile {
            name: (*name).to_owned(),
            bytes,
            mode: 0o600,
            uid: 0,
            gid: 0,
        };
        ImageOffer {
            pid: 7,
            layout: "1 2 3 4 5".to_owned(),
            container: None,
            address: None,
            rounds: 0,
            image: names.iter().map(file).collect(),
            files: Vec::new(),
        }
    }

    #[test]
    fn an_image_has_plain_names_and_fits() {
        let free = 1 << 30;
        check(
            &offer(&["core-7.img", "pages-1.img", "inventory.img"], 4096),
            free,
        )
        .expect("is one");
        for wrong in [
            "../core.img",
            "/etc/x.img",
            "a/b.img",
            ".img",
            "-o.img",
            "..img",
            "core-7",
            "co re.img",
            "criu.conf",
            "descriptors.json",
        ] {
            let error = check(&offer(&[wrong], 1), free).expect_err(wrong);
            assert!(error.contains("no name"), "{error}");
        }
        check(&offer(&["a.img", "a.img"], 1), free).expect_err("two of one name");
        check(&offer(&[], 1), free).expect_err("none");
        check(&offer(&["a.img"], free), free).expect_err("too large");
        check(&offer(&["a.img", "b.img"], u64::MAX), free).expect_err("larger than can be counted");
        let many: Vec<String> = (0..5000).map(|number| format!("{number}.img")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        check(&offer(&many, 1), free).expect_err("too many");
    }

    #[tokio::test]
    async fn a_file_that_comes_along_is_the_one_that_was_looked_at() {
        let base = tempfile::tempdir().expect("a folder");
        let base = std::fs::canonicalize(base.path()).expect("a folder");
        std::fs::create_dir(base.join("image")).expect("a folder");
        let name = |path: &str| base.join(path).display().to_string();
        let (log, secret) = (base.join("log"), base.join("secret"));
        std::fs::write(&log, "said").expect("writes");
        std::fs::write(&secret, "kept").expect("writes");
        let gathered = gather(&base.join("image"), &[name("log")]).expect("gathers");
        let (_, along) = gathered;
        std::fs::remove_file(&log).expect("removes");
        std::os::unix::fs::symlink(&secret, &log).expect("a link");
        let (mut here, mut there) = tokio::io::duplex(1 << 20);
        let sources = along
            .into_iter()
            .map(|(about, file)| (Source::Opened(file), about.bytes));
        send(&mut here, sources, drop).await.expect("sends");
        let mut sent = [0; 4];
        there.read_exact(&mut sent).await.expect("comes");
        assert_eq!(&sent, b"said");
        // A link is not followed anywhere on the path, and opening a pipe does not block.
        std::os::unix::fs::symlink(&base, base.join("folder")).expect("a link");
        let pipe = rustix::fs::mknodat(
            CWD,
            base.join("pipe"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        );
        pipe.expect("a pipe");
        for bad in ["log", "folder/secret", "pipe", "image", "none"] {
            let error = gather(&base.join("image"), &[name(bad)]).expect_err(bad);
            assert!(error.contains(bad), "{error}");
        }
        open_plain(Path::new("log")).expect_err("not by its whole path");
    }

    #[tokio::test]
    async fn files_arrive_whole_or_not_at_all() {
        let base = tempfile::tempdir().expect("a folder");
        let base = std::fs::canonicalize(base.path()).expect("a folder");
        let from = base.join("from.img");
        std::fs::write(&from, vec![7; 300_000]).expect("writes");
        let (gathered, none) = gather(&base, &[]).expect("gathers");
        assert_eq!(
            (gathered.len(), gathered[0].bytes, none.len()),
            (1, 300_000, 0)
        );
        let (mut here, mut there) = tokio::io::duplex(1 << 20);
        let mut counted = 0;
        let source = || [(Source::Own(from.clone()), 300_000)].into_iter();
        send(&mut here, source(), |bytes| counted += bytes)
            .await
            .expect("sends");
        assert_eq!(counted, 300_000);
        let to = base.join("to");
        receive(&mut there, [(to.clone(), 300_000)].into_iter())
            .await
            .expect("comes");
        assert_eq!(std::fs::read(&to).expect("is there"), vec![7; 300_000]);
        // Existing files are not overwritten.
        send(&mut here, source(), drop).await.expect("sends");
        receive(&mut there, [(to, 300_000)].into_iter())
            .await
            .expect_err("is there");
        let (mut here, mut there) = tokio::io::duplex(1 << 20);
        here.write_all(&[1; 4]).await.expect("writes");
        here.write_all(&[0; HASH]).await.expect("writes");
        let error = receive(&mut there, [(base.join("bad"), 4)].into_iter())
            .await
            .expect_err("another hash");
        assert!(error.to_string().contains("another content"), "{error}");
    }
}
