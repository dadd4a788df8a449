//! Captures a machine: stops the guest, copies the pages written since the last time and the state of the devices, and
//! lets the guest go on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_context::{blocking, failpoint};
use godwit_disks::disks::disk::Disk;
use godwit_disks::disks::following;
use godwit_memory::dirty::pages::{PAGE_BYTES, PageRun, Pages};
use godwit_memory::dirty::scan::Scanner;
use godwit_memory::mover::agent::Agent;
use godwit_protect::checkpoints::Checkpoint;
use godwit_qemu::cards;
use godwit_qemu::inspect::Facts;
use godwit_qemu::migration::device_state::StateReader;
use godwit_vhost::memory::relocated::FileId;
use godwit_vhost::memory::written::WrittenPages;
use serde_json::json;

use super::memory::GuestMemory;
use super::records::{self, MOST_PAGES};
use crate::nics::served::ServedNic;
use crate::vms::Vms;
use crate::vms::vm::{Qemu, Vm};

/// A captured checkpoint, as it travels.
#[derive(Debug)]
pub(super) struct Captured {
    pub(super) records: Vec<u8>,
    pub(super) pages: u64,
    /// Time for which the guest stood still.
    pub(super) pause: Duration,
}

/// A machine whose written pages are tracked. The end of the agent's connection ends the tracking.
pub(super) struct Capture {
    vm: Arc<Vm>,
    qemu: Qemu,
    pages: Arc<Tracked>,
    states: StateReader,
    disks: Vec<Arc<Disk>>,
    nics: Vec<Arc<ServedNic>>,
    /// The last checkpoint that the backup has.
    whole: Checkpoint,
}

/// The memory and its two trackers: of QEMU's own writes, and of those of this node's devices.
#[derive(Debug)]
struct Tracked {
    memory: GuestMemory,
    scanner: Scanner,
    written: Arc<WrittenPages>,
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

    /// Copies pages as records.
    fn copy(&self, pages: &Pages, out: &mut Vec<u8>) -> Result<(), String> {
        let mut data = vec![0; (MOST_PAGES * PAGE_BYTES) as usize];
        out.reserve((pages.count() * PAGE_BYTES) as usize);
        for run in pages.runs() {
            for part in parts(*run) {
                let data = &mut data[..(part.pages * PAGE_BYTES) as usize];
                let read = self.memory.read(part, data);
                read.map_err(|error| format!("its memory cannot be read: {error}"))?;
                records::put_pages(out, part, data);
            }
        }
        Ok(())
    }
}

/// Divides a run into parts of at most [`MOST_PAGES`].
fn parts(run: PageRun) -> impl Iterator<Item = PageRun> {
    (0..run.pages)
        .step_by(MOST_PAGES as usize)
        .map(move |at| PageRun {
            first: run.first + at,
            pages: MOST_PAGES.min(run.pages - at),
        })
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
    let cards = cards::own(&machine);
    if !cards.is_empty() {
        blockers.push(format!(
            "QEMU itself serves its network card ({}), whose packets cannot be held back: run it with --nic",
            cards.join(", ")
        ));
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
        let (disks, nics) = {
            let inner = vm.lock();
            let names = inner.entry.machine.disks.iter();
            let disks = names.filter_map(|name| vms.disks.find(name)).collect();
            (disks, inner.nics.clone())
        };
        let capture = Self {
            vm: Arc::clone(vm),
            qemu,
            pages,
            states,
            disks,
            nics,
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
            let mut out = Vec::new();
            pages.copy(&part, &mut out).map(|()| out)
        });
        copied.await.map_err(|error| error.message)?
    }

    /// Holds the guest's packets back from now on.
    pub(super) async fn hold_packets(&self) -> Result<(), String> {
        for nic in &self.nics {
            let held = nic.ask(|device, reply| device.hold_back(reply)).await;
            held.ok_or("a NIC of it has ended")?;
        }
        Ok(())
    }

    /// Lets the packets of all epochs up to this one leave, whose checkpoint the backup has.
    pub(super) fn release(&mut self, through: Checkpoint) {
        self.whole = through;
        for nic in &self.nics {
            nic.device.release_checkpoint(through.0);
        }
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
        let (qmp, states) = (&self.qemu.qmp, &mut self.states);
        let (pages, disks, nics) = (&self.pages, &self.disks, &self.nics);
        let numbers = (number, self.whole);
        let copied = async {
            let stopped = qmp.execute("stop", json!({})).await;
            stopped.map_err(|error| error.to_string())?;
            failpoint::reach(String::from("checkpoint::stopped")).await;
            let pages = Arc::clone(pages);
            let copied = blocking(move || {
                let written = pages.scan()?;
                let mut records = Vec::new();
                pages.copy(&written, &mut records)?;
                Ok::<_, String>((records, written.count()))
            });
            let (copied, ended) = tokio::join!(copied, end_epoch(disks, nics, numbers));
            ended?;
            copied.map_err(|error| error.message)?
        };
        // QEMU takes the second command when it has done the first: the state is saved while the pages are copied.
        let saved = async { states.save(qmp).await.map_err(|error| error.to_string()) };
        let (copied, saved) = tokio::join!(copied, saved);
        let goes_on = qmp.execute("cont", json!({})).await;
        let pause = begun.elapsed();
        let ((mut records, pages), state) = (copied?, saved?);
        goes_on.map_err(|error| error.to_string())?;
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
        memory,
        _agent: agent,
    })
}
