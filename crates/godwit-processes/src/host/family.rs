//! A process and its descendants, which move with the process.

use std::io;

use godwit_verbs::control;

use super::criu::of_process;

/// Prefix of the device files through which processes use RDMA.
pub(super) const DEVICES: &str = "/dev/infiniband/uverbs";

/// Returns the readable descendants of a process.
pub(super) fn descendants(pid: u32) -> Vec<u32> {
    family(pid).split_off(1)
}

/// Returns a process and its readable descendants.
pub fn family(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        next += 1;
        let threads = std::fs::read_dir(format!("/proc/{parent}/task"));
        for thread in threads.into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(thread.path().join("children"));
            let children = children.unwrap_or_default();
            let children = children
                .split_whitespace()
                .filter_map(|one| one.parse().ok());
            for child in children {
                if !found.contains(&child) {
                    found.push(child);
                }
            }
        }
    }
    found
}

/// Returns the processes among `pids` that have a file open whose name begins with `prefix`.
///
/// # Errors
/// The open files of a process cannot be read. A process ended meanwhile has none.
pub(super) fn with_open(pids: &[u32], prefix: &str) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for pid in pids {
        let entries = of_process(std::fs::read_dir(format!("/proc/{pid}/fd")))?;
        for entry in entries.into_iter().flatten() {
            let Some(entry) = of_process(entry)? else {
                break;
            };
            let target = of_process(std::fs::read_link(entry.path()))?;
            if target.is_some_and(|target| {
                let target = target.as_os_str().as_encoded_bytes();
                target.starts_with(prefix.as_bytes())
            }) {
                found.push(*pid);
                break;
            }
        }
    }
    Ok(found)
}

/// The processes of a family that use RDMA.
#[derive(Debug)]
pub struct Users {
    /// Users with the library.
    with_library: Vec<u32>,
    /// Users without the library.
    without: Vec<u32>,
}

impl Users {
    /// Finds the users of RDMA in the family of a process.
    ///
    /// # Errors
    /// The kernel's lists cannot be read.
    pub fn of(pid: u32) -> io::Result<Self> {
        let all = family(pid);
        let mut with_library = control::processes()?;
        with_library.retain(|one| all.contains(one));
        let mut without = with_open(&all, DEVICES)?;
        without.retain(|one| !with_library.contains(one));
        Ok(Self {
            with_library,
            without,
        })
    }

    /// Returns true if no process of the family uses RDMA.
    pub fn is_empty(&self) -> bool {
        self.with_library.is_empty() && self.without.is_empty()
    }

    /// Returns the reasons that keep a descendant from moving with the process, one sentence each: no step of the move
    /// releases a descendant's device objects.
    pub(crate) fn reasons(&self, pid: u32) -> Vec<String> {
        let others = |of: &[u32]| -> Vec<u32> {
            let others = of.iter().filter(|other| **other != pid);
            others.copied().collect()
        };
        let with = others(&self.with_library).into_iter().map(|other| {
            format!(
                "process {other}, which would come along with process {pid} that it descends from, uses RDMA; only the first of \
                 those that move together may"
            )
        });
        let without = others(&self.without).into_iter().map(|other| {
            format!(
                "process {other}, which would come along with process {pid} that it descends from, has an RDMA device open \
                 without the library"
            )
        });
        with.chain(without).collect()
    }
}

/// Checks that no process has a file open whose name begins with `prefix`, the prefix of devices. CRIU would dump such
/// a process all the same, and its connections would be lost. `of` is the processes' common name in the error.
///
/// # Errors
/// One sentence: a process has such a file open, or its files are unreadable.
pub(super) fn have_none_open(
    pids: io::Result<Vec<u32>>,
    prefix: &str,
    of: &str,
) -> Result<(), String> {
    let holders = pids
        .and_then(|pids| with_open(&pids, prefix))
        .map_err(|error| format!("the files of {of} cannot be read: {error}"))?;
    match holders.first() {
        None => Ok(()),
        Some(pid) => Err(format!(
            "process {pid} of {of} has an RDMA device open, which is in no image: start it with \
             LD_PRELOAD=libgodwit_verbs.so"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts a shell with a child that has this file open.
    fn parent_of_holder(file: &std::path::Path) -> Child {
        let script = format!(
            "sleep 100 3<'{}' </dev/null & echo started; wait",
            file.display()
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).stdout(Stdio::piped());
        shell.spawn().expect("it starts")
    }

    fn end(mut shell: Child, child: u32) {
        let child = rustix::process::Pid::from_raw(child as i32).expect("a number");
        let _gone = rustix::process::kill_process(child, rustix::process::Signal::KILL);
        let _gone = shell.kill();
        shell.wait().expect("it ends");
    }

    #[test]
    fn what_a_child_has_open_is_found() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let shell = parent_of_holder(file.path());
        let name = file.path().display().to_string();
        let began = std::time::Instant::now();
        let holders = loop {
            let holders = with_open(&family(shell.id()), &name).expect("reads");
            if !holders.is_empty() || began.elapsed().as_secs() > 30 {
                break holders;
            }
        };
        assert_eq!(holders.len(), 1);
        assert_ne!(holders[0], shell.id());
        assert_eq!(descendants(shell.id()), holders);
        assert_eq!(with_open(&[shell.id()], &name).expect("reads"), [0u32; 0]);
        end(shell, holders[0]);
    }

    #[test]
    fn a_child_that_uses_rdma_is_named_and_the_process_itself_is_not() {
        let users = Users {
            with_library: vec![7, 8],
            without: vec![9],
        };
        let [with, without] = &users.reasons(7)[..] else {
            panic!("{:?}", users.reasons(7));
        };
        assert!(
            with.contains("process 8") && with.contains("uses RDMA"),
            "{with}"
        );
        assert!(
            without.contains("process 9") && without.contains("without the library"),
            "{without}"
        );
        assert!(!users.is_empty());
        let own = Users::of(std::process::id()).expect("reads");
        assert!(own.is_empty(), "{own:?}");
    }
}
