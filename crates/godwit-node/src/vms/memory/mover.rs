//! Moves a VM's memory between its memory pool and this node's own memory while the guest runs.
//!
//! In batches: the VM's disks stand still with nothing in flight, the agent inside QEMU moves some chunks, this
//! node's own mappings follow, the disks go on, and what the memory left is given back. So no request of a device ever
//! has pages that have moved (a read in flight would end in the old ones, and say that it succeeded). A move that ends
//! anywhere leaves a valid state: the start of the memory is local, the rest is in the pool.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use godwit_block::engine::{BlockDevice, EngineHandle};
use godwit_memory::mover::agent::{Agent, AgentError};
use godwit_memory::mover::plan::{self, Chunk, Plan};
use godwit_vhost::memory::relocated::{FileId, Part, Relocation};
use godwit_vhost::protocol::device::Device;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError};
use rustix::fs::{FallocateFlags, MemfdFlags};

use crate::failpoint;
use crate::node::{Node, blocking};
use crate::vms::memory::pooled;
use crate::vms::memory::relocated::{self, Found, LOCAL};
use crate::vms::vm::{Vm, VmActivity};
use godwit_api::{ErrorBody, ErrorCode, MemoryPlace, MoveMemory};

/// How long a page may be held when nothing else is asked for.
const DEFAULT_HOLD: Duration = Duration::from_millis(2);
/// How long the requests of a disk that stands still may take.
const DRAIN: Duration = Duration::from_secs(5);

/// A move of memory, under way or ended.
#[derive(Clone, Debug)]
pub(crate) struct MovingMemory {
    /// Where the memory goes.
    pub(crate) to: MemoryPlace,
    /// Whether it has ended.
    pub(crate) ended: bool,
    /// Bytes that have moved.
    pub(crate) bytes_moved: u64,
    /// The longest time for which a page was held.
    pub(crate) longest_hold: Duration,
    /// The longest time for which a disk stood still.
    pub(crate) longest_still: Duration,
    /// Seconds since it began, or that it took.
    pub(crate) took: Duration,
    /// Why it ended early.
    pub(crate) problem: Option<String>,
    /// Tells it to end.
    pub(crate) cancelled: Arc<AtomicBool>,
}

/// What stands in the way of moving a VM's memory at all, a sentence each.
pub(crate) fn blockers(words: &[String]) -> Vec<String> {
    let foreign = |word: &&String| {
        word.contains("vhost-user") && !word.starts_with("vhost-user-blk-pci,chardev=godwit-disk")
    };
    let mapped = |word: &&String| word.contains("vfio-") || word.contains("vhost=on");
    let name = |word: &String| word.split(',').next().unwrap_or_default().to_owned();
    let foreign = words.iter().filter(foreign).map(|word| {
        format!(
            "device {} is served by a process that maps the memory itself and cannot follow it: remove the \
             device, or leave the memory in its pool with --stay-in-pool",
            name(word)
        )
    });
    let mapped = words.iter().filter(mapped).map(|word| {
        format!(
            "device {} uses pages of the memory directly and cannot follow it: remove the device, or leave the \
             memory in its pool with --stay-in-pool",
            name(word)
        )
    });
    foreign.chain(mapped).collect()
}

/// Starts to move a VM's memory. It goes on by itself; see the VM for how far it is.
///
/// # Errors
/// Something else is under way, or something stands in the way.
pub(crate) async fn start(
    node: &Arc<Node>,
    name: &str,
    request: MoveMemory,
) -> Result<(), ErrorBody> {
    let vm = node.vms.get(name)?;
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
    let pid = vm.qemu()?.process.pid;
    let blockers = blockers(&vm.lock().entry.machine.plain_words());
    if !blockers.is_empty() {
        return Err(refused(ErrorCode::Conflict, blockers.join("; ")));
    }
    let file = pooled::file_of(node, name, &memory)?;
    let socket = vm.places.agent();
    let disks = vm.lock().entry.machine.disks.clone();
    let engines = disks
        .iter()
        .filter_map(|disk| node.disks.find(disk)?.engine());
    let devices: Vec<EngineHandle> = engines.collect();
    let bytes = memory.bytes;
    let to = request.to;
    let prepared = blocking(move || -> Result<Move, String> {
        let agent = Agent::connect(&socket).map_err(|error| error.to_string())?;
        let found = relocated::find(pid, &file, bytes).map_err(|error| error.to_string())?;
        Move::prepare(agent, found, bytes, to, devices).map_err(|error| error.to_string())
    });
    let mut work = prepared
        .await?
        .map_err(|why| refused(ErrorCode::Conflict, why))?;
    let cancelled = Arc::new(AtomicBool::new(false));
    let hold = request.hold_us.map_or(DEFAULT_HOLD, Duration::from_micros);
    vm.lock().moving = Some(MovingMemory {
        to,
        ended: false,
        bytes_moved: 0,
        longest_hold: Duration::ZERO,
        longest_still: Duration::ZERO,
        took: Duration::ZERO,
        problem: None,
        cancelled: Arc::clone(&cancelled),
    });
    let node = Arc::clone(node);
    tokio::spawn(async move {
        let shared = (Arc::clone(&node), Arc::clone(&vm));
        let moved = blocking(move || {
            let stop = || cancelled.load(Ordering::Relaxed) || shared.0.is_closing();
            work.run(hold, request.max_bandwidth, stop, &shared.1)
        });
        let result = moved.await.map_err(|error| error.message).flatten();
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
        drop(guard);
    });
    Ok(())
}

