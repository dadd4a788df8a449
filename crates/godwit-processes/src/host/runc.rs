//! Containers under runc: their list, their dump and restore by runc, and their obstacles to a move.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::criu;
use super::family::{DEVICES, have_none_open, with_open};

/// Longest wait for an answer of runc.
const ANSWER: Duration = Duration::from_secs(60);
/// Longest wait for the end of a container.
const END: Duration = Duration::from_secs(60);
/// The oldest runc known to support these moves.
const OLDEST: (u32, u32) = (1, 1);

/// A moving container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The container's name, the same on both hosts.
    pub id: String,
    /// The folder with its `config.json`, the same on both hosts.
    pub(crate) bundle: String,
    /// The first process's number at the source.
    pub(crate) init: u32,
    /// The version of the CRIU that makes the image.
    pub(crate) criu: String,
    /// The process's number inside the container, which stays the same on all hosts.
    #[serde(default)]
    pub number: Option<u32>,
}

/// A container in runc's list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Listed {
    /// The container's name.
    pub id: String,
    /// The first process; 0 if none runs.
    pub pid: u32,
    /// The state as runc names it, such as `running`.
    pub status: String,
    pub(crate) bundle: String,
}

/// Lists all containers of this host.
///
/// # Errors
/// One sentence: runc is missing or fails.
pub async fn list() -> Result<Vec<Listed>, String> {
    let said = criu::must("runc", &["list", "--format", "json"], ANSWER).await?;
    let listed: Option<Vec<Listed>> = serde_json::from_str(&said)
        .map_err(|error| format!("`runc list` printed no list: {error}"))?;
    // An empty list is printed as null.
    Ok(listed.unwrap_or_default())
}

/// Returns the container of this name, if present.
///
/// # Errors
/// The errors of [`list`].
pub async fn named(id: &str) -> Result<Option<Listed>, String> {
    Ok(list().await?.into_iter().find(|one| one.id == id))
}

