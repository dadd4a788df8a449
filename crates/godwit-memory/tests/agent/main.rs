//! The agent in a process other than QEMU: memory under constant writes moves back and forth, and no write is lost.

#[path = "../process/mod.rs"]
mod process;
mod room;

use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_memory::mover::Run;
use godwit_memory::mover::agent::{Agent, AgentError, MovedRun, Side};
use godwit_memory::mover::mappings::{self, Home, Layout};
use godwit_memory::mover::plan::{Chunk, Plan};
use godwit_memory::pool::Pool;
use process::{Process, map, rewrite};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const BYTES: u64 = 64 << 20;
/// Variable that turns the test program into the process whose memory moves.
const WRITES: &str = "GODWIT_AGENT_TEST_WRITES";

/// Variable for a process that only maps its memory.
const WAITS: &str = "GODWIT_AGENT_TEST_WAITS";

/// Maps a file and rewrites the content again and again; each pass expects the values of the previous pass. A line of
/// input ends the process.
#[test]
fn the_process_whose_memory_moves() {
    let waits = std::env::var_os(WAITS);
    let Some(path) = waits.clone().or_else(|| std::env::var_os(WRITES)) else {
        return;
    };
    let file = File::options().read(true).write(true).open(path).unwrap();
    let memory = map(&file, BYTES, 0);
    if waits.is_some() {
        println!("\nmapped");
        std::io::stdin().lines().next();
        std::process::exit(0);
    }
    rewrite(memory, BYTES);
}

fn start(folder: &Path, memory: &Path) -> Process {
    let mut process = Process::start(folder, "the_process_whose_memory_moves", (WRITES, memory));
    process.line("ready");
    process
}

/// Starts a process that waits for a line, and does not touch its memory.
fn start_waiting(folder: &Path, memory: &Path) -> Process {
    let mut process = Process::start(folder, "the_process_whose_memory_moves", (WAITS, memory));
    process.line("mapped");
    process
}

/// Starts a process that writes to a memory file in a folder. Returns the process, its agent, the file, and the
/// mapping of the memory in the process.
fn started(folder: &Path) -> (Process, Agent, File, Layout) {
    let (path, home) = home(folder);
    let process = start(folder, &path);
    let layout = layout(&process, &home, None).unwrap();
    let agent = Agent::connect(&folder.join("agent.sock")).unwrap();
    (process, agent, home, layout)
}

/// Returns the layout of a memory in a process; the start may be in another file.
fn layout(process: &Process, home: &File, away: Option<&File>) -> Option<Layout> {
    let all = mappings::of_process(process.id()).unwrap();
    let file = |file| mappings::File::of(file).unwrap();
    let home = Home {
        file: file(home),
        offset: 0,
        bytes: BYTES,
    };
    mappings::find(&all, home, away.map(file))
}

/// Lets the process end, and expects that it lost no write.
fn lost_nothing(mut process: Process) {
    process.say("");
    let told = process.line("passes");
    process.end();
    println!("{told}");
    assert!(told.trim().ends_with("lost 0"), "{told}");
}

/// Begins to move all of a memory.
fn begin(agent: &mut Agent, address: u64, from: &File, to: &File) {
    let (from, to) = (Side::whole(from), Side::whole(to));
    agent.begin(address, BYTES, from, to).unwrap();
}

/// Moves a run, which must not be refused.
fn moves(agent: &mut Agent, run: Run) -> MovedRun {
    let moved = agent.move_run(run).unwrap();
    assert!(moved.refused.is_none(), "{moved:?}");
    moved
}

/// Expects a run to be refused.
fn is_refused(agent: &mut Agent, run: Run) {
    let moved = agent.move_run(run).unwrap();
    assert!(
        moved.refused.is_some() && moved.bytes == 0,
        "{run:?}: {moved:?}"
    );
}

/// Returns a file of `bytes` bytes in memory with this seal.
fn sealed(bytes: u64, seal: SealFlags) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("sealed", flags).unwrap());
    file.set_len(bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seal).unwrap();
    file
}

fn memfd() -> File {
    let made = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(made);
    file.set_len(BYTES).unwrap();
    file
}

fn home(folder: &Path) -> (std::path::PathBuf, File) {
    let path = folder.join("v.memory");
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    file.set_len(BYTES).unwrap();
    (path, file)
}

