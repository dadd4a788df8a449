//! A process writes to given pages, and a scan from outside finds exactly these pages.

mod process;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use godwit_memory::dirty::pages::{PAGE_BYTES, Pages};
use godwit_memory::dirty::scan::{ScanError, Scanner};
use godwit_memory::mover::agent::{Agent, AgentError, Side};
use godwit_memory::mover::mappings;
use process::{Process, map};

const PAGES: u64 = 16 << 10;
const BYTES: u64 = PAGES * PAGE_BYTES;
/// Variable that turns the test program into the writing process.
const WRITES: &str = "GODWIT_DIRTY_TEST_WRITES";

/// Maps a file twice, and obeys lines of a command and page numbers: `write` and `read` the pages, `aside` writes
/// through the second mapping, `drop` removes the pages from the first mapping's page table, `unmap` unmaps them.
#[test]
fn the_process_that_writes() {
    let Some(path) = std::env::var_os(WRITES) else {
        return;
    };
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (memory, aside) = (map(&file, BYTES, 0), map(&file, BYTES, 0));
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut words = line.split_whitespace();
        let Some(what) = words.next() else { continue };
        for page in words {
            let place = page.parse::<usize>().unwrap() * PAGE_BYTES as usize;
            let at = if what == "aside" { aside } else { memory };
            // SAFETY: the tests name pages inside of both mappings, and only this thread uses them; pages that are not
            // mapped any more are not named again.
            unsafe {
                let page = at.add(place);
                let done = match what {
                    "drop" => Some(libc::madvise(
                        page.cast(),
                        PAGE_BYTES as usize,
                        libc::MADV_DONTNEED,
                    )),
                    "unmap" => Some(libc::munmap(page.cast(), PAGE_BYTES as usize)),
                    _ => None,
                };
                if let Some(done) = done {
                    assert_eq!(done, 0);
                    continue;
                }
                let byte = page.add(17);
                let value = byte.read_volatile();
                if what != "read" {
                    byte.write_volatile(value.wrapping_add(1));
                }
            }
        }
        println!("done");
        std::io::stdout().flush().unwrap();
    }
    std::process::exit(0);
}

struct Tracked {
    process: Process,
    agent: Agent,
    scanner: Scanner,
    address: u64,
    memory: PathBuf,
    _folder: tempfile::TempDir,
}

/// Returns a tracked process whose first half of memory exists, after the first scan.
fn tracked() -> Tracked {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let memory = folder.path().join("v.memory");
    let file = File::create_new(&memory).unwrap();
    file.set_len(BYTES).unwrap();
    let test = "the_process_that_writes";
    let mut process = Process::start(folder.path(), test, (WRITES, &memory));
    process.line("ready");
    let address = address(process.id(), &memory);
    let mut tracked = Tracked {
        agent: Agent::connect(&folder.path().join("agent.sock")).unwrap(),
        scanner: Scanner::of(process.id(), address, BYTES).unwrap(),
        process,
        address,
        memory,
        _folder: folder,
    };
    let half: Vec<u64> = (0..PAGES / 2).collect();
    tracked.tell("write", &half);
    tracked.agent.track(address, BYTES).unwrap();
    let all = tracked.scanner.scan().unwrap();
    assert!(
        half.iter().all(|page| all.contains(*page)),
        "all that is there"
    );
    tracked
}

/// Returns the address of the first mapping: the kernel places later ones below.
fn address(pid: u32, memory: &Path) -> u64 {
    let id = mappings::File::of(&File::open(memory).unwrap()).unwrap();
    let all = mappings::of_process(pid).unwrap();
    let ours = all.iter().filter(|mapping| {
        mappings::File {
            device: mapping.device,
            inode: mapping.inode,
        } == id
    });
    // Adjacent mappings of one file in the wrong order are not merged, so there are two.
    let found: Vec<u64> = ours.map(|mapping| mapping.address).collect();
    assert_eq!(found.len(), 2, "{found:x?}");
    found.into_iter().max().unwrap()
}

impl Tracked {
    fn tell(&mut self, what: &str, pages: &[u64]) {
        let numbers: Vec<String> = pages.iter().map(u64::to_string).collect();
        self.process.say(&format!("{what} {}", numbers.join(" ")));
        self.process.line("done");
    }

    fn written(&self) -> Vec<u64> {
        let pages: Pages = self.scanner.scan().unwrap();
        let all = pages
            .runs()
            .iter()
            .flat_map(|run| run.first..run.first + run.pages);
        all.collect()
    }
}

