//! Limits on a device's objects by the control groups of this process. A restored process is in the same groups.

use std::fs;
use std::path::{Path, PathBuf};

/// Mount point of control groups (version 2).
const ROOT: &str = "/sys/fs/cgroup";

/// Returns the number of further objects of any kind that this process's groups allow on the device; `u32::MAX` without
/// a limit.
pub(super) fn objects_left(device: &str) -> u32 {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    left_within(Path::new(ROOT), &own, device)
}

/// `own` is the text of a process's `/proc/PID/cgroup`.
fn left_within(root: &Path, own: &str, device: &str) -> u32 {
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return u32::MAX;
    };
    // The groups above limit a group too.
    let mut group: PathBuf = root.join(path);
    let mut left = u32::MAX;
    while group.starts_with(root) {
        let number = |file: &str| objects(&fs::read_to_string(group.join(file)).ok()?, device);
        if let Some(most) = number("rdma.max") {
            left = left.min(most.saturating_sub(number("rdma.current").unwrap_or(0)));
        }
        if !group.pop() {
            break;
        }
    }
    left
}

/// Returns `hca_object` in the device's line; none without such a line or limit.
fn objects(text: &str, device: &str) -> Option<u32> {
    let mut lines = text.lines().map(str::split_whitespace);
    let mut words = lines.find_map(|mut words| (words.next()? == device).then_some(words))?;
    words
        .find_map(|word| word.strip_prefix("hca_object="))?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_group_on_the_way_up_decides() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("jobs/one");
        fs::create_dir_all(&inner).unwrap();
        let left = |own: &str| left_within(root.path(), own, "rxe0");
        assert_eq!(left("0::/jobs/one\n"), u32::MAX);
        fs::write(
            inner.join("rdma.max"),
            "rxe0 hca_handle=max hca_object=max\n",
        )
        .unwrap();
        assert_eq!(left("0::/jobs/one\n"), u32::MAX);
        fs::write(
            inner.join("rdma.max"),
            "rxe1 hca_handle=1 hca_object=1\nrxe0 hca_handle=2 hca_object=20\n",
        )
        .unwrap();
        fs::write(
            inner.join("rdma.current"),
            "rxe0 hca_handle=1 hca_object=5\n",
        )
        .unwrap();
        assert_eq!(left("0::/jobs/one\n"), 15);
        fs::write(
            root.path().join("jobs/rdma.max"),
            "rxe0 hca_handle=2 hca_object=9\n",
        )
        .unwrap();
        fs::write(
            root.path().join("jobs/rdma.current"),
            "rxe0 hca_handle=1 hca_object=10\n",
        )
        .unwrap();
        assert_eq!(left("0::/jobs/one\n"), 0);
        assert_eq!(left("0::/\n"), u32::MAX);
        // The older groups.
        assert_eq!(left("3:rdma:/jobs/one\n"), u32::MAX);
    }
}
