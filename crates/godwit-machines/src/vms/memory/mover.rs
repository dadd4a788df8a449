//! Moves a VM's memory between a memory pool and this node's own memory while the guest runs.
//!
//! The memory moves in batches: the VM's disks stand still with nothing in flight, the agent inside QEMU moves some
//! chunks, this node's own mappings follow, the disks go on, and the old pages are freed. So a device's request never
//! has pages that have moved: a read in flight would end in the old pages, and report success. A move that ends
//! anywhere leaves a valid state: the start of the memory is local, the rest is in the pool.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use godwit_block::engine::{BlockDevice, EngineHandle};
use godwit_memory::mover::Run;
use godwit_memory::mover::agent::{Agent, AgentError, Side};
use godwit_memory::mover::plan::{self, Chunk, Plan};
use godwit_memory::pool::Place;
use godwit_vhost::memory::relocated::{Part, Relocation};
use godwit_vhost::protocol::device::Device;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError};

use crate::vms::Vms;
use crate::vms::memory::relocated::{self, Found, InPool};
use crate::vms::memory::{blockers, pooled, pools};
use crate::vms::vm::{Vm, VmActivity};
use godwit_api::{ErrorBody, ErrorCode, MemoryPlace, MoveMemory};
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_qemu::inspect;

/// Default for the longest hold of a page.
const DEFAULT_HOLD: Duration = Duration::from_millis(2);
/// Longest wait for the last requests of a disk before a standstill.
const DRAIN: Duration = Duration::from_secs(5);
/// Time between two checks of a resting move for cancellation.
const LISTEN: Duration = Duration::from_millis(100);

/// A move of memory, under way or ended.
#[derive(Clone, Debug)]
pub struct MovingMemory {
    /// The target of the move.
    pub to: MemoryPlace,
    /// True if the move has ended.
    pub ended: bool,
    /// Bytes to move at the start.
    pub bytes_total: u64,
    /// Bytes moved so far.
    pub(crate) bytes_moved: u64,
    /// Longest hold of a page.
    pub(crate) longest_hold: Duration,
    /// Longest standstill of a disk.
    pub(crate) longest_still: Duration,
    /// Duration of the move so far.
    pub took: Duration,
    /// The reason for an early end.
    pub problem: Option<String>,
    /// The signal to end the move.
    pub cancelled: Arc<AtomicBool>,
}

impl MovingMemory {
    /// Returns the time left, as far as known.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        let left = self.bytes_total.saturating_sub(self.bytes_moved);
        let known = plan::time_left(self.took, self.bytes_moved, left);
        known.filter(|_| !self.ended)
    }
}