/// Ends a move of memory where it is.
///
/// # Errors
/// None is under way.
pub(crate) fn cancel(node: &Arc<Node>, name: &str) -> Result<(), ErrorBody> {
    let vm = node.vms.get(name)?;
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

/// A move, ready to go.
struct Move {
    agent: Agent,
    home: File,
    away: File,
    to: MemoryPlace,
    /// Bytes at the start of the memory that are local when it begins.
    local: u64,
    bytes: u64,
    devices: Vec<EngineHandle>,
}

impl Move {
    fn prepare(
        mut agent: Agent,
        found: Found,
        bytes: u64,
        to: MemoryPlace,
        devices: Vec<EngineHandle>,
    ) -> Result<Self, AgentError> {
        let Found { home, away, layout } = found;
        let failed = |error: io::Error| AgentError::Silent(error);
        let is_new = away.is_none();
        let away = match away {
            Some(away) => away,
            None => {
                let made = rustix::fs::memfd_create(LOCAL, MemfdFlags::CLOEXEC);
                let file = File::from(made.map_err(io::Error::from).map_err(failed)?);
                file.set_len(bytes).map_err(failed)?;
                file
            }
        };
        let (from, target) = match to {
            MemoryPlace::Local => (&home, &away),
            MemoryPlace::Pool => (&away, &home),
        };
        agent.begin(layout.address, bytes, from, target)?;
        if is_new {
            let id = FileId::of(&home).map_err(failed)?;
            let other = away.try_clone().map_err(failed)?;
            Relocation::begin().set(id, other);
        }
        Ok(Self {
            agent,
            home,
            away,
            to,
            local: layout.away,
            bytes,
            devices,
        })
    }

    /// The chunk of the memory that a chunk of the plan is. What is local is always the start of the memory, so what
    /// goes back goes from its end.
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
        vm: &Vm,
    ) -> Result<(), String> {
        let mut plan = match self.to {
            MemoryPlace::Local => Plan::new(self.bytes, self.local, hold),
            MemoryPlace::Pool => Plan::new(self.local, 0, hold),
        };
        let (begun, first) = (Instant::now(), plan.bytes_moved());
        let mut longest_still = Duration::ZERO;
        while plan.next().is_some() {
            if stop() {
                return Err(String::from(
                    "it was cancelled; what has moved stays where it is",
                ));
            }
            let (began, before) = (Instant::now(), plan.bytes_moved());
            let moved = self.batch(&mut plan);
            let still = began.elapsed();
            longest_still = longest_still.max(still);
            let now = plan.bytes_moved();
            {
                let mut inner = vm.lock();
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
            moved?;
            failpoint::reach_blocking("vm::moving-memory");
            self.give_back(before, now);
            std::thread::sleep(plan::rest(still, now - before, max_bandwidth));
        }
        self.agent.end().map_err(|error| error.to_string())
    }

    /// Moves some chunks while no device touches the memory.
    fn batch(&mut self, plan: &mut Plan) -> Result<(), String> {
        let mut relocation = Relocation::begin();
        if let Err(why) = still(&self.devices) {
            go_on(&self.devices);
            return Err(why);
        }
        let before = plan.bytes_moved();
        let mut failed = None;
        while failed.is_none()
            && plan.bytes_moved() - before < plan::BATCH_BYTES
            && let Some(chunk) = plan.next()
        {
            match self.agent.move_chunk(self.place(chunk)) {
                Ok(moved) => plan.moved(moved.held),
                Err(error @ AgentError::Silent(_)) => {
                    // Nobody knows where that chunk is, so the disks must not go on.
                    return Err(format!("{error}; its disks stand still: stop the VM"));
                }
                Err(error) => failed = Some(error.to_string()),
            }
        }
        let bytes = plan.bytes_moved() - before;
        if bytes > 0 {
            let Chunk { offset, bytes } = self.place(Chunk {
                offset: before,
                bytes,
            });
            let is_away = self.to == MemoryPlace::Local;
            relocation
                .moved(&self.home, Part { offset, bytes }, is_away)
                .map_err(|error| {
                    format!(
                        "its disks cannot follow its memory and stand still: {error}; stop the VM"
                    )
                })?;
        }
        drop(relocation);
        go_on(&self.devices);
        failed.map_or(Ok(()), Err)
    }

    /// Frees what was left between two points of the plan. Freed and not overwritten: a request that ended late would
    /// still have the old pages.
    fn give_back(&self, before: u64, now: u64) {
        let Chunk { offset, bytes } = self.place(Chunk {
            offset: before,
            bytes: now - before,
        });
        let left = match self.to {
            MemoryPlace::Local => &self.home,
            MemoryPlace::Pool => &self.away,
        };
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(left, punch, offset, bytes) {
            tracing::warn!(%error, "memory that was left is not given back");
        }
    }
}

/// Lets devices stand still, with nothing in flight. One that no machine uses does.
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