#[test]
fn exactly_the_pages_that_were_written_are_found() {
    let mut tracked = tracked();
    assert_eq!(tracked.written(), [0; 0], "nothing since the first look");
    let last = PAGES - 1;
    // Existing pages, neighbours, and pages that did not exist yet.
    for pages in [
        vec![0],
        vec![7, 8, 9, 4000],
        vec![PAGES / 2 - 1, PAGES / 2, 12_000, last],
        (0..PAGES).step_by(3).collect::<Vec<_>>(),
        vec![12_000],
    ] {
        tracked.tell("write", &pages);
        assert_eq!(tracked.written(), pages);
        assert_eq!(tracked.written(), [0; 0], "each is found once");
    }
    tracked.tell("read", &[1, 5000, last - 5]);
    assert_eq!(tracked.written(), [0; 0], "reads are no writes");
    tracked.process.end();
}

/// More runs than the kernel reports in one call.
#[test]
fn many_runs_are_all_found() {
    let mut tracked = tracked();
    let pages: Vec<u64> = (0..PAGES).step_by(2).collect();
    tracked.tell("write", &pages);
    assert_eq!(tracked.written(), pages);
    tracked.process.end();
}

/// Back ends need logs of their own for this reason.
#[test]
fn writes_through_another_mapping_are_not_seen() {
    let mut tracked = tracked();
    tracked.tell("aside", &[3, 4]);
    assert_eq!(tracked.written(), [0; 0]);
    tracked.process.end();
}

#[test]
fn memory_that_nobody_tracks_is_an_error_and_not_clean() {
    let mut tracked = tracked();
    tracked.agent.untrack().unwrap();
    tracked.tell("write", &[3]);
    let looked = tracked.scanner.scan();
    assert!(matches!(looked, Err(ScanError::NotTracked)), "{looked:?}");
    // Under the mover's write protection, which holds writers, the kernel would report no page.
    let from = File::options()
        .read(true)
        .write(true)
        .open(&tracked.memory)
        .unwrap();
    let to = File::from(rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    to.set_len(BYTES).unwrap();
    let address = tracked.address;
    tracked
        .agent
        .begin(address, BYTES, Side::whole(&from), Side::whole(&to))
        .unwrap();
    let looked = tracked.scanner.scan();
    assert!(matches!(looked, Err(ScanError::NotTracked)), "{looked:?}");
    let both = tracked.agent.track(address, BYTES);
    assert!(matches!(both, Err(AgentError::Refused(_))), "{both:?}");
    tracked.agent.end().unwrap();
    // Tracking and moving exclude each other in both orders.
    tracked.agent.track(address, BYTES).unwrap();
    let both = tracked
        .agent
        .begin(address, BYTES, Side::whole(&from), Side::whole(&to));
    assert!(matches!(both, Err(AgentError::Refused(_))), "{both:?}");
    tracked.tell("write", &[4]);
    assert!(tracked.written().contains(&4));
    tracked.process.end();
}

/// Like pages that the kernel writes to swap.
#[test]
fn pages_that_were_written_and_left_the_page_table_are_found() {
    let mut tracked = tracked();
    tracked.tell("write", &[3, 4]);
    tracked.tell("drop", &[3, 4, 5]);
    assert_eq!(tracked.written(), [3, 4]);
    tracked.process.end();
}

#[test]
fn memory_that_is_not_mapped_any_more_is_an_error_and_not_clean() {
    let mut tracked = tracked();
    tracked.tell("unmap", &[700]);
    let looked = tracked.scanner.scan();
    assert!(matches!(looked, Err(ScanError::NotTracked)), "{looked:?}");
    tracked.process.end();
    let looked = tracked.scanner.scan();
    assert!(matches!(looked, Err(ScanError::Process(_))), "{looked:?}");
}

#[test]
fn a_tracker_that_goes_leaves_no_page_protected() {
    let mut tracked = tracked();
    drop(tracked.agent);
    tracked.process.say("write 1 2 3");
    tracked.process.line("done");
    let looked = loop {
        // The agent notices the end of the connection a moment later.
        match tracked.scanner.scan() {
            Ok(_) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(looked, ScanError::NotTracked), "{looked:?}");
    tracked.process.end();
}

#[test]
fn a_process_that_is_not_there_is_named_as_such() {
    let absent = Scanner::of(u32::MAX / 2, 0, PAGE_BYTES);
    assert!(matches!(absent, Err(ScanError::Process(_))), "{absent:?}");
}
