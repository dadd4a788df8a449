//! A node in each guest, to move processes between the guests.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::moving::SOCKET;
use super::{Bed, RdmaGuest};

/// Creates certificates of the bed's own authority for the nodes of `count` guests; returns the files for
/// [`Bed::start`]. `godwit` is the command, `into` a folder.
pub fn certificates(godwit: &Path, into: &Path, count: usize) -> io::Result<Vec<PathBuf>> {
    let call = |arguments: &[&str]| {
        let made = Command::new(godwit)
            .args(["certs"])
            .args(arguments)
            .arg("--dir")
            .arg(into)
            .output()?;
        if made.status.success() {
            return Ok(());
        }
        Err(io::Error::other(
            String::from_utf8_lossy(&made.stderr).into_owned(),
        ))
    };
    std::fs::create_dir_all(into)?;
    call(&["init", "--force"])?;
    let mut files = vec![into.join("ca.pem")];
    for number in 1..=count {
        let name = format!("g{number}");
        call(&["issue", &name, "--force"])?;
        files.extend(["pem", "key"].map(|ending| into.join(format!("{name}.{ending}"))));
    }
    Ok(files)
}

impl Bed {
    /// Starts a node in each of `count` guests. The node's name is g and the guest's number, and the output is in
    /// /run/node.log.
    pub fn start_nodes(&self, count: usize) -> io::Result<()> {
        for number in 1..=count {
            start_node(self.guest(number), count, "")?;
        }
        for number in 1..=count {
            answers(self.guest(number))?;
            // A process keeps its number when it moves, and guests that boot alike give out the same ones.
            self.guest(number)
                .must(&format!("echo {number}000 >/proc/sys/kernel/ns_last_pid"))?;
        }
        Ok(())
    }

    /// Kills the node of a guest and starts the node again with `environment`, such as `A=1 `.
    pub fn restart_node(&self, number: usize, count: usize, environment: &str) -> io::Result<()> {
        kill_node(self.guest(number))?;
        start_node(self.guest(number), count, environment)?;
        answers(self.guest(number))
    }
}

fn answers(guest: &RdmaGuest) -> io::Result<()> {
    guest
        .must(&format!(
            "for i in $(seq 600); do godwit --socket {SOCKET} process list >/dev/null 2>&1 && exit 0; sleep 0.1; done; \
             cat /run/node.log; exit 1"
        ))
        .map(drop)
}

/// Kills the node of a guest, as if its host had ended it.
pub fn kill_node(guest: &RdmaGuest) -> io::Result<()> {
    guest
        .must("kill -9 $(cat /run/node.number) && while [ -e /proc/$(cat /run/node.number)/exe ]; do sleep 0.02; done")
        .map(drop)
}

pub fn start_node(guest: &RdmaGuest, count: usize, environment: &str) -> io::Result<()> {
    let own = guest.number();
    let others = (1..=count).filter(|number| *number != own);
    let peers: String = others
        .map(|number| format!(" --peer g{number}=10.0.0.{number}:7001"))
        .collect();
    let pid = guest.background(
        "node",
        &format!(
            "env {environment}godwit node --name g{own} --data-dir /run/godwit --listen {}:7001{peers} \
             --cert /opt/godwit/g{own}.pem --key /opt/godwit/g{own}.key --ca /opt/godwit/ca.pem \
             --processes --process-files /run",
            guest.address()
        ),
    )?;
    guest
        .must(&format!("echo {pid} >/run/node.number"))
        .map(drop)
}
