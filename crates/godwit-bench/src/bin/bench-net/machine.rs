//! The machine whose card is measured.

use std::io;
use std::time::Duration;

use godwit_testkit::process::wait_for;
use serde_json::Value;

use crate::peers::Peer;
use crate::site::{GUEST, HOSTS, Site};
use crate::testpmd::Testpmd;

/// Its name on its node.
const VM: &str = "guest";
/// How long an emulated guest may take to start.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often the guest is asked for its cards: rarely enough that it does not cost it much.
const LOOK: Duration = Duration::from_millis(250);
/// Its memory: what the guest's file system and its programs need, and little more, because a move copies it.
const MEMORY: &str = "192MiB";

/// A machine on one of the nodes, with one peer's card.
#[derive(Debug)]
pub(crate) struct Machine {
    at: usize,
    peer: Peer,
    /// Who serves its card, if that is neither QEMU nor the node.
    _testpmd: Option<Testpmd>,
}

impl Machine {
    /// Starts it on the first node and waits until its guest serves.
    ///
    /// # Errors
    /// When it does not, with what its guest said.
    pub(crate) fn start(site: &Site, peer: Peer) -> io::Result<Self> {
        let testpmd = match peer {
            Peer::Testpmd => Some(Testpmd::start(site)?),
            _ => None,
        };
        let console = site.directory().join("console.log");
        // That of the machine before.
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

    /// Waits until the guest has all of its cards: one that was unplugged for a move comes back after it.
    ///
    /// # Errors
    /// When one does not come.
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

    /// Where it is.
    pub(crate) const fn host(&self) -> &'static str {
        HOSTS[self.at]
    }

    /// Moves it to the other node, and gives the migration as the source shows it.
    ///
    /// # Errors
    /// When it does not move.
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

    /// Ends it at once.
    ///
    /// # Errors
    /// When its node does not.
    pub(crate) fn stop(self, site: &Site) -> io::Result<()> {
        let node = site.cluster.node(self.host());
        node.godwit(&["vm", "stop", VM, "--force"]).text()?;
        // Where it was before, it stands as moved, if it was.
        let other = site.cluster.node(HOSTS[1 - self.at]);
        let _ = other.godwit(&["vm", "forget", VM]).text();
        Ok(())
    }
}
