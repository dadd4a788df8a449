//! Captures a machine: stops the guest, copies the pages written since the last time and the state of the devices, and
//! lets the guest go on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_context::{blocking, failpoint};
use godwit_disks::disks::disk::Disk;
use godwit_disks::disks::following;
use godwit_memory::dirty::pages::Pages;
use godwit_memory::dirty::scan::Scanner;
use godwit_memory::mover::agent::Agent;
use godwit_protect::checkpoints::Checkpoint;
use godwit_qemu::held_cards::HeldCards;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::Machine;
use godwit_qemu::migration::device_state::StateReader;
use godwit_vhost::memory::relocated::FileId;
use godwit_vhost::memory::written::WrittenPages;
use serde_json::json;

use super::memory::GuestMemory;
use super::records::{self, Copies};
use crate::nics::served::ServedNic;
use crate::vms::Vms;
use crate::vms::vm::{Qemu, Vm};

/// A captured checkpoint, as it travels.
#[derive(Debug)]
pub(super) struct Captured {
    pub(super) records: Vec<u8>,
    pub(super) pages: u64,
    pub(super) pause: Pause,
}

/// Times of a checkpoint, while the guest stands still. Pages and the state of the devices are saved side by side.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pause {
    /// Until the guest and its devices have stopped.
    pub(super) stop: Duration,
    /// From then on, until the written pages are copied.
    pub(super) copy: Duration,
    /// From then on, until the state of the devices is saved.
    pub(super) state: Duration,
    /// From the end of both until the guest runs again.
    pub(super) resume: Duration,
    /// From the beginning to the end.
    pub(super) whole: Duration,
}

/// A machine whose written pages are tracked. The end of the agent's connection ends the tracking.
pub(super) struct Capture {
    vm: Arc<Vm>,
    qemu: Qemu,
    pages: Arc<Tracked>,
    states: StateReader,
    disks: Vec<Arc<Disk>>,
    nics: Vec<Arc<ServedNic>>,
    cards: HeldCards,
    /// The last checkpoint that the backup has.
    whole: Checkpoint,
}

/// The memory and its two trackers: of QEMU's own writes, and of those of this node's devices.
#[derive(Debug)]
struct Tracked {
    memory: GuestMemory,
    scanner: Scanner,
    written: Arc<WrittenPages>,
    copies: Mutex<Copies>,
    _agent: Agent,
}

impl Tracked {
    /// Returns the pages written since the last call; at first, all present pages.
    fn scan(&self) -> Result<Pages, String> {
        let ours = self.written.take();
        let scanned = self.scanner.scan().map_err(|error| error.to_string())?;
        match self.written.unlogged() {
            0 => Ok(scanned.union(&ours)),
            _ => Err(String::from(
                "a device has written to memory of it that is in another file",
            )),
        }
    }

    /// Copies pages, of which records are made next.
    fn copy(&self, pages: Pages) -> Result<(), String> {
        let copied = self.copies().take(&self.memory, pages);
        copied.map_err(|error| format!("its memory cannot be read: {error}"))
    }

