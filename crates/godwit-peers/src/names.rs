//! Checks on names of disks and nodes, and on paths.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use godwit_api::{ErrorBody, ErrorCode};

/// Longest name in bytes.
const MAX_NAME: usize = godwit_core::wire::MAX_NAME;

/// Checks a name of a disk or node: 1 to 128 of `A-Z a-z 0-9 . _ -`, not starting with `.` or `-`. Such a name is also
/// a safe file name.
///
/// # Errors
/// [`ErrorCode::Invalid`] with the fault; `what` is the kind of the named thing.
pub fn check(what: &str, name: &str) -> Result<(), ErrorBody> {
    let wrong = if name.is_empty() {
        String::from("it is empty")
    } else if name.len() > MAX_NAME {
        format!("it has {} bytes, more than {MAX_NAME}", name.len())
    } else if name.starts_with(['.', '-']) {
        String::from("it starts with a dot or dash")
    } else if let Some(bad) = name
        .chars()
        .find(|&c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')))
    {
        format!("it contains {bad:?}")
    } else {
        return Ok(());
    };
    let shown: String = name.chars().take(64).collect();
    Err(ErrorBody::new(
        ErrorCode::Invalid,
        format!("{shown:?} is not a {what} name: {wrong}"),
    )
    .hint("use letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit"))
}

/// Checks that a client's path is absolute and possible for a file. `of` is the path's subject in the error.
///
/// # Errors
/// [`ErrorCode::Invalid`].
pub fn check_path(of: &str, path: &Path) -> Result<(), ErrorBody> {
    let why = if !path.is_absolute() {
        "is not absolute"
    } else if path.as_os_str().as_bytes().contains(&0) {
        "has a byte of zero in it"
    } else {
        return Ok(());
    };
    let text = format!("{of}: the path {path:?} {why}");
    Err(ErrorBody::new(ErrorCode::Invalid, text).hint("give the whole path from /"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_are_taken() {
        for name in ["a", "vm-1.root_disk", "0", "_x", &"n".repeat(128)] {
            assert_eq!(check("disk", name), Ok(()), "{name}");
        }
    }

    #[test]
    fn names_that_could_leave_the_folder_or_confuse_are_refused() {
        let long = "n".repeat(129);
        for name in [
            "", ".", "..", ".hidden", "-rf", "a/b", "a\\b", "a b", "a\0", "ä", &long,
        ] {
            let error = check("disk", name).expect_err(name);
            assert_eq!(error.code, ErrorCode::Invalid, "{name}");
            assert!(error.hint.is_some());
        }
    }

    #[test]
    fn a_path_is_whole_and_one_that_a_file_can_have() {
        let refused = |path: &str| check_path("disk d", Path::new(path)).unwrap_err();
        assert!(refused("images/d").message.contains("not absolute"));
        assert!(refused("/images\0/d").message.contains("a byte of zero"));
        assert_eq!(refused("/\0").code, ErrorCode::Invalid);
        assert!(check_path("disk d", Path::new("/images/d")).is_ok());
    }
}