/// Starts to move a VM's memory. The move goes on in the background; the VM shows its progress.
///
/// # Errors
/// The VM has another activity, or there is a blocker.
pub async fn start(vms: &Arc<Vms>, name: &str, request: MoveMemory) -> Result<(), ErrorBody> {
    let vm = vms.get(name)?;
    let guard = vm.begin(VmActivity::MovingMemory, |inner| vm.is_here(inner))?;
    let refused = |code, why: String| {
        ErrorBody::new(
            code,
            format!("the memory of VM {name} does not move: {why}"),
        )
    };
    let memory = vm.lock().entry.memory.clone();
    let Some(memory) = memory else {
        return Err(
            refused(ErrorCode::Conflict, String::from("it is in no memory pool"))
                .hint("start the machine with 'godwit vm run --memory-pool'"),
        );
    };
    let qemu = vm.qemu()?;
    let pid = qemu.process.pid;
    let machine = vm.lock().entry.machine.clone();
    let mut blockers = blockers::of(&vms.context.config, &memory.pool, &machine);
    let direct = inspect::direct_drives(&qemu.qmp).await.map_err(|error| {
        refused(
            ErrorCode::Conflict,
            format!("QEMU does not tell what drives it has: {error}"),
        )
    })?;
    blockers.extend(direct.into_iter().map(|drive| {
        format!("QEMU's own drive {drive} bypasses the page cache, and pages of the memory must not move under it: open it with cache=writeback")
    }));
    let agent = vm.places.agent();
    let agent = blocking(move || Agent::connect(&agent).map(drop)).await?;
    blockers.extend(agent.err().map(|error| error.to_string()));
    if !blockers.is_empty() {
        return Err(refused(ErrorCode::Conflict, blockers.join("; "))
            .hint("nothing was moved; put this right and try again"));
    }
    let (pool, segment) = pooled::segment(vms, name, &memory)?;
    if request.to == MemoryPlace::Pool {
        segment
            .take_back(&pool)
            .map_err(|error| pools::refused(&vms.context.config.name, &memory.pool, &error))?;
    }
    let place = segment.place().clone();
    let of = Of {
        vms: Arc::clone(vms),
        vm: Arc::clone(&vm),
        socket: vm.places.agent(),
        pid,
        place,
    };
    let to = request.to;
    let prepared = blocking(move || Move::prepare(of, to).map_err(|error| error.to_string()));
    let mut work = match prepared.await? {
        Ok(work) => work,
        Err(why) => {
            relocated::note(vms, &vm, pid);
            return Err(refused(ErrorCode::Conflict, why));
        }
    };
    let cancelled = Arc::new(AtomicBool::new(false));
    let hold = request.hold_us.map_or(DEFAULT_HOLD, Duration::from_micros);
    vm.lock().moving = Some(MovingMemory {
        to,
        ended: false,
        bytes_total: work.all(),
        bytes_moved: 0,
        longest_hold: Duration::ZERO,
        longest_still: Duration::ZERO,
        took: Duration::ZERO,
        problem: None,
        cancelled: Arc::clone(&cancelled),
    });
    let vms = Arc::clone(vms);
    godwit_context::spawn(async move {
        let closing = Arc::clone(&vms);
        let moved = blocking(move || {
            let stop = || cancelled.load(Ordering::Relaxed) || closing.context.is_closing();
            let moved = work.run(hold, request.max_bandwidth, stop);
            if !matches!(moved, Err(Trouble::Lost(_))) {
                let away = work.of.vm.lock().local_bytes;
                relocated::give_up_room(&work.of.vms, &work.of.vm, away);
            }
            moved.map_err(|trouble| match trouble {
                Trouble::Ended(why) => (why, None),
                Trouble::Lost(why) => work.look_again(&why, stop),
            })
        });
        let (result, lost) = match moved.await {
            Ok(Ok(())) => (Ok(()), None),
            Ok(Err((why, lost))) => (Err(why), lost),
            Err(error) => (Err(error.message), None),
        };
        {
            let mut inner = vm.lock();
            if let Some(moving) = &mut inner.moving {
                moving.ended = true;
                moving.problem = result.clone().err();
            }
        }
        match result {
            Ok(()) => tracing::info!(vm = vm.name, to = to.name(), "the VM's memory has moved"),
            Err(error) => tracing::warn!(vm = vm.name, error, "the VM's memory did not move"),
        }
        // A VM whose QEMU does not answer can be stopped.
        drop(guard);
        let Some(of) = lost else { return };
        match blocking(move || of.look(|| vms.context.is_closing())).await {
            Ok(None | Some(Ok(()))) => {}
            Ok(Some(Err(why))) => tracing::warn!(vm = vm.name, why, "its disks stand still"),
            Err(error) => tracing::warn!(vm = vm.name, %error, "its disks stand still"),
        }
    });
    Ok(())
}

/// Ends a move of memory at its present state.
///
/// # Errors
/// No move is under way.
pub fn cancel(vms: &Arc<Vms>, name: &str) -> Result<(), ErrorBody> {
    let vm = vms.get(name)?;
    let inner = vm.lock();
    match inner.moving.as_ref().filter(|moving| !moving.ended) {
        Some(moving) => {
            moving.cancelled.store(true, Ordering::Relaxed);
            Ok(())
        }
        None => {
            let text = format!("the memory of VM {name} is not being moved");
            Err(ErrorBody::new(ErrorCode::Conflict, text))
        }
    }
}

/// The VM whose memory moves.
struct Of {
    vms: Arc<Vms>,
    vm: Arc<Vm>,
    /// The agent's socket.
    socket: PathBuf,
    pid: u32,
    /// The place of the memory in the pool.
    place: Place,
}

impl Of {
    /// Returns the engines of the disks by now. A later engine maps no memory while a relocation is held.
    fn devices(&self, _: &Relocation) -> Vec<EngineHandle> {
        let disks = self.vm.lock().entry.machine.disks.clone();
        let engines = disks
            .iter()
            .filter_map(|disk| self.vms.disks.find(disk)?.engine());
        engines.collect()
    }

    /// Waits until QEMU's mappings show the place of lost memory: the agent has then done its last request, and has no
    /// other caller. The disks go on. Returns `None` if stopped before.
    ///
    /// # Errors
    /// A sentence: the place cannot be found out.
    fn look(&self, stop: impl Fn() -> bool) -> Option<Result<(), String>> {
        let agent = loop {
            match Agent::connect(&self.socket) {
                Err(AgentError::Silent(_)) if stop() => return None,
                Err(AgentError::Silent(_)) => std::thread::sleep(LISTEN),
                connected => break connected,
            }
        };
        let found = agent.map_err(|error| error.to_string()).and_then(|_agent| {
            let found = relocated::find(self.pid, &self.place);
            let found = found.and_then(|found| self.follow(&found));
            found.map_err(|error| error.to_string())
        });
        Some(found)
    }

