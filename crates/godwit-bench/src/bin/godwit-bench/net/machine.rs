//! The machine with the card under test.

use std::io;
use std::time::Duration;

use godwit_testkit::process::wait_for;
use serde_json::Value;

use crate::net::peers::Peer;
use crate::net::site::{GUEST, HOSTS, Site};
use crate::net::testpmd::Testpmd;

/// Name of the machine on its node.
const VM: &str = "guest";
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
    /// Starts the machine on the first node and waits until the guest serves.
    ///
    /// # Errors
    /// The output of a guest that does not serve.
    pub(crate) fn start(site: &Site, peer: Peer) -> io::Result<Self> {
        let testpmd = match peer {
            Peer::Testpmd => Some(Testpmd::start(site)?),
            _ => None,
        };
        let console = site.directory().join("console.log");
        // Removes the previous machine's log.
        let _ = std::fs::remove_file(&console);
        let mut words: Vec<String> = [
            "vm", "run", VM, "--memory", MEMORY, "--cpus", "1", "--accel", "tcg",
        ]
        .map(str::to_owned)
        .to_vec();
        if let Some(nic) = peer.nic() {
            words.extend(["--nic".to_owned(), nic]);
        }
        words.extend(["--", "-nodefaults", "-no-reboot", "-kernel"].map(str::to_owned));
        words.push(site.kernel().to_string_lossy().into_owned());
        words.push("-initrd".to_owned());
        words.push(site.initramfs().to_string_lossy().into_owned());
        words.push("-append".to_owned());
        words.push(format!(
            "console=ttyS0 loglevel=4 panic=-1 network.address={GUEST}/24"
        ));
        words.push("-chardev".to_owned());
        words.push(format!(
            "file,id=console,append=on,path={}",
            console.display()
        ));
        words.extend(["-serial", "chardev:console"].map(str::to_owned));
        words.extend(peer.qemu_arguments(site.directory()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        site.cluster.node(HOSTS[0]).godwit(&words).json()?;
        wait_for(PATIENCE, || site.counters().ok()).ok_or_else(|| {
            let said = std::fs::read(&console).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            io::Error::other(format!(
                "the guest does not serve within {PATIENCE:?}; it said:\n{said}"
            ))
        })?;
        Ok(Self {
            at: 0,
            peer,
            _testpmd: testpmd,
        })
    }

    /// Waits until the guest has all of its cards. A card that was unplugged for a move comes back after the move.
    ///
    /// # Errors
    /// A card that does not come back.
    pub(crate) fn is_whole(&self, site: &Site) -> io::Result<()> {
        let expected = self.peer.cards_in_guest();
        if expected == 1 {
            return Ok(());
        }
        let whole = || {
            std::thread::sleep(LOOK);
            (site.count_cards().ok()? == expected).then_some(())
        };
        wait_for(PATIENCE, whole).ok_or_else(|| {
            io::Error::other(format!(
                "the guest has not {expected} network interfaces within {PATIENCE:?}: the card that is unplugged for a \
                 move was not plugged in"
            ))
        })
    }

    /// Returns the name of the machine's host.
    pub(crate) const fn host(&self) -> &'static str {
        HOSTS[self.at]
    }

    /// Moves the machine to the other node and returns the migration as shown by the source.
    ///
    /// # Errors
    /// The error of `godwit migrate`.
    pub(crate) fn migrate(&mut self, site: &Site) -> io::Result<Value> {
        let source = site.cluster.node(self.host());
        let vm = format!("vm/{VM}");
        let other = 1 - self.at;
        let shown = source
            .godwit(&["migrate", &vm, "--to", HOSTS[other]])
            .json()?;
        self.at = other;
        Ok(shown)
    }

    /// Stops the machine at once.
    ///
    /// # Errors
    /// The error of `godwit vm stop`.
    pub(crate) fn stop(self, site: &Site) -> io::Result<()> {
        let node = site.cluster.node(self.host());
        node.godwit(&["vm", "stop", VM, "--force"]).text()?;
        // The previous node still lists a moved machine.
        let other = site.cluster.node(HOSTS[1 - self.at]);
        let _ = other.godwit(&["vm", "forget", VM]).text();
        Ok(())
    }
}