    fn copies(&self) -> MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the blockers of a machine's checkpoints at its own node.
pub(in crate::protect) async fn blockers(vm: &Vm, qemu: &Qemu, facts: &Facts) -> Vec<String> {
    let machine = vm.lock().entry.machine.clone();
    let mut blockers = facts.devices.changes(&machine);
    for reason in &facts.blocked {
        blockers.push(format!("QEMU saves no state of it: {reason}"));
    }
    if !facts.runs {
        blockers.push(String::from("its guest does not run"));
    }
    match held_cards(&machine, qemu) {
        Ok(cards) => blockers.extend(cards.check().await.err().map(|error| {
            format!("QEMU cannot hold back the packets of its own network card: {error}")
        })),
        Err(why) => blockers.push(why),
    }
    let (pid, socket, bytes) = (qemu.process.pid, vm.places.agent(), facts.memory_bytes);
    let tracked = blocking(move || track(pid, &socket, bytes)?.scan().map(drop));
    let tracked = tracked.await.map_err(|error| error.message);
    blockers.extend(tracked.and_then(|scanned| scanned).err());
    blockers
}

impl Capture {
    /// Begins to track the pages that a machine writes.
    ///
    /// # Errors
    /// The reason in a sentence.
    pub(super) async fn begin(vms: &Arc<Vms>, vm: &Arc<Vm>, bytes: u64) -> Result<Self, String> {
        let qemu = vm.qemu().map_err(|error| error.message)?;
        let (pid, socket) = (qemu.process.pid, vm.places.agent());
        let tracked = blocking(move || track(pid, &socket, bytes)).await;
        let pages = Arc::new(tracked.map_err(|error| error.message)??);
        let user = vms.context.config.qemu_user.as_ref();
        let states = StateReader::new(&vm.places, user);
        let states = states.map_err(|error| format!("the pipe for its state: {error}"))?;
        let (disks, nics, cards) = {
            let inner = vm.lock();
            let cards = held_cards(&inner.entry.machine, &qemu)?;
            let names = inner.entry.machine.disks.iter();
            let disks = names.filter_map(|name| vms.disks.find(name)).collect();
            (disks, inner.nics.clone(), cards)
        };
        let capture = Self {
            vm: Arc::clone(vm),
            qemu,
            pages,
            states,
            disks,
            nics,
            cards,
            whole: Checkpoint(0),
        };
        let written = Some(&capture.pages.written);
        capture
            .log_writes(written)
            .await
            .ok_or("a device of it has ended")?;
        vm.lock().checkpointed = true;
        Ok(capture)
    }

    /// Makes the devices log their writes, or not.
    async fn log_writes(&self, log: Option<&Arc<WrittenPages>>) -> Option<()> {
        for nic in &self.nics {
            nic.ask(|device, reply| device.log_writes(log.cloned(), reply))
                .await?;
        }
        for disk in &self.disks {
            let log = log.cloned();
            following::log_writes(disk, log).await.then_some(())?;
        }
        Some(())
    }

    /// Begins with all pages that were ever written, while the guest runs.
    pub(super) async fn all(&self) -> Result<Pages, String> {
        let pages = Arc::clone(&self.pages);
        let all = blocking(move || Ok(pages.scan()?.union(&pages.memory.allocated())));
        all.await.map_err(|error| error.message)?
    }

    /// Returns the pages written since the last call, while the guest runs.
    pub(super) async fn scan(&self) -> Result<Pages, String> {
        let pages = Arc::clone(&self.pages);
        blocking(move || pages.scan())
            .await
            .map_err(|error| error.message)?
    }

    /// Copies pages, while the guest runs.
    pub(super) async fn copy(&self, part: Pages) -> Result<Vec<u8>, String> {
        let pages = Arc::clone(&self.pages);
        let copied = blocking(move || {
            pages.copy(part)?;
            Ok(pages.copies().pack())
        });
        copied.await.map_err(|error| error.message)?
    }

    /// Holds the guest's packets back from now on.
    pub(super) async fn hold_packets(&mut self) -> Result<(), String> {
        for nic in &self.nics {
            let held = nic.ask(|device, reply| device.hold_back(reply)).await;
            held.ok_or("a NIC of it has ended")?;
        }
        self.cards.hold().await.map_err(|error| error.to_string())
    }

    /// Lets the packets of all epochs up to this one leave, whose checkpoint the backup has.
    ///
    /// # Errors
    /// QEMU does not release those of its own cards.
    pub(super) async fn release(&mut self, through: Checkpoint) -> Result<(), String> {
        self.whole = through;
        for nic in &self.nics {
            nic.device.release_checkpoint(through.0);
        }
        let released = self.cards.release(through.0).await;
        released.map_err(|error| error.to_string())
    }

    /// Returns true if the guest runs, so that a checkpoint can stop it and let it go on.
    pub(super) fn guest_runs(&self) -> bool {
        let inner = self.vm.lock();
        inner.run_state.as_deref() == Some("running") && inner.stands_still.is_none()
    }

    /// Waits until QEMU has ended.
    pub(super) async fn ended(&self) {
        self.qemu.process.ended().await;
    }