    /// Resumes the disks that stand still because the place of their memory was unknown.
    fn follow(&self, found: &Found) -> io::Result<()> {
        let mut relocation = Relocation::begin();
        let home = found.home.of_devices()?;
        match relocation.is_lost(home) {
            Some(true) => {}
            None if found.away.is_some() => {
                let why = "this node looks for it since its start; try again";
                return Err(io::Error::other(why));
            }
            // Another move may have found the memory first.
            Some(false) | None => return Ok(()),
        }
        let devices = self.devices(&relocation);
        let away = found.layout.away;
        relocation.found(home, &found.home.file, away)?;
        drop(relocation);
        go_on(&devices);
        relocated::give_back(self.pid, found, self.place.extent.bytes);
        self.vm.lock().local_bytes = away;
        relocated::give_up_room(&self.vms, &self.vm, away);
        Ok(())
    }
}

/// A prepared move.
struct Move {
    of: Of,
    agent: Agent,
    home: InPool,
    away: File,
    to: MemoryPlace,
    /// Bytes at the start of the memory that are local when the move begins.
    local: u64,
    bytes: u64,
}

/// The reason for an early end of a move or of a batch.
enum Trouble {
    /// The disks go on.
    Ended(String),
    /// The place of a chunk is unknown, and the disks stand still.
    Lost(String),
}

impl Move {
    fn prepare(of: Of, to: MemoryPlace) -> Result<Self, AgentError> {
        let failed = |error: io::Error| AgentError::Silent(error);
        let mut agent = Agent::connect(&of.socket)?;
        let bytes = of.place.extent.bytes;
        let found = relocated::find(of.pid, &of.place).map_err(AgentError::Lost)?;
        // An earlier move may have lost the memory.
        of.follow(&found).map_err(AgentError::Lost)?;
        let Found { home, away, layout } = found;
        let is_new = away.is_none();
        let away = match away {
            Some(away) => away,
            None => relocated::make(bytes).map_err(failed)?,
        };
        let (from, target) = match to {
            MemoryPlace::Local => (home.side(), Side::whole(&away)),
            MemoryPlace::Pool => (Side::whole(&away), home.side()),
        };
        agent.begin(layout.address, bytes, from, target)?;
        if is_new {
            let id = home.of_devices().map_err(failed)?;
            let other = away.try_clone().map_err(failed)?;
            Relocation::begin().set(id, other);
        }
        Ok(Self {
            of,
            agent,
            home,
            away,
            to,
            local: layout.away,
            bytes,
        })
    }

    /// Returns the bytes to move.
    const fn all(&self) -> u64 {
        match self.to {
            MemoryPlace::Local => self.bytes - self.local,
            MemoryPlace::Pool => self.local,
        }
    }

    /// Returns the chunk of the memory for a chunk of the plan. The local part is always the start of the memory, so a
    /// move back to the pool takes chunks from the end of the local part.
    const fn place(&self, chunk: Chunk) -> Chunk {
        match self.to {
            MemoryPlace::Local => chunk,
            MemoryPlace::Pool => Chunk {
                offset: self.local - chunk.offset - chunk.bytes,
                bytes: chunk.bytes,
            },
        }
    }

    fn run(
        &mut self,
        hold: Duration,
        max_bandwidth: Option<u64>,
        stop: impl Fn() -> bool,
    ) -> Result<(), Trouble> {
        let mut plan = match self.to {
            MemoryPlace::Local => Plan::new(self.bytes, self.local, hold),
            MemoryPlace::Pool => Plan::new(self.local, 0, hold),
        };
        let (begun, first) = (Instant::now(), plan.bytes_moved());
        let mut longest_still = Duration::ZERO;
        while plan.next().is_some() {
            if stop() {
                let why = "it was cancelled; what has moved stays where it is";
                return Err(Trouble::Ended(String::from(why)));
            }
            let (began, before) = (Instant::now(), plan.bytes_moved());
            let moved = self.batch(&mut plan);
            let went_on = Instant::now();
            let still = went_on - began;
            longest_still = longest_still.max(still);
            let now = plan.bytes_moved();
            {
                let mut inner = self.of.vm.lock();
                inner.local_bytes = match self.to {
                    MemoryPlace::Local => now,
                    MemoryPlace::Pool => self.local - now,
                };
                if let Some(moving) = &mut inner.moving {
                    moving.bytes_moved = now - first;
                    moving.longest_hold = plan.longest_hold();
                    moving.longest_still = longest_still;
                    moving.took = begun.elapsed();
                }
            }
            if let Err(Trouble::Lost(why)) = moved {
                return Err(Trouble::Lost(why));
            }
            failpoint::reach_blocking("vm::moving-memory");
            // Also done if the rest of the batch did not move.
            self.give_back(before, now);
            moved?;
            // A slow move may rest for long, and can be cancelled all the same.
            let until = went_on + plan::rest(still, now - before, max_bandwidth);
            while !stop()
                && let Some(left) = until.checked_duration_since(Instant::now())
                && !left.is_zero()
            {
                std::thread::sleep(left.min(LISTEN));
            }
        }
        let ended = self.agent.end();
        ended.map_err(|error| Trouble::Ended(error.to_string()))
    }