/// Moves the whole memory, the end first if `downwards`.
fn move_all(
    agent: &mut Agent,
    address: u64,
    (from, to): (&File, &File),
    hold: Duration,
    downwards: bool,
) -> Plan {
    begin(agent, address, from, to);
    let mut plan = Plan::new(BYTES, 0, hold);
    let (begun, mut chunks) = (Instant::now(), 0);
    while let Some(mut all) = plan.next() {
        if downwards {
            all.offset = BYTES - all.offset - all.bytes;
        }
        let run = Run {
            all,
            chunk_bytes: plan.chunk_bytes(),
            hold,
            downwards,
            ahead_bytes: plan.ahead_bytes(),
        };
        let moved = moves(agent, run);
        chunks += moved.chunks;
        plan.moved(moved.bytes, moved.chunks, moved.held, moved.longest_hold);
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(from.as_fd(), punch, all.offset, all.bytes).unwrap();
    }
    agent.end().unwrap();
    println!(
        "moved in {:?} as {chunks} chunks, held {:?} at most",
        begun.elapsed(),
        plan.longest_hold()
    );
    plan
}

/// Returns a run with fixed chunk settings.
const fn run(offset: u64, bytes: u64) -> Run {
    Run {
        all: Chunk { offset, bytes },
        chunk_bytes: 256 << 10,
        hold: Duration::from_millis(1),
        downwards: false,
        ahead_bytes: 0,
    }
}

fn shm() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

#[test]
fn memory_that_is_written_moves_away_and_back_without_a_lost_write() {
    let folder = shm();
    let (process, mut agent, home, before) = started(folder.path());
    // With so short a hold, each chunk becomes one piece.
    for hold in [1_000_000, 1000, 1].map(Duration::from_nanos) {
        assert_eq!(layout(&process, &home, None), Some(before));
        let away = memfd();
        move_all(&mut agent, before.address, (&home, &away), hold, false);
        assert_eq!(layout(&process, &home, None), None, "nothing stayed");
        let moved = layout(&process, &home, Some(&away)).unwrap();
        assert_eq!((moved.address, moved.away), (before.address, BYTES));
        std::thread::sleep(Duration::from_millis(100));
        move_all(&mut agent, before.address, (&away, &home), hold, true);
        std::thread::sleep(Duration::from_millis(100));
    }
    lost_nothing(process);
}

/// The limit holds for large requested chunks too.
#[test]
fn a_chunk_that_takes_too_long_is_cut() {
    let folder = shm();
    let (process, mut agent, home, layout) = started(folder.path());
    let away = memfd();
    begin(&mut agent, layout.address, &home, &away);
    let whole = Run {
        chunk_bytes: 8 << 20,
        hold: Duration::from_secs(10),
        ..run(0, 8 << 20)
    };
    let moved = agent.move_run(whole).unwrap();
    assert_eq!((moved.bytes, moved.chunks), (8 << 20, 1), "{moved:?}");
    let cut = Run {
        chunk_bytes: 8 << 20,
        hold: Duration::ZERO,
        ..run(8 << 20, 8 << 20)
    };
    let moved = agent.move_run(cut).unwrap();
    assert_eq!((moved.bytes, moved.chunks), (8 << 20, 128), "{moved:?}");
    assert!(moved.refused.is_none());
    lost_nothing(process);
}

#[test]
fn a_node_that_dies_in_the_middle_leaves_nobody_waiting() {
    let folder = shm();
    let (process, mut agent, home, before) = started(folder.path());
    let away = memfd();
    for chunk in 0..8 {
        begin(&mut agent, before.address, &home, &away);
        let bytes = 1 << 20;
        let offset = chunk * bytes;
        let moved = agent.move_run(run(offset, bytes)).unwrap();
        assert_eq!((moved.bytes, moved.refused.is_none()), (bytes, true));
        // Each time another node, which disconnects without an end of the move.
        drop(agent);
        agent = Agent::connect(&folder.path().join("agent.sock")).unwrap();
    }
    let half = layout(&process, &home, Some(&away)).unwrap();
    assert_eq!(half.away, 8 << 20);
    lost_nothing(process);
}

#[test]
fn chunks_that_make_no_sense_or_have_no_room_stay_where_they_are() {
    let folder = shm();
    let (process, mut agent, home, before) = started(folder.path());
    is_refused(&mut agent, run(0, 4096));
    // A target without room: too short, and sealed against growth.
    let short = sealed(0, SealFlags::GROW);
    begin(&mut agent, before.address, &home, &short);
    for (offset, bytes) in [
        (0, 1 << 20),
        (1, 4096),
        (0, 0),
        (0, 5),
        (BYTES, 4096),
        (u64::MAX - 4095, 4096),
    ] {
        is_refused(&mut agent, run(offset, bytes));
    }
    assert_eq!(layout(&process, &home, None), Some(before));
    std::thread::sleep(Duration::from_millis(50));
    lost_nothing(process);
}

/// Returns true if a process's page is held, so that a first write waits (`/proc/PID/pagemap`).
fn is_held(process: &Process, address: u64) -> bool {
    let pagemap = File::open(format!("/proc/{}/pagemap", process.id())).unwrap();
    let mut entry = [0; 8];
    pagemap
        .read_exact_at(&mut entry, address / 4096 * 8)
        .unwrap();
    u64::from_ne_bytes(entry) >> 57 & 1 == 1
}