/// Returns the processes in the PID namespace of `init`, including `init`.
///
/// # Errors
/// `init` has ended, or /proc cannot be read.
pub(crate) fn members(init: u32) -> io::Result<Vec<u32>> {
    let namespace = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/pid"));
    let own = namespace(init)?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse() else {
            continue;
        };
        // The process may have ended meanwhile.
        if namespace(pid).is_ok_and(|other| other == own) {
            found.push(pid);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Returns a process's number in the process's own PID namespace, or `None` if the process has ended.
///
/// # Errors
/// The number is unreadable, which says nothing about the process.
pub(crate) fn number_inside(pid: u32) -> io::Result<Option<u32>> {
    let status = criu::of_process(std::fs::read_to_string(format!("/proc/{pid}/status")))?;
    Ok(status.as_deref().and_then(innermost))
}

/// Parses the last number in the field NSpid of proc_pid_status(5).
fn innermost(status: &str) -> Option<u32> {
    let numbers = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}

/// Names the processes of a container that have an RDMA device open without the library, one sentence each: their
/// connections would be lost. `users` are the processes with the library.
pub(crate) fn without_library(id: &str, init: u32, users: &[u32]) -> Vec<String> {
    let holders = match members(init).and_then(|all| with_open(&all, DEVICES)) {
        Ok(holders) => holders,
        Err(error) => {
            return vec![format!(
                "whether processes of container {id} use RDMA cannot be read: {error}"
            )];
        }
    };
    let strange = holders.into_iter().filter(|pid| !users.contains(pid));
    let named = strange.map(|pid| {
        format!(
            "process {pid} of container {id} has an RDMA device open without the library: start it with \
             LD_PRELOAD=libgodwit_verbs.so"
        )
    });
    named.collect()
}

/// Returns runc's arguments for an earlier image.
fn parent(since: Option<&str>) -> Vec<&str> {
    since.map_or(Vec::new(), |since| vec!["--parent-path", since])
}

impl Container {
    /// Returns true if the container is plausible: values from another node become a command's arguments.
    pub(crate) fn is_sound(&self) -> bool {
        let bundle = &self.bundle;
        (1..=128).contains(&self.id.len())
            && !self.id.starts_with(['-', '.'])
            && self
                .id
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+'))
            && bundle.starts_with('/')
            && bundle.len() <= 4000
            && !bundle.contains('\0')
            && !bundle.split('/').any(|part| part == "..")
            && self.init > 1
            && i32::try_from(self.init).is_ok()
            && version(&self.criu).is_some()
    }

    /// Returns the process of this layout that runs in the container here.
    ///
    /// # Errors
    /// The state is unreadable, which says nothing about the process.
    pub async fn process(&self, layout: &str) -> io::Result<Option<u32>> {
        let Some(listed) = named(&self.id).await.map_err(io::Error::other)? else {
            return Ok(None);
        };
        if listed.pid == 0 {
            return Ok(None);
        }
        let members = match members(listed.pid) {
            Ok(members) => members,
            // The process has ended since the listing.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        for pid in members {
            // A forked process has the same layout.
            let is_it =
                || Ok::<_, io::Error>(self.number.is_none() || number_inside(pid)? == self.number);
            if criu::lives(pid, layout)? && is_it()? {
                return Ok(Some(pid));
            }
        }
        Ok(None)
    }

    /// Dumps all processes of the container into image files and ends the container. No process in the container may
    /// have an RDMA device open.
    ///
    /// # Errors
    /// The message of runc or CRIU, or the process with an open device.
    pub(super) async fn dump(&self, image: &Path, since: Option<&str>) -> Result<(), String> {
        self.has_no_device_open(DEVICES)?;
        self.runc(&["checkpoint"], &parent(since), image, "dump.log")
            .await
    }

    /// Copies the container's memory into image files; the container pauses only briefly.
    ///
    /// # Errors
    /// The message of runc or CRIU.
    pub(super) async fn copy_memory(
        &self,
        image: &Path,
        since: Option<&str>,
    ) -> Result<(), String> {
        let action = ["checkpoint", "--pre-dump"];
        self.runc(&action, &parent(since), image, "dump.log").await
    }

    /// Restores the container from an image.
    ///
    /// # Errors
    /// The message of runc or CRIU.
    pub async fn restore(&self, image: &Path) -> Result<(), String> {
        let more = ["--detach", "--bundle", &self.bundle];
        self.runc(&["restore"], &more, image, "restore.log").await
    }

    /// Refuses an open device: CRIU would dump the process all the same, and its connections would be lost.
    fn has_no_device_open(&self, prefix: &str) -> Result<(), String> {
        let of = format!("container {}", self.id);
        have_none_open(members(self.init), prefix, &of)
    }

    async fn runc(
        &self,
        action: &[&str],
        more: &[&str],
        image: &Path,
        log: &str,
    ) -> Result<(), String> {
        let cannot = |error: io::Error| format!("the folder {}: {error}", image.display());
        let work = image.join("work");
        match std::fs::create_dir(&work) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(cannot(error));
            }
            _ => {}
        }
        // CRIU reads this file, since runc has no option for the network lock. The default, iptables, may be missing.
        let settings = work.join("criu.conf");
        std::fs::write(&settings, "network-lock nftables\n").map_err(cannot)?;
        let said = work.join("runc.log");
        let shown = |path: &Path| path.display().to_string();
        let mut command = tokio::process::Command::new("runc");
        command
            .args(["--log", &shown(&said), "--log-format", "json"])
            .args(action)
            .args(["--image-path", &shown(image), "--work-path", &shown(&work)])
            .args(["--tcp-established", "--file-locks"])
            .args(more)
            .arg(&self.id)
            .env("CRIU_CONFIG_FILE", &settings)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let running = command
            .spawn()
            .map_err(|error| format!("runc cannot be run: {error}"))?;
        if criu::see_through("runc", running, criu::LIMIT)
            .await?
            .success()
        {
            return Ok(());
        }
        let why = criu::first_error(&work.join(log))
            .or_else(|| last_message(&said))
            .unwrap_or_else(|| "no reason".to_owned());
        Err(format!("runc {} failed: {why}", action[0]))
    }

    /// Checks that no container has this name here.
    ///
    /// # Errors
    /// One sentence: a container has the name, or the list is unreadable. The container may be the rest of a restore,
    /// or a foreign one.
    pub(crate) async fn is_absent(&self) -> Result<(), String> {
        let Self { id, .. } = self;
        match named(id).await? {
            None => Ok(()),
            Some(_) => Err(format!(
                "a container {id} is here without the process that came: end it with `runc delete --force {id}` if it is \
                 nobody else's"
            )),
        }
    }

    /// Ends the rest of a restored container. No other container of this name may have existed before.
    ///
    /// # Errors
    /// runc's message.
    pub(super) async fn end(&self) -> Result<(), String> {
        if named(&self.id).await?.is_none() {
            return Ok(());
        }
        criu::must("runc", &["delete", "--force", &self.id], END)
            .await
            .map(drop)
    }

    /// Returns the obstacles to a move of the container to this host, one sentence each.
    pub(crate) async fn reasons_here(&self) -> Vec<String> {
        if !self.is_sound() {
            return vec!["the container's name or bundle makes no sense".to_owned()];
        }
        let mut found = Vec::new();
        match list().await {
            Ok(there) if there.iter().any(|one| one.id == self.id) => found.push(format!(
                "the destination has a container {} already",
                self.id
            )),
            Ok(_) => found.extend(too_old().await.map(|why| format!("the destination: {why}"))),
            Err(error) => found.push(format!("containers of the destination: {error}")),
        }
        let settings = Path::new(&self.bundle).join("config.json");
        match std::fs::metadata(&settings) {
            Ok(about) if about.is_file() => {}
            _ => found.push(format!(
                "the destination has no bundle {}: bring its config.json and its root file system there first",
                self.bundle
            )),
        }
        if let Ok(here) = criu::version().await
            && version(&here) < version(&self.criu)
        {
            found.push(format!(
                "the destination's CRIU {here} is older than the source's {}, and may not read its images",
                self.criu
            ));
        }
        found
    }
}

