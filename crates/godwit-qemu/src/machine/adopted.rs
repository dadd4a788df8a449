//! The machine behind the command line of a foreign QEMU.

use std::path::Path;

use super::words::{MachineNic, Word, field, property};
use super::{Machine, option};

/// The service of a node at a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// The disk of this name.
    Disk(String),
    /// This NIC.
    Nic(MachineNic),
}

impl Machine {
    /// Returns the machine behind the command line of a running QEMU. `served_at` returns the node's service at a
    /// socket path.
    pub fn adopt(command: &[String], served_at: impl Fn(&Path) -> Option<Served>) -> Option<Self> {
        let (program, given) = command.split_first()?;
        let mut machine = Self {
            program: program.clone(),
            words: Vec::new(),
            disks: Vec::new(),
            nics: Vec::new(),
            console: false,
            bound_here: Vec::new(),
        };
        let monitors = monitor_backends(given);
        let mut rest = given.iter();
        let mut serial = false;
        let mut nographic = false;
        while let Some(word) = rest.next() {
            match option(word) {
                // The node adds these itself, or they no longer apply.
                Some("S" | "daemonize") => {}
                Some("pidfile" | "incoming" | "qmp" | "qmp-pretty" | "monitor" | "mon") => {
                    rest.next();
                }
                Some("nographic") => {
                    nographic = true;
                    machine.push(["-display", "none"]);
                }
                Some("serial") => {
                    let Some(value) = rest.next() else { continue };
                    if !serial && matches!(value.as_str(), "stdio" | "mon:stdio") {
                        machine.console = true;
                    } else {
                        machine.push(["-serial", value]);
                    }
                    serial = true;
                }
                Some("chardev") => {
                    let Some(value) = rest.next() else { continue };
                    let id = field(value, "id").map(|(_, id)| id);
                    if id.is_some_and(|id| monitors.contains(&id)) {
                        continue;
                    }
                    machine.words.push(Word::Plain(word.clone()));
                    machine.take_backend(value, &served_at);
                }
                _ => {
                    machine.check(word);
                    machine.words.push(Word::Plain(word.clone()));
                }
            }
        }
        machine.console |= nographic && !serial;
        Some(machine)
    }

    /// Returns the mismatch between the node's NIC of this number and the guest's card, if any. A move announces the
    /// NIC's address, so the guest's card must have the same one.
    pub fn nic_mismatch(&self, nic: usize) -> Option<String> {
        let backends = self.nic_backends();
        let Some((backend, _)) = backends.iter().find(|(_, number)| *number == nic) else {
            return Some(String::from(
                "no -netdev of type vhost-user uses its socket: give QEMU the -netdev and the -device that \
                 'godwit nic create' printed",
            ));
        };
        let card = self
            .values("device")
            .find(|value| property(value, "netdev").as_ref() == Some(backend));
        let Some(card) = card else {
            return Some(format!("no -device uses the -netdev {backend}"));
        };
        let mac = &self.nics.get(nic)?.mac;
        match property(card, "mac") {
            Some(given) if given.eq_ignore_ascii_case(mac) => None,
            Some(given) => Some(format!(
                "QEMU's card has the MAC address {given}, and the NIC {mac}: give both the same"
            )),
            None => Some(format!(
                "QEMU's card was given no MAC address: give it mac={mac}, which is the NIC's"
            )),
        }
    }

    fn push(&mut self, pair: [&str; 2]) {
        self.words
            .extend(pair.map(|word| Word::Plain(word.to_owned())));
    }

    fn take_backend(&mut self, value: &str, served_at: impl Fn(&Path) -> Option<Served>) {
        let served = field(value, "path")
            .and_then(|(at, path)| Some((at, served_at(Path::new(&path))?)))
            .filter(|_| value.starts_with("socket,"));
        let Some(((from, to), served)) = served else {
            self.check(value);
            self.words.push(Word::Plain(value.to_owned()));
            return;
        };
        let (before, after) = (value[..from].to_owned(), value[to..].to_owned());
        self.words.push(match served {
            Served::Disk(disk) => {
                if !self.disks.contains(&disk) {
                    self.disks.push(disk.clone());
                }
                Word::Disk {
                    before,
                    disk,
                    after,
                }
            }
            Served::Nic(nic) => {
                let known = self.nics.iter().position(|other| *other == nic);
                let nic = known.unwrap_or_else(|| {
                    self.nics.push(nic);
                    self.nics.len() - 1
                });
                Word::Nic { before, nic, after }
            }
        });
    }

    /// Records resources only available from QEMU's parent process.
    fn check(&mut self, word: &str) {
        let descriptor = ["fd", "fds", "vhostfd", "vhostfds"]
            .iter()
            .any(|key| field(word, key).is_some());
        if descriptor || option(word) == Some("add-fd") || word.contains("/dev/fdset/") {
            let shown: String = word.chars().take(80).collect();
            self.bound_here
                .push(format!("it was given open files ({shown})"));
        }
    }
}

/// Returns the ids of the monitors' character devices.
fn monitor_backends(given: &[String]) -> Vec<String> {
    given
        .windows(2)
        .filter(|pair| option(&pair[0]) == Some("mon"))
        .filter_map(|pair| match field(&pair[1], "chardev") {
            Some((_, id)) => Some(id),
            None => pair[1].split(',').next().map(str::to_owned),
        })
        .collect()
}