    /// Captures a checkpoint.
    ///
    /// # Errors
    /// The reason in a sentence. The guest goes on, if QEMU lets it.
    pub(super) async fn checkpoint(&mut self, number: Checkpoint) -> Result<Captured, String> {
        failpoint::reach(String::from("checkpoint::before-stop")).await;
        let begun = Instant::now();
        let (qmp, states, cards) = (&self.qemu.qmp, &mut self.states, &mut self.cards);
        let (pages, disks, nics) = (&self.pages, &self.disks, &self.nics);
        let numbers = (number, self.whole);
        let copied = async {
            let stopped = qmp.execute("stop", json!({})).await;
            stopped.map_err(|error| error.to_string())?;
            let stop = begun.elapsed();
            failpoint::reach(String::from("checkpoint::stopped")).await;
            let pages = Arc::clone(pages);
            let copied = blocking(move || {
                let written = pages.scan()?;
                let count = written.count();
                pages.copy(written)?;
                Ok::<_, String>(count)
            });
            let (copied, ended) = tokio::join!(copied, end_epoch(disks, nics, numbers));
            ended?;
            let pages = copied.map_err(|error| error.message)??;
            let copy = begun.elapsed() - stop;
            Ok::<_, String>((pages, stop, copy))
        };
        // QEMU takes the second command when it has done the first: the state is saved while the pages are copied.
        let saved = async {
            let state = states.save(qmp).await.map_err(|error| error.to_string())?;
            let ended = cards.end_epoch(number.0).await;
            ended.map_err(|error| error.to_string())?;
            Ok::<_, String>((state, begun.elapsed()))
        };
        let (copied, saved) = tokio::join!(copied, saved);
        let resumes = begun.elapsed();
        let goes_on = qmp.execute("cont", json!({})).await;
        let whole = begun.elapsed();
        let ((pages, stop, copy), (state, saved)) = (copied?, saved?);
        let pause = Pause {
            stop,
            copy,
            state: saved.saturating_sub(stop),
            resume: whole - resumes,
            whole,
        };
        goes_on.map_err(|error| error.to_string())?;
        let tracked = Arc::clone(&self.pages);
        let records = blocking(move || tracked.copies().pack()).await;
        let mut records = records.map_err(|error| error.message)?;
        records::put_end(&mut records, &state, number);
        failpoint::reach(String::from("checkpoint::captured")).await;
        Ok(Captured {
            records,
            pages,
            pause,
        })
    }

    /// Ends the tracking. Packets stay held back.
    pub(super) async fn end(self) {
        self.vm.lock().checkpointed = false;
        // A device that has ended logs nothing.
        let _ = self.log_writes(None).await;
    }
}

/// Finds the cards of a machine that QEMU itself serves.
pub(super) fn held_cards(machine: &Machine, qemu: &Qemu) -> Result<HeldCards, String> {
    HeldCards::of(machine, &qemu.qmp).map_err(|cards| {
        format!(
            "QEMU itself serves its network card ({}), whose packets cannot be held back: run it with --nic, or give \
             QEMU -netdev and -device",
            cards.join(", ")
        )
    })
}

/// Ends the epoch of a checkpoint at the devices of a stopped machine. The backup has all checkpoints up to `whole`.
async fn end_epoch(
    disks: &[Arc<Disk>],
    nics: &[Arc<ServedNic>],
    (number, whole): (Checkpoint, Checkpoint),
) -> Result<(), String> {
    for nic in nics {
        let ended = nic
            .ask(|device, reply| device.end_checkpoint(number.0, reply))
            .await;
        ended.ok_or("a NIC of it has ended")?;
    }
    for disk in disks {
        if !following::mark_checkpoint(disk, number.0, whole.0).await {
            return Err(format!("disk {} is not followed any more", disk.name));
        }
    }
    Ok(())
}

/// Begins to track a QEMU's writes.
fn track(pid: u32, socket: &std::path::Path, bytes: u64) -> Result<Tracked, String> {
    let memory = GuestMemory::of(pid, bytes)?;
    let unknown = |error: std::io::Error| error.to_string();
    let file = FileId::of(memory.file()).map_err(unknown)?;
    let mut agent = Agent::connect(socket).map_err(|error| error.to_string())?;
    let tracked = agent.track(memory.address(), memory.bytes());
    tracked.map_err(|error| format!("its writes cannot be tracked: {error}"))?;
    let scanner = Scanner::of(pid, memory.address(), memory.bytes());
    Ok(Tracked {
        scanner: scanner.map_err(|error| error.to_string())?,
        written: Arc::new(WrittenPages::new(file, memory.bytes())),
        copies: Mutex::new(Copies::new(memory.bytes())),
        memory,
        _agent: agent,
    })
}