/// Returns the last message in runc's JSON log.
fn last_message(log: &Path) -> Option<String> {
    let written = std::fs::read_to_string(log).ok()?;
    let said: serde_json::Value = serde_json::from_str(written.trim().lines().last()?).ok()?;
    Some(said["msg"].as_str()?.trim().chars().take(400).collect())
}

/// Returns the first two numbers of a version such as `3.17.1`.
fn version(text: &str) -> Option<(u32, u32)> {
    if text.len() > 32 {
        return None;
    }
    let mut parts = text.split('.');
    let number = |part: &str| {
        let digits = part.find(|c: char| !c.is_ascii_digit());
        part[..digits.unwrap_or(part.len())].parse().ok()
    };
    Some((number(parts.next()?)?, number(parts.next()?)?))
}

async fn too_old() -> Option<String> {
    let said = criu::must("runc", &["--version"], ANSWER).await;
    let said = match said {
        Ok(said) => said,
        Err(error) => return Some(error),
    };
    let found = said
        .lines()
        .next()?
        .strip_prefix("runc version ")?
        .to_owned();
    (version(&found)? < OLDEST).then(|| {
        format!(
            "runc {found} is too old: {}.{} or newer is needed",
            OLDEST.0, OLDEST.1
        )
    })
}

/// Returns the obstacles in the container itself, one sentence each.
pub(crate) async fn reasons(listed: &Listed) -> Vec<String> {
    let mut found = Vec::new();
    let (id, init) = (&listed.id, listed.pid);
    if listed.status != "running" {
        return vec![format!("container {id} is {}, not running", listed.status)];
    }
    found.extend(too_old().await);
    let namespace =
        |pid: &str, kind: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    for (kind, own, why) in [
        (
            "net",
            false,
            "has a network namespace of its own, and RDMA devices and addresses move in the host's alone",
        ),
        ("user", false, "has a user namespace of its own"),
        (
            "pid",
            true,
            "has no PID namespace of its own, so that its processes' numbers may be others' at the destination",
        ),
        ("mnt", true, "has no mount namespace of its own"),
    ] {
        let init = namespace(&init.to_string(), kind);
        if (init != namespace("self", kind)) != own || init.is_none() {
            found.push(format!("container {id} {why}"));
        }
    }
    let settings = Path::new(&listed.bundle).join("config.json");
    let settings = std::fs::read(&settings)
        .map_err(|error| error.to_string())
        .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()));
    match settings {
        Ok(settings) => found.extend(terminal(id, &settings)),
        Err(error) => found.push(format!(
            "the config.json of container {id} in {} cannot be read: {error}",
            listed.bundle
        )),
    }
    match outside(init) {
        Ok(files) => found.extend(files.iter().map(|file| {
            format!(
                "container {id} has {file} open, which lies outside of it: have it write to /dev/null or to a file of its own"
            )
        })),
        Err(error) => found.push(format!("the files of container {id} cannot be read: {error}")),
    }
    found
}

fn terminal(id: &str, settings: &serde_json::Value) -> Option<String> {
    (settings["process"]["terminal"] == true)
        .then(|| format!("container {id} has a terminal, which cannot move: start it without one"))
}

