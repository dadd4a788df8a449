use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::VhostUserBackendReqHandlerMut;
use vhost::vhost_user::message::{VhostUserSingleMemoryRegion, VhostUserVringAddrFlags};

use super::*;
use crate::memory::relocated::{Home, Part};
use crate::memory::{Segment, live};
use crate::protocol::device::FrontEndReply;

const PAGE: u64 = 4096;
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000;

/// A step that a device was told.
enum Told {
    Memory(Arc<GuestRam>),
    Still,
    Other,
}

#[derive(Clone)]
struct Fake(mpsc::Sender<Told>);

impl Device for Fake {
    fn name(&self) -> &str {
        "fake"
    }

    fn features(&self) -> u64 {
        0
    }

    fn configuration(&self, _: u32, _: u32) -> Option<Vec<u8>> {
        None
    }

    fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply) {
        let told = match command {
            FrontEndCommand::Memory { ram } => Told::Memory(ram),
            FrontEndCommand::Still => Told::Still,
            _ => Told::Other,
        };
        self.0.send(told).expect("is heard");
        reply(Ok(0));
    }
}

/// A handler with its device, and the front end's end of the connection.
struct Setup {
    handler: Handler<Fake>,
    told: mpsc::Receiver<Told>,
    _front_end: UnixStream,
}

impl Setup {
    fn new() -> Self {
        let (socket, front_end) = UnixStream::pair().expect("a pair");
        let (sender, told) = mpsc::channel();
        Self {
            handler: Handler::new(Fake(sender), socket),
            told,
            _front_end: front_end,
        }
    }

    fn share(&mut self, table: &[(VhostUserMemoryRegion, &File)]) -> Result<()> {
        let regions: Vec<_> = table.iter().map(|(region, _)| *region).collect();
        let files = table.iter().map(|(_, file)| again(file)).collect();
        let shared = self.handler.set_mem_table(&regions, files, Some(false));
        shared.map(|_| ())
    }

    fn add(&mut self, slot: &VhostUserMemoryRegion, file: &File) -> Result<()> {
        let slot = single(slot);
        let added = self.handler.add_mem_region(&slot, again(file), Some(false));
        added.map(|_| ())
    }

    fn remove(&mut self, slot: &VhostUserMemoryRegion) -> Result<()> {
        self.handler.remove_mem_region(&single(slot))
    }

    /// Returns the memory that the device was told, if any.
    fn memory(&self) -> Option<Arc<GuestRam>> {
        match self.told.try_recv() {
            Ok(Told::Memory(ram)) => Some(ram),
            Ok(_) => panic!("another step"),
            Err(_) => None,
        }
    }

    /// Starts a ring in the first page from this address of the front end.
    fn start_ring(&mut self, user: u64) {
        let handler = &mut self.handler;
        let flags = VhostUserVringAddrFlags::empty();
        handler.set_vring_num(0, 64).expect("a size");
        let (used, available) = (user + 2048, user + 1024);
        let placed = handler.set_vring_addr(0, flags, user, used, available, 0);
        placed.expect("a place");
        let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
        let kick = File::from(kick.expect("an eventfd"));
        handler.set_vring_kick(0, Some(kick)).expect("starts");
        assert!(matches!(self.told.try_recv(), Ok(Told::Other)));
    }
}

fn single(slot: &VhostUserMemoryRegion) -> VhostUserSingleMemoryRegion {
    VhostUserSingleMemoryRegion::new(
        slot.guest_phys_addr,
        slot.memory_size,
        slot.user_addr,
        slot.mmap_offset,
    )
}

fn file(pages: u64) -> File {
    let file = File::from(memfd_create(c"guest", MemfdFlags::CLOEXEC).expect("a file"));
    file.set_len(pages * PAGE).expect("a size");
    file
}

fn again(file: &File) -> File {
    file.try_clone().expect("another descriptor")
}

/// Returns a region with these pages of the guest, of the front end, and of a file.
fn region(first: u64, pages: u64, offset: u64) -> VhostUserMemoryRegion {
    let at = first * PAGE;
    VhostUserMemoryRegion::new(GUEST + at, pages * PAGE, USER + at, offset * PAGE)
}

fn places(ram: &GuestRam) -> Vec<(u64, u64)> {
    ram.regions().iter().map(|region| region.place()).collect()
}

