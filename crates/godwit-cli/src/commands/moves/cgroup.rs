//! The root process of a control group: the process that has started all others.

use std::io;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Mount point of control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// Name of each group's file of members.
const MEMBERS: &str = "cgroup.procs";

/// Finds the only process of a control group and its descendants whose parent is outside. `path` is the group's folder,
/// or its path in /proc/PID/cgroup.
pub(super) fn first_process(path: &Path) -> Result<u32, Failure> {
    let folder = folder(path)?;
    let shown = folder.display();
    let mut members = Vec::new();
    collect(&folder, &mut members).map_err(|error| {
        Failure::caused(format!("cannot read control group {shown}"), &error)
            .hint("the processes are root's to list; run this as root")
    })?;
    // A process in another PID namespace has no number here.
    members.retain(|pid| *pid != 0);
    let first: Vec<u32> = members
        .iter()
        .copied()
        .filter(|pid| parent(*pid).is_some_and(|parent| !members.contains(&parent)))
        .collect();
    match first[..] {
        [pid] => Ok(pid),
        [] => Err(
            Failure::not_found(format!("no process runs in control group {shown}"))
                .hint("see 'godwit process list'"),
        ),
        _ => {
            let numbers: Vec<String> = first.iter().map(u32::to_string).collect();
            let numbers = numbers.join(", ");
            Err(Failure::new(format!(
                "processes {numbers} of control group {shown} were not started by one another, and only what descends from \
                 one process moves as one"
            ))
            .hint("move each with 'godwit migrate process/PID'"))
        }
    }
}

fn folder(path: &Path) -> Result<PathBuf, Failure> {
    let below = Path::new(ROOT).join(path.strip_prefix("/").unwrap_or(path));
    let found = [path.to_owned(), below]
        .into_iter()
        .find(|folder| folder.join(MEMBERS).is_file());
    found.ok_or_else(|| {
        Failure::not_found(format!("{} is no control group", path.display()))
            .hint("give its folder below /sys/fs/cgroup, or what /proc/PID/cgroup says")
    })
}

fn collect(folder: &Path, members: &mut Vec<u32>) -> io::Result<()> {
    let listed = match std::fs::read_to_string(folder.join(MEMBERS)) {
        Ok(listed) => listed,
        // A descendant group has ended meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    members.extend(listed.lines().filter_map(|line| line.parse::<u32>().ok()));
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), members)?;
        }
    }
    Ok(())
}

/// Returns the parent of a process; `None` if the process has ended.
fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    struct Sleeping(Child);

    impl Sleeping {
        fn start() -> Self {
            Self(Command::new("sleep").arg("100").spawn().expect("starts"))
        }
    }

    impl Drop for Sleeping {
        fn drop(&mut self) {
            let _gone = self.0.kill();
            let _gone = self.0.wait();
        }
    }

    fn group(folder: &Path, members: &[u32]) {
        let lines: String = members.iter().map(|pid| format!("{pid}\n")).collect();
        std::fs::create_dir_all(folder).expect("a folder");
        std::fs::write(folder.join(MEMBERS), lines).expect("writes");
    }

    #[test]
    fn a_control_group_stands_for_the_process_that_started_the_others() {
        let place = tempfile::tempdir().expect("a folder");
        let (own, child) = (std::process::id(), Sleeping::start());
        group(place.path(), &[0, child.0.id()]);
        assert_eq!(first_process(place.path()).expect("one"), child.0.id());
        group(&place.path().join("below"), &[own]);
        assert_eq!(first_process(place.path()).expect("its parent"), own);
    }

    #[test]
    fn several_processes_that_nobody_among_them_started_are_named() {
        let place = tempfile::tempdir().expect("a folder");
        let children = [Sleeping::start(), Sleeping::start()];
        group(place.path(), &children.each_ref().map(|child| child.0.id()));
        let failure = first_process(place.path()).expect_err("two");
        for child in &children {
            assert!(failure.message.contains(&child.0.id().to_string()));
        }
    }

    #[test]
    fn what_is_empty_or_no_control_group_is_named() {
        let place = tempfile::tempdir().expect("a folder");
        let failure = first_process(place.path()).expect_err("a plain folder");
        assert!(failure.message.contains("is no control group"));
        group(place.path(), &[]);
        let failure = first_process(place.path()).expect_err("nobody");
        assert!(failure.message.contains("no process runs"));
    }
}
