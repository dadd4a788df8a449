//! The machine with the card under test.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::peers::Peer;
use super::site::{GUEST, HOSTS, Site};
use super::testpmd::Testpmd;
use crate::common::awaited;

pub(crate) const VM: &str = "guest";
/// Longest time for an emulated guest to start.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time between two queries of the guest's cards, long enough to cost the guest little.
const LOOK: Duration = Duration::from_millis(250);
/// Memory for the guest's file system and programs, and little more, because a move copies all of it.
const MEMORY: &str = "192MiB";

/// A machine on one of the nodes, with one peer's card.
#[derive(Debug)]
pub(crate) struct Machine {
    at: usize,
    peer: Peer,
    /// The back end of the card, if neither QEMU nor the node serves it.
    _testpmd: Option<Testpmd>,
}

impl Machine {
    /// Starts the machine on the first node, with a disk of the node if named, and waits until the guest serves.
    pub(crate) fn start(site: &Site, peer: Peer, disk: Option<&str>) -> io::Result<Self> {
        let testpmd = match peer {
            Peer::Testpmd => Some(Testpmd::start(site)?),
            _ => None,
        };
        let console = site.directory().join("console.log");
        // Removes the previous machine's log.
        let _ = std::fs::remove_file(&console);
        let line = format!("vm run {VM} --memory {MEMORY} --cpus 1 --accel tcg");
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        if let Some(disk) = disk {
            words.extend(["--disk", disk].map(str::to_owned));
        }
        if let Some(nic) = peer.nic() {
            words.extend(["--nic".to_owned(), nic]);
        }
        let file = |path: PathBuf| path.to_string_lossy().into_owned();
        let settings = format!("console=ttyS0 loglevel=4 panic=-1 network.address={GUEST}/24");
        let log = format!("file,id=console,append=on,path={}", console.display());
        words.extend(
            [
                "--",
                "-nodefaults",
                "-no-reboot",
                // QEMU names the threads of emulated processors.
                "-name",
                "debug-threads=on",
                "-serial",
                "chardev:console",
            ]
            .map(str::to_owned),
        );
        words.extend(["-kernel".to_owned(), file(site.kernel())]);
        words.extend(["-initrd".to_owned(), file(site.initramfs())]);
        words.extend(["-append".to_owned(), settings, "-chardev".to_owned(), log]);
        words.extend(peer.qemu_arguments(site.directory()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        site.cluster.node(HOSTS[0]).godwit(&words).json()?;
        awaited("the guest's service", PATIENCE, || site.counters().ok()).map_err(|error| {
            let said = std::fs::read(&console).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            io::Error::other(format!("{error}; it said:\n{said}"))
        })?;
        Ok(Self {
            at: 0,
            peer,
            _testpmd: testpmd,
        })
    }

    /// Waits until the guest has all of its cards. A card that was unplugged for a move comes back after the move.
    pub(super) fn is_whole(&self, site: &Site) -> io::Result<()> {
        let expected = self.peer.cards_in_guest();
        if expected == 1 {
            return Ok(());
        }
        let whole = || {
            std::thread::sleep(LOOK);
            (site.count_cards().ok()? == expected).then_some(())
        };
        awaited(
            "the return of the card that is unplugged for a move",
            PATIENCE,
            whole,
        )
    }

    pub(super) const fn host(&self) -> &'static str {
        HOSTS[self.at]
    }

    /// Moves the machine to the other node and returns the migration as shown by the source.
    pub(super) fn migrate(&mut self, site: &Site) -> io::Result<Value> {
        let source = site.cluster.node(self.host());
        let vm = format!("vm/{VM}");
        let other = 1 - self.at;
        let shown = source
            .godwit(&["migrate", &vm, "--to", HOSTS[other]])
            .json()?;
        self.at = other;
        Ok(shown)
    }

    pub(crate) fn stop(self, site: &Site) -> io::Result<()> {
        let node = site.cluster.node(self.host());
        node.godwit(&["vm", "stop", VM, "--force"]).text()?;
        // The previous node still lists a moved machine.
        let other = site.cluster.node(HOSTS[1 - self.at]);
        let _ = other.godwit(&["vm", "forget", VM]).text();
        Ok(())
    }
}