/// Returns true if a byte written to this page of the guest is read there again.
fn is_memory(ram: &GuestRam, page: u64) -> bool {
    let segment = [Segment {
        address: GUEST + page * PAGE,
        length: 1,
    }];
    let mut byte = [0];
    ram.scatter(&[7], &segment) && ram.gather(&segment, &mut byte) && byte == [7]
}

#[test]
fn an_equal_table_keeps_its_mapping() {
    let mut setup = Setup::new();
    let (low, high) = (file(4), file(4));
    let table = [(region(0, 4, 0), &low), (region(8, 2, 1), &high)];
    setup.share(&table).expect("is shared");
    let ram = setup.memory().expect("memory");
    for _ in 0..3 {
        setup.share(&table).expect("is shared again");
        assert!(setup.memory().is_none(), "nothing has changed");
    }
    let kept = setup.handler.ram.as_ref().expect("memory");
    assert!(Arc::ptr_eq(kept, &ram));
    assert!(is_memory(&ram, 3) && is_memory(&ram, 9));
}

#[test]
fn a_table_that_differs_maps_what_differs() {
    let (low, high, other) = (file(4), file(4), file(4));
    let differing = [
        (region(8, 2, 1), &other),
        (region(8, 2, 2), &high),
        (region(8, 1, 1), &high),
        (region(12, 2, 1), &high),
        (
            VhostUserMemoryRegion::new(GUEST + 8 * PAGE, 2 * PAGE, USER, PAGE),
            &high,
        ),
    ];
    for differs in differing {
        let mut setup = Setup::new();
        let first = (region(0, 4, 0), &low);
        setup
            .share(&[first, (region(8, 2, 1), &high)])
            .expect("is shared");
        let before = setup.memory().expect("memory");
        setup.share(&[first, differs]).expect("is shared");
        let after = setup.memory().expect("other memory");
        assert_eq!(places(&before)[0], places(&after)[0]);
        assert!(!Arc::ptr_eq(&before.regions()[1], &after.regions()[1]));
        setup.share(&[first]).expect("is shared");
        let least = setup.memory().expect("less memory");
        assert_eq!(places(&least), places(&before)[..1]);
    }
}

#[test]
fn an_equal_table_of_a_file_that_shrank_is_refused() {
    let mut setup = Setup::new();
    let low = file(4);
    setup.share(&[(region(0, 4, 0), &low)]).expect("is shared");
    low.set_len(PAGE).expect("shrinks");
    assert!(setup.share(&[(region(0, 4, 0), &low)]).is_err());
    let problem = setup.handler.take_problem().expect("a reason");
    assert!(problem.to_string().contains("has 4096 bytes"), "{problem}");
}

#[test]
fn an_equal_table_of_relocated_memory_follows() {
    let mut setup = Setup::new();
    let (low, away) = (file(4), file(4));
    let table = [(region(0, 4, 0), &low)];
    setup.share(&table).expect("is shared");
    let ram = setup.memory().expect("memory");
    let part = |pages| Part {
        offset: 0,
        bytes: pages * PAGE,
    };
    let home = Home::of(&low, part(4)).expect("a file");
    let mut relocation = Relocation::begin();
    relocation.set(home, again(&away));
    relocation.moved(home, &low, part(2), true).expect("moves");
    drop(relocation);
    setup.share(&table).expect("is shared");
    let after = setup.memory().expect("other memory");
    assert!(is_memory(&after, 0));
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&away, &mut byte, 0).expect("reads");
    assert_eq!(byte, [7], "it was written where the memory is");
    Relocation::begin().lose(home);
    assert!(setup.share(&table).is_err(), "nobody knows where it is");
    Relocation::begin().forget(home);
    drop(ram);
}

