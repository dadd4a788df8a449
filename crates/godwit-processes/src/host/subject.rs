//! The subject of a dump and restore: a process, or a container with all of its processes.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::runc::Container;
use super::{criu, family};

/// Time between two attempts to find the process.
const AGAIN: Duration = Duration::from_secs(1);

/// A moving process, alone or with a container.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The process's number at the source. The number stays without a container, and differs on each host with one.
    pub pid: u32,
    /// The layout that distinguishes the process from others.
    pub(crate) layout: String,
    /// The container of the process.
    pub(crate) container: Option<Container>,
}

impl Subject {
    /// Returns the process's number here, or `None` if the process does not run here.
    ///
    /// # Errors
    /// The state is unreadable, which says nothing about the process.
    pub async fn found(&self) -> io::Result<Option<u32>> {
        match &self.container {
            None => Ok(criu::lives(self.pid, &self.layout)?.then_some(self.pid)),
            Some(container) => container.process(&self.layout).await,
        }
    }

    /// Returns the process's number here, or `None` if the process does not run here. Retries read errors without end.
    pub(crate) async fn surely_found(&self) -> Option<u32> {
        loop {
            match self.found().await {
                Ok(found) => return found,
                Err(error) => {
                    tracing::error!(pid = self.pid, %error, "whether a process runs cannot be read");
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Dumps the subject into image files and ends the subject. Its TCP connections are cut off without a word to their
    /// peers.
    ///
    /// `since` is the folder of a [`Subject::copy_memory`] relative to this one, to leave out memory unchanged since
    /// then.
    ///
    /// # Errors
    /// CRIU's message.
    pub(crate) async fn dump(&self, image: &Path, since: Option<&str>) -> Result<(), String> {
        match &self.container {
            None => {
                let of = format!("process {} and what descends from it", self.pid);
                family::have_none_open(Ok(family::family(self.pid)), family::DEVICES, &of)?;
                criu::dump(self.pid, image, since).await
            }
            Some(container) => container.dump(image, since).await,
        }
    }

    /// Copies the subject's memory, or its changes after `since`, into image files; the subject pauses only briefly.
    ///
    /// # Errors
    /// CRIU's message.
    pub(crate) async fn copy_memory(
        &self,
        image: &Path,
        since: Option<&str>,
    ) -> Result<(), String> {
        match &self.container {
            None => criu::copy_memory(self.pid, image, since).await,
            Some(container) => container.copy_memory(image, since).await,
        }
    }

    /// Returns the bytes of the subject's own memory.
    pub(crate) fn resident(&self) -> u64 {
        criu::resident(self.container.as_ref().map_or(self.pid, |one| one.init))
    }

    /// Restores the subject from an image and returns the process's number.
    ///
    /// # Errors
    /// CRIU's message, or a container that runs without the process.
    pub(super) async fn make(&self, image: &Path) -> Result<u32, String> {
        let Some(container) = &self.container else {
            criu::make(image).await?;
            return Ok(self.pid);
        };
        container.restore(image).await?;
        // A temporarily unreadable state is no reason to end a running process.
        let found = self.surely_found().await;
        found.ok_or_else(|| format!("container {} runs without its process", container.id))
    }

    /// Removes the rules with which CRIU has cut off the subject's connections at the source.
    pub(crate) async fn unlock_network(&self) {
        let pid = self.container.as_ref().map_or(self.pid, |one| one.init);
        criu::unlock_network(pid).await;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A runc that restores a process that runs already, and whose list fails once.
    const RUNC: &str = "#!/bin/sh
case \"$*\" in
  *list*) if [ -e \"$STATE/listed\" ]; then cat \"$STATE/list\"; else touch \"$STATE/listed\"; exit 1; fi ;;
esac
";

    /// Starts a process that forks a second of the same layout; returns the first process and the number of the second.
    fn forked() -> (Child, u32) {
        let script =
            "exec 3<&0; (exec 1>&-; read line <&3; :) & echo $!; exec 1>&-; read line; wait";
        let mut first = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("runs");
        let mut said = String::new();
        BufReader::new(first.stdout.take().expect("its output"))
            .read_line(&mut said)
            .expect("it says");
        (first, said.trim().parse().expect("a number"))
    }

    #[tokio::test]
    #[ignore = "another test runs it where runc seems to be"]
    async fn a_container_is_seen() {
        let state = std::env::var("STATE").expect("a folder");
        let (mut first, second) = forked();
        let layout = criu::layout(first.id()).expect("reads").expect("a layout");
        assert!(criu::lives(second, &layout).expect("reads"));
        let listed = serde_json::json!([
            {"id": "job", "pid": first.id(), "status": "running", "bundle": "/srv/job"}
        ]);
        std::fs::write(format!("{state}/list"), listed.to_string()).expect("writes");
        let subject = |number| Subject {
            pid: 7,
            layout: layout.clone(),
            container: Some(Container {
                id: "job".to_owned(),
                bundle: "/srv/job".to_owned(),
                init: 7,
                criu: "3.17.1".to_owned(),
                number,
            }),
        };
        // Of two processes of one layout, the number inside the container decides.
        for pid in [first.id(), second] {
            let number = crate::host::runc::number_inside(pid).expect("reads");
            let made = subject(number).make(Path::new(&state)).await;
            assert_eq!(made, Ok(pid));
        }
        let other = subject(Some(0x7fff_ff00)).make(Path::new(&state)).await;
        assert!(other.expect_err("none").contains("without its process"));
        drop(first.stdin.take());
        first.wait().expect("it ends");
    }

    #[test]
    fn what_was_restored_is_known_by_its_number_and_stays_though_it_is_not_seen_at_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let runc = dir.path().join("runc");
        std::fs::write(&runc, RUNC).expect("writes");
        std::fs::set_permissions(&runc, PermissionsExt::from_mode(0o755)).expect("a program");
        let path = std::env::var("PATH").unwrap_or_default();
        let ran = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "host::subject::tests::a_container_is_seen",
                "--ignored",
                "--nocapture",
            ])
            .env("PATH", format!("{}:{path}", dir.path().display()))
            .env("STATE", dir.path())
            .output()
            .expect("it runs");
        let said = [ran.stdout, ran.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
    }
}
