//! Files that a process brings along, at the destination. Such files go only below folders named by the operator, and
//! through no symbolic link.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, ResolveFlags, fchmod, fchown, openat, openat2, renameat, unlinkat,
};
use rustix::process::{Gid, Uid};

use super::checks::unmovable::MOST_FILES;
use crate::images::ImageFile;

/// Returns the reason if a file must not be put at the given path.
pub fn refusal(roots: &[std::path::PathBuf], path: &str) -> Option<String> {
    let shown: String = path.chars().take(256).collect();
    match within(roots, path) {
        Some((root, below)) => folder(root, below).err().map(|error| {
            format!("the file {shown} cannot be put at the destination: its folder: {error}")
        }),
        None => {
            let roots: Vec<_> = roots
                .iter()
                .map(|root| root.display().to_string())
                .collect();
            let allowed = if roots.is_empty() {
                "no folder is".to_owned()
            } else {
                format!("{} is", roots.join(", "))
            };
            Some(format!(
                "the destination takes no file {shown}: {allowed} named there with --process-files"
            ))
        }
    }
}

/// Names the files among `needs` that the destination lacks and the process has open, in one sentence.
pub(crate) fn absent(needs: &[String]) -> Option<String> {
    let needs = needs.iter().take(MOST_FILES);
    let absent: Vec<_> = needs.filter(|path| !Path::new(path).exists()).collect();
    let (first, others) = absent.split_first()?;
    let more = match others.len() {
        0 => String::new(),
        count => format!(" and {count} more files that it uses"),
    };
    Some(format!(
        "the destination has no {first}{more}, which the process has open, mapped or watched: share the file system, or bring it \
         along (--file)"
    ))
}

/// Splits a path into the root that contains the path and the rest.
fn within<'a>(roots: &'a [std::path::PathBuf], path: &'a str) -> Option<(&'a Path, &'a Path)> {
    let path = Path::new(path);
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::RootDir);
    let bad = path.as_os_str().len() > 4000
        || path.as_os_str().as_encoded_bytes().contains(&0)
        || !path.components().all(plain)
        || path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if bad || !path.is_absolute() {
        return None;
    }
    roots.iter().find_map(|root| {
        let below = path.strip_prefix(root).ok()?;
        (below.components().next().is_some()).then_some((root.as_path(), below))
    })
}

/// Opens the folder of a path below a root.
fn folder(root: &Path, below: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, root, flags, Mode::empty())?;
    match below
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
    {
        None => Ok(root),
        Some(parent) => {
            let resolve =
                ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            Ok(openat2(root, parent, flags, Mode::empty(), resolve)?)
        }
    }
}

/// Puts a copy of `from` at the file's path, in place of any present file.
///
/// # Errors
/// One sentence; a present file then stays.
pub fn place(
    roots: &[std::path::PathBuf],
    file: &ImageFile,
    from: &Path,
    id: &str,
) -> Result<(), String> {
    if let Some(why) = refusal(roots, &file.name) {
        return Err(why);
    }
    let placed = || -> io::Result<()> {
        let Some((root, below)) = within(roots, &file.name) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let folder = folder(root, below)?;
        let name = below.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let aside = format!(".godwit-{id}");
        // Removes the leftover of an earlier attempt.
        let _ = unlinkat(&folder, aside.as_str(), AtFlags::empty());
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut to = File::from(openat(&folder, aside.as_str(), flags, Mode::RUSR)?);
        let copied = io::copy(&mut File::open(from)?, &mut to)
            .map(drop)
            .and_then(|()| {
                fchown(
                    &to,
                    Some(Uid::from_raw(file.uid)),
                    Some(Gid::from_raw(file.gid)),
                )?;
                // The set-user-ID and set-group-ID bits are dropped: a move must not give a file another user's rights.
                fchmod(&to, Mode::from_raw_mode(file.mode & 0o777))?;
                to.sync_all()?;
                Ok(renameat(&folder, aside.as_str(), &folder, name)?)
            });
        if copied.is_err() {
            let _ = unlinkat(&folder, aside.as_str(), AtFlags::empty());
        }
        copied
    };
    placed().map_err(|error| {
        format!(
            "the file {} cannot be put at the destination: {error}",
            file.name
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &Path) -> ImageFile {
        ImageFile {
            name: name.display().to_string(),
            bytes: 4,
            mode: 0o4640,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }

    #[test]
    fn files_come_below_named_folders_and_through_no_link() {
        use std::os::unix::fs::PermissionsExt as _;
        let base = tempfile::tempdir().expect("a folder");
        let base = std::fs::canonicalize(base.path()).expect("a folder");
        std::fs::create_dir_all(base.join("in/deep")).expect("a folder");
        std::fs::create_dir(base.join("out")).expect("a folder");
        std::os::unix::fs::symlink(base.join("out"), base.join("in/link")).expect("a link");
        std::os::unix::fs::symlink(base.join("out/x"), base.join("in/x")).expect("a link");
        let from = base.join("from");
        std::fs::write(&from, "said").expect("writes");
        let roots = [base.join("in")];
        for good in ["in/log", "in/deep/log"] {
            let path = base.join(good);
            place(&roots, &file(&path), &from, "7").expect("is placed");
            assert_eq!(std::fs::read(&path).expect("is there"), b"said");
            let mode = std::fs::metadata(&path)
                .expect("is there")
                .permissions()
                .mode();
            assert_eq!(mode & 0o7777, 0o640);
        }
        // A link at the target path is replaced, not followed.
        place(&roots, &file(&base.join("in/x")), &from, "7").expect("is placed");
        assert!(!base.join("out/x").exists());
        for bad in [
            "out/log",
            "in",
            "in/",
            "in/../out/log",
            "in/link/log",
            "in/none/log",
            "info",
        ] {
            let error = place(&roots, &file(&base.join(bad)), &from, "7").expect_err(bad);
            assert!(error.contains("destination"), "{error}");
        }
        assert!(
            refusal(&[], "/run/log")
                .expect("a reason")
                .contains("no folder is named")
        );
        assert!(refusal(&roots, "in/log").is_some());
        assert_eq!(
            std::fs::read_dir(base.join("out"))
                .expect("a folder")
                .count(),
            0
        );
    }
}