    /// Moves some chunks while no device touches the memory.
    fn batch(&mut self, plan: &mut Plan) -> Result<(), Trouble> {
        let mut relocation = Relocation::begin();
        let devices = self.of.devices(&relocation);
        if let Err(why) = still(&devices) {
            go_on(&devices);
            return Err(Trouble::Ended(why));
        }
        let before = plan.bytes_moved();
        let next = plan.next().map(|next| Run {
            all: self.place(next),
            chunk_bytes: plan.chunk_bytes(),
            hold: plan.hold(),
            downwards: self.to == MemoryPlace::Pool,
            ahead_bytes: plan.ahead_bytes(),
        });
        let mut failed = None;
        match next.map(|run| self.agent.move_run(run)).transpose() {
            Ok(moved) => {
                if let Some(moved) = moved {
                    plan.moved(moved.bytes, moved.chunks, moved.held, moved.longest_hold);
                    failed = moved.refused.map(AgentError::Refused);
                }
            }
            Err(error) => failed = Some(error),
        }
        let bytes = plan.bytes_moved() - before;
        let follow = || {
            let place = self.place(Chunk {
                offset: before,
                bytes,
            });
            let part = Part {
                offset: place.offset,
                bytes,
            };
            let is_away = self.to == MemoryPlace::Local;
            let home = self.home.of_devices()?;
            relocation.moved(home, &self.home.file, part, is_away)
        };
        let followed = (bytes > 0).then(follow).transpose();
        let lost = match (&failed, followed) {
            (Some(error @ AgentError::Silent(_)), _) => Some(error.to_string()),
            (_, Err(error)) => Some(format!("its disks cannot follow its memory: {error}")),
            _ => None,
        };
        if let Some(why) = lost {
            let lost = self.home.of_devices().map(|home| relocation.lose(home));
            return Err(Trouble::Lost(match lost {
                Ok(()) => why,
                Err(other) => format!("{why}; {other}"),
            }));
        }
        drop(relocation);
        go_on(&devices);
        failed.map_or(Ok(()), |error| Err(Trouble::Ended(error.to_string())))
    }

    /// Finds lost memory in QEMU's mappings, which alone show its place, once the agent listens again. Then the disks
    /// go on. Returns the end in words, and the VM whose memory is still lost if stopped before.
    fn look_again(self, why: &str, stop: impl Fn() -> bool) -> (String, Option<Box<Of>>) {
        tracing::warn!(vm = self.of.vm.name, why, "looking for the VM's memory");
        // The agent serves one connection at a time, and finishes its request first.
        self.agent.hang_up();
        match self.of.look(stop) {
            Some(Ok(())) => (format!("{why}; what has moved stays where it is"), None),
            Some(Err(error)) => {
                let why = format!(
                    "{why}; its disks stand still, for its memory is not found: {error}; stop the VM"
                );
                (why, None)
            }
            None => {
                let why = format!(
                    "{why}; its disks stand still until its QEMU answers; wait for it, or stop the VM with --force"
                );
                (why, Some(Box::new(self.of)))
            }
        }
    }

    /// Frees the pages that were left between two points of the plan.
    fn give_back(&self, before: u64, now: u64) {
        let Chunk { offset, bytes } = self.place(Chunk {
            offset: before,
            bytes: now - before,
        });
        match self.to {
            MemoryPlace::Local => {
                self.home.free(offset, bytes);
                relocated::give_up_room(&self.of.vms, &self.of.vm, now);
            }
            MemoryPlace::Pool => relocated::free(&self.away, offset, bytes),
        }
    }
}

/// Makes devices stand still, with nothing in flight. A device without a VM stands still already.
fn still(devices: &[EngineHandle]) -> Result<(), String> {
    let answers: Vec<_> = devices
        .iter()
        .map(|engine| {
            let (reply, answer) = mpsc::channel();
            let reply = Box::new(move |result| {
                let _ = reply.send(result);
            });
            BlockDevice::new(engine.clone()).front_end(FrontEndCommand::Still, reply);
            (engine.disk(), answer)
        })
        .collect();
    for (disk, answer) in answers {
        match answer.recv_timeout(DRAIN) {
            Ok(Ok(_) | Err(FrontEndError::Left)) => {}
            _ => return Err(format!("the requests of disk {disk} do not end")),
        }
    }
    Ok(())
}

fn go_on(devices: &[EngineHandle]) {
    for engine in devices {
        BlockDevice::new(engine.clone()).front_end(FrontEndCommand::GoOn, Box::new(|_| {}));
    }
}
