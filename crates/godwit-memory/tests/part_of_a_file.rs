//! Memory in a part of a file whose other parts belong to other guests. The memory moves away and back without picking
//! up later content of the part, and without changing the other parts.

mod process;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use godwit_memory::mover::Run;
use godwit_memory::mover::agent::{Agent, Side};
use godwit_memory::mover::mappings::{self, Home, Layout};
use godwit_memory::mover::plan::Plan;
use process::{Process, map, rewrite};

const OFFSET: u64 = 6 << 20;
const BYTES: u64 = 16 << 20;
/// Variable that turns the test program into the process whose memory moves.
const WRITES: &str = "GODWIT_PART_TEST_WRITES";

/// Content of the other guests' parts before and after.
const OTHERS: u8 = 0xaa;

/// Maps its part and rewrites three quarters again and again; each pass expects the values of the previous pass.
#[test]
fn the_process_whose_part_moves() {
    let Some(path) = std::env::var_os(WRITES) else {
        return;
    };
    let file = File::options().read(true).write(true).open(path).unwrap();
    rewrite(map(&file, BYTES, OFFSET), BYTES);
}

fn layout(process: &Process, home: &File, away: &File) -> Layout {
    let all = mappings::of_process(process.id()).unwrap();
    let home = Home {
        file: mappings::File::of(home).unwrap(),
        offset: OFFSET,
        bytes: BYTES,
    };
    let away = mappings::File::of(away).unwrap();
    mappings::find(&all, home, Some(away)).unwrap()
}

fn move_all(agent: &mut Agent, address: u64, from: Side<'_>, to: Side<'_>, downwards: bool) {
    agent.begin(address, BYTES, from, to).unwrap();
    let mut plan = Plan::new(BYTES, 0, Duration::from_millis(1));
    while let Some(mut all) = plan.next() {
        if downwards {
            all.offset = BYTES - all.offset - all.bytes;
        }
        let run = Run {
            all,
            chunk_bytes: plan.chunk_bytes(),
            hold: plan.hold(),
            downwards,
            ahead_bytes: plan.ahead_bytes(),
        };
        let moved = agent.move_run(run).unwrap();
        assert!(moved.refused.is_none(), "{moved:?}");
        plan.moved(moved.bytes, moved.chunks, moved.held, moved.longest_hold);
    }
    agent.end().unwrap();
}

/// Reads all bytes of a part of a file.
fn read(file: &File, offset: u64, bytes: u64) -> Vec<u8> {
    let mut content = vec![0; bytes as usize];
    file.read_exact_at(&mut content, offset).unwrap();
    content
}

fn start(folder: &Path) -> (Process, File) {
    let path = folder.join("pool");
    let mut options = File::options();
    let options = options.read(true).write(true).create_new(true);
    let file = options.open(&path).unwrap();
    file.write_all_at(&vec![OTHERS; (OFFSET + BYTES + OFFSET) as usize], 0)
        .unwrap();
    file.write_all_at(&vec![0; BYTES as usize], OFFSET).unwrap();
    let process = Process::start(folder, "the_process_whose_part_moves", (WRITES, &path));
    (process, file)
}

#[test]
fn a_part_moves_away_and_back_and_the_rest_of_its_file_stays_as_it_is() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mut process, file) = start(folder.path());
    process.line("ready");
    let away =
        File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    away.set_len(BYTES).unwrap();
    let home = Side {
        file: &file,
        offset: OFFSET,
        keeps: true,
    };
    let address = layout(&process, &file, &away).address;
    let mut agent = Agent::connect(&folder.path().join("agent.sock")).unwrap();
    for _ in 0..2 {
        move_all(&mut agent, address, home, Side::whole(&away), false);
        assert_eq!(layout(&process, &file, &away).away, BYTES);
        // The kept room is normally not overwritten. Foreign content there must not reach the memory on its way back,
        // not even in never-written pages.
        file.write_all_at(&vec![0x55; BYTES as usize], OFFSET)
            .unwrap();
        let quarter = BYTES / 4 * 3;
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(away.as_fd(), punch, quarter, BYTES - quarter).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        move_all(&mut agent, address, Side::whole(&away), home, true);
        assert_eq!(layout(&process, &file, &away).away, 0);
        let rest = read(&file, OFFSET + quarter, BYTES - quarter);
        assert!(rest.iter().all(|byte| *byte == 0), "what it never wrote");
    }
    process.say("");
    let told = process.line("passes");
    process.end();
    assert!(told.trim().ends_with("lost 0"), "{told}");
    for offset in [0, OFFSET + BYTES] {
        let others = read(&file, offset, OFFSET);
        assert!(
            others.iter().all(|byte| *byte == OTHERS),
            "from {offset} on"
        );
    }
}
