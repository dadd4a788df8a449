//! CRIU's files on their way, each followed by its hash: what comes is bounded by what was announced, and nothing but
//! plain names below the move's own folder is written.

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

/// Most files of an image, and most that come along.
const MAX_FILES: usize = 4096;
/// What stays free where an image comes to, or is made.
pub(crate) const LEFT_FREE: u64 = 64 << 20;
/// Bytes that are read at a time.
const PIECE: usize = 256 << 10;
/// How long a piece may take.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);
/// What runc puts beside CRIU's files: where standard input and output went.
const OF_RUNC: &str = "descriptors.json";
/// Bytes of a hash.
const HASH: usize = blake3::OUT_LEN;

/// A file that is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageFile {
    /// Of CRIU's: its name. Of one that comes along: its path.
    pub(crate) name: String,
    /// Its length.
    pub(crate) bytes: u64,
    /// Its permissions.
    pub(crate) mode: u32,
    /// Whose it is.
    pub(crate) uid: u32,
    /// Its group.
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

/// Opens a regular file by its whole path, on which no symbolic link lies: whoever may change a folder of the path would
/// otherwise choose what root reads.
///
/// # Errors
/// One sentence that names it.
pub(crate) fn open_plain(path: &Path) -> Result<std::fs::File, String> {
    let cannot = |error: std::io::Error| format!("the file {path:?}: {error}");
    if !path.is_absolute() {
        return Err(format!("the file {path:?} is not named by its whole path"));
    }
    // It does not wait for whoever writes to a pipe.
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

/// What is sent: a file of the image, and one that came along, as it was opened when it was looked at.
#[derive(Debug)]
pub(crate) enum Source {
    /// In a folder of the node's own, where nobody else changes anything.
    Own(PathBuf),
    /// Whatever its path leads to by now.
    Opened(std::fs::File),
}

/// CRIU's files in a folder, and those that come along, which are open.
pub(crate) type Gathered = (Vec<ImageFile>, Vec<(ImageFile, std::fs::File)>);

/// Looks at what is to be sent.
///
/// # Errors
/// One sentence that names what cannot be sent.
pub(crate) fn gather(image: &Path, files: &[String]) -> Result<Gathered, String> {
    let cannot = |error: std::io::Error| format!("the image in {}: {error}", image.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(image).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Others are descriptors of CRIU's own and logs.
        if name.ends_with(".img") || name == OF_RUNC {
            // There may be thousands, which are not all kept open.
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

/// Whether what another node offers can be an image, and fits. `free`: bytes that there are.
///
/// # Errors
/// One sentence.
pub(crate) fn check(offer: &ImageOffer, free: u64) -> Result<(), String> {
    check_files(&offer.image, &offer.files, offer.container.is_some(), free)
}

/// Whether what another node offers can be memory of a process, and fits. `free`: bytes that there are.
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

/// Bytes that are free in the file system of a folder.
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
pub(crate) async fn send(
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

/// Takes the bytes of these files, which are new. They are durable when this has succeeded.
///
/// # Errors
/// Reading or writing fails, or a hash is another one.
pub(crate) async fn receive(
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
        // A link is not followed, wherever it lies on the path, and nobody waits for a pipe.
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
        // Nothing that is there is written over.
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