/// The chunk's pages are held when the copy fails.
#[test]
fn a_chunk_that_cannot_be_copied_is_let_go() {
    let folder = shm();
    let (process, mut agent, home, before) = started(folder.path());
    // A target with room, and sealed against writes.
    let sealed = sealed(BYTES, SealFlags::FUTURE_WRITE);
    let address = before.address;
    begin(&mut agent, address, &home, &sealed);
    for downwards in [false, true] {
        let run = Run {
            downwards,
            ..run(0, 1 << 20)
        };
        is_refused(&mut agent, run);
        let pages = (address..address + (1 << 20)).step_by(4096);
        let held = pages.filter(|page| is_held(&process, *page)).count();
        assert_eq!(held, 0);
    }
    assert_eq!(layout(&process, &home, None), Some(before));
    // The agent is still there, and no thread waits.
    lost_nothing(process);
}

/// Returns a file's allocated bytes.
fn room(file: &File) -> u64 {
    file.metadata().unwrap().blocks() * 512
}

/// Counts the pages of a range in a process's page tables.
fn mapped(process: &Process, address: u64, pages: u64) -> usize {
    let pagemap = File::open(format!("/proc/{}/pagemap", process.id())).unwrap();
    let mut entries = vec![0; pages as usize * 8];
    pagemap
        .read_exact_at(&mut entries, address / 4096 * 8)
        .unwrap();
    let present = |entry: &&[u8]| entry[7] & 0x80 != 0;
    entries.chunks_exact(8).filter(present).count()
}

#[test]
fn page_tables_are_filled_with_what_is_there_and_nothing_more() {
    let folder = shm();
    let (path, home) = home(folder.path());
    let mut process = start_waiting(folder.path(), &path);
    let pages = BYTES / 4096;
    // Two thirds of the pages in the second half.
    let there: Vec<u64> = (pages / 2..pages).filter(|page| page % 3 > 0).collect();
    for page in &there {
        home.write_all_at(&[1], page * 4096).unwrap();
    }
    let before = room(&home);
    let address = layout(&process, &home, None).unwrap().address;
    assert_eq!(mapped(&process, address, pages), 0);
    let socket = folder.path().join("agent.sock");
    Agent::fill(&socket, address, BYTES).unwrap();
    assert_eq!(mapped(&process, address, pages), there.len());
    assert_eq!(room(&home), before, "holes are holes");
    for (address, bytes) in [(1, 4096), (0, 4096), (address, 5), (u64::MAX - 4095, 8192)] {
        let refused = Agent::fill(&socket, address, bytes);
        refused.expect_err("no memory of its");
    }
    process.say("");
    process.end();
}

#[test]
fn a_process_without_the_agent_is_told_from_one_that_has_it() {
    let folder = shm();
    let absent = Agent::connect(&folder.path().join("agent.sock"));
    assert!(matches!(absent, Err(AgentError::Absent)));
}

/// `Pool::lets_memory_move` reports the restriction before any move.
#[test]
fn memory_on_a_disk_s_file_system_does_not_move() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let pool = Pool::open(folder.path()).unwrap();
    let moves = pool.lets_memory_move().unwrap();
    let (process, mut agent, home, layout) = started(folder.path());
    let begun = agent.begin(
        layout.address,
        BYTES,
        Side::whole(&home),
        Side::whole(&memfd()),
    );
    assert_eq!(begun.is_ok(), moves, "{begun:?}");
    drop(agent);
    lost_nothing(process);
    let shm = shm();
    let pool = Pool::open(shm.path()).unwrap();
    assert!(pool.lets_memory_move().unwrap(), "tmpfs");
}

/// Files from a hostile peer are neither written out of bounds nor kept open.
#[test]
fn files_that_nobody_asked_for_are_closed() {
    let folder = shm();
    let (process, agent, ..) = started(folder.path());
    drop(agent);
    let open = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap();
        let names = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let ours = names.filter(|name| name.to_string_lossy().contains("memfd:test"));
        ours.count()
    };
    for count in 1..=6 {
        let files: Vec<File> = (0..count).map(|_| memfd()).collect();
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let peer = UnixStream::connect(folder.path().join("agent.sock")).unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(6))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let nonsense = [IoSlice::new(&[0; 64])];
        sendmsg(&peer, &nonsense, &mut control, SendFlags::NOSIGNAL).unwrap();
        // The agent hangs up on an invalid request.
        assert_eq!((&peer).read(&mut [0]).unwrap(), 0);
        assert_eq!(open(), 0, "of {count} files");
    }
    lost_nothing(process);
}