/// Returns the open files of the container's processes that lie on no mount of the container, or lead to a process
/// outside.
fn outside(init: u32) -> io::Result<BTreeSet<String>> {
    let mounts = std::fs::read_to_string(format!("/proc/{init}/mountinfo"))?;
    let mounts: BTreeSet<&str> = mounts
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let mut found = BTreeSet::new();
    for pid in members(init)? {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for entry in entries.flatten() {
            let Ok(target) = std::fs::read_link(entry.path()) else {
                continue;
            };
            let number = entry.file_name().to_string_lossy().into_owned();
            let target = target.display().to_string();
            let standard = matches!(&*number, "0" | "1" | "2");
            let about = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"));
            let about = about.unwrap_or_default();
            let mount = about
                .lines()
                .find_map(|line| line.strip_prefix("mnt_id:"))
                .map(str::trim);
            let elsewhere = target.starts_with('/')
                && !target.starts_with("/memfd:")
                && mount.is_some_and(|mount| !mounts.contains(mount));
            if elsewhere || standard && target.starts_with("pipe:") && pid == init {
                found.insert(target);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(id: &str, bundle: &str) -> Container {
        Container {
            id: id.to_owned(),
            bundle: bundle.to_owned(),
            init: 7,
            criu: "3.17.1".to_owned(),
            number: None,
        }
    }

    #[test]
    fn what_is_given_to_runc_is_a_name_and_a_whole_path() {
        assert!(container("job-7_a.b+c", "/srv/job").is_sound());
        for (id, bundle) in [
            ("", "/srv/job"),
            ("-f", "/srv/job"),
            ("..", "/srv/job"),
            ("a/b", "/srv/job"),
            ("a b", "/srv/job"),
            ("job", "srv/job"),
            ("job", "/srv/../etc"),
            ("job", "/srv\0"),
            ("job", ""),
        ] {
            assert!(!container(id, bundle).is_sound(), "{id} {bundle}");
        }
        let mut other = container("job", "/srv/job");
        other.criu = "new".to_owned();
        assert!(!other.is_sound());
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version("1.1.5+ds1"), Some((1, 1)));
        assert!(version("1.10") > version("1.9.9"));
        assert!(version("4.0") > version("3.19"));
        for wrong in ["", "1", "x.1", "1.", "99999999999.1"] {
            assert_eq!(version(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_runc_said_last_is_told() {
        let log = tempfile::NamedTempFile::new().expect("a file");
        assert_eq!(last_message(log.path()), None);
        let lines = "{\"level\":\"warning\",\"msg\":\"slow\"}\n{\"level\":\"error\",\"msg\":\"no bundle\"}\n";
        std::fs::write(log.path(), lines).expect("writes");
        assert_eq!(last_message(log.path()).as_deref(), Some("no bundle"));
        std::fs::write(log.path(), "time=now").expect("writes");
        assert_eq!(last_message(log.path()), None);
    }

    #[test]
    fn a_terminal_is_named() {
        let with = |terminal: bool| serde_json::json!({"process": {"terminal": terminal}});
        assert!(terminal("job", &with(true)).is_some_and(|why| why.contains("job has a terminal")));
        assert_eq!(terminal("job", &with(false)), None);
        assert_eq!(terminal("job", &serde_json::json!({})), None);
    }

    #[test]
    fn the_members_of_a_namespace_are_found_by_it() {
        let own = std::process::id();
        assert!(members(own).expect("reads").contains(&own));
        members(0x7fff_ff00).expect_err("no process has this number");
    }

    #[test]
    fn what_a_process_is_called_inside_is_the_last_of_its_numbers() {
        let status = "Name:\tjob\nNSpid:\t4711\t17\t3\nVmPeak:\t1 kB\n";
        assert_eq!(innermost(status), Some(3));
        assert_eq!(innermost("NSpid:\t4711\n"), Some(4711));
        assert_eq!(innermost("Name:\tjob\n"), None);
        assert!(number_inside(std::process::id()).expect("reads").is_some());
        assert_eq!(number_inside(0x7fff_ff00).expect("reads"), None);
    }

    #[tokio::test]
    async fn nothing_is_dumped_that_has_a_device_open() {
        let folder = tempfile::tempdir().expect("a folder");
        let device = folder.path().join("uverbs").display().to_string();
        let mut one = container("job", "/srv/job");
        one.init = std::process::id();
        one.has_no_device_open(&device).expect("nobody has it open");
        let _open = std::fs::File::create(format!("{device}0")).expect("a file");
        let why = one.has_no_device_open(&device).expect_err("it is open");
        let own = format!("process {} of container job", std::process::id());
        assert!(why.contains(&own), "{why}");
        // A container whose members are unreadable is not dumped either.
        one.init = 0x7fff_ff00;
        let why = one
            .dump(folder.path(), None)
            .await
            .expect_err("it has ended");
        assert!(why.contains("cannot be read"), "{why}");
    }

    #[test]
    fn a_file_on_a_mount_of_its_own_is_not_outside() {
        // This process stands for the first process of a container with the host's mounts.
        let file = tempfile::NamedTempFile::new().expect("a file");
        let found = outside(std::process::id()).expect("reads");
        let path = file.path().display().to_string();
        assert!(!found.contains(&path), "{found:?}");
    }
}