#[test]
fn a_slot_that_makes_no_sense_changes_nothing() {
    let mut setup = Setup::new();
    let (low, high) = (file(4), file(4));
    setup.add(&region(0, 4, 0), &low).expect("a slot");
    let ram = setup.memory().expect("memory");
    let end = u64::MAX - PAGE + 1;
    let slot = VhostUserMemoryRegion::new;
    let (guest, user) = (GUEST + 8 * PAGE, USER + 8 * PAGE);
    let overlaps = "overlaps with another";
    let nonsense = "is empty, or ends past all addresses";
    for (slot, why) in [
        (slot(guest, 0, user, 0), nonsense),
        (slot(end, 2 * PAGE, user, 0), nonsense),
        (slot(guest, 2 * PAGE, end, 0), nonsense),
        (slot(guest, 2 * PAGE, user, end), nonsense),
        (slot(GUEST + PAGE, PAGE, user, 0), overlaps),
        (slot(GUEST - PAGE, 2 * PAGE, user, 0), overlaps),
        (slot(guest, PAGE, USER + 3 * PAGE, 0), overlaps),
        (slot(guest, 2 * PAGE, USER - PAGE, 0), overlaps),
        (slot(GUEST, 4 * PAGE, USER, 0), overlaps),
        (slot(guest, 5 * PAGE, user, 0), "has 16384 bytes"),
        (slot(guest, PAGE, user, 1), "cannot map"),
    ] {
        assert!(setup.add(&slot, &high).is_err(), "{why}");
        let problem = setup.handler.take_problem().expect("a reason");
        assert!(problem.to_string().contains(why), "{problem}");
    }
    let (socket, _end) = UnixStream::pair().expect("a pair");
    let fits = slot(guest, PAGE, user, 0);
    assert!(
        setup
            .add(&fits, &File::from(OwnedFd::from(socket)))
            .is_err(),
        "no file"
    );
    for (first, pages) in [(0, 3), (1, 4), (8, 4)] {
        assert!(setup.remove(&region(first, pages, 0)).is_err());
        let problem = setup.handler.take_problem().expect("a reason");
        assert!(problem.to_string().contains("not there"), "{problem}");
    }
    assert!(setup.memory().is_none(), "nothing has changed");
    let kept = setup.handler.ram.as_ref().expect("memory");
    assert!(Arc::ptr_eq(kept, &ram) && is_memory(&ram, 0));
}

#[test]
fn slots_have_a_number() {
    let mut setup = Setup::new();
    let low = file(1);
    let most = setup.handler.get_max_mem_slots().expect("a number");
    for slot in 0..most {
        setup.add(&region(2 * slot, 1, 0), &low).expect("a slot");
    }
    assert!(setup.add(&region(2 * most, 1, 0), &low).is_err());
    setup.remove(&region(2, 1, 0)).expect("is removed");
    setup.add(&region(2 * most, 1, 0), &low).expect("room");
}

#[test]
fn memory_comes_and_goes_in_slots() {
    let mut setup = Setup::new();
    let (low, high) = (file(4), file(4));
    setup.share(&[(region(0, 4, 0), &low)]).expect("is shared");
    let before = setup.memory().expect("memory");
    setup.add(&region(8, 2, 2), &high).expect("a slot");
    let more = setup.memory().expect("more memory");
    assert_eq!(places(&more)[..1], places(&before));
    assert!(is_memory(&more, 0) && is_memory(&more, 9) && !is_memory(&before, 9));
    let part = Part {
        offset: 2 * PAGE,
        bytes: PAGE,
    };
    let home = Home::of(&high, part).expect("a file");
    assert!(live::is_mapped(home));
    // A front end names no offset here.
    setup.remove(&region(8, 2, 0)).expect("is removed");
    let less = setup.memory().expect("less memory");
    assert_eq!(places(&less), places(&before));
    assert!(!is_memory(&less, 9) && is_memory(&less, 3));
    drop(more);
    assert!(!live::is_mapped(home), "nothing is under way there");
    setup.remove(&region(0, 4, 0)).expect("is removed");
    assert!(!is_memory(&setup.memory().expect("none"), 0));
    setup.add(&region(0, 4, 0), &high).expect("a slot");
    assert!(is_memory(&setup.memory().expect("memory"), 0));
}

#[test]
fn the_device_stands_still_while_a_ring_has_no_memory() {
    let whole = region(0, 4, 0);
    let low = file(4);
    for stops in [false, true] {
        let mut setup = Setup::new();
        setup.add(&whole, &low).expect("a slot");
        setup.add(&region(8, 1, 0), &low).expect("a slot");
        assert!(setup.memory().is_some() && setup.memory().is_some());
        setup.start_ring(USER + PAGE);
        setup.remove(&whole).expect("is removed");
        assert!(matches!(setup.told.try_recv(), Ok(Told::Still)));
        setup.add(&region(2, 2, 2), &low).expect("a part");
        assert!(setup.memory().is_none(), "the ring's page is missing");
        if stops {
            setup.handler.get_vring_base(0).expect("stops");
            assert!(matches!(setup.told.try_recv(), Ok(Told::Other)));
        } else {
            setup.add(&region(0, 2, 0), &low).expect("a part");
        }
        let ram = setup.memory().expect("memory");
        assert_eq!(is_memory(&ram, 1), !stops);
        assert!(is_memory(&ram, 3));
    }
}
