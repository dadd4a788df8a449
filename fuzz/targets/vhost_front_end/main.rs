//! A front end that sends a disk's vhost-user server any messages with any descriptors and memory:
//! when it has left, the next front end is served, the disk serves others, and nothing of it is held
//! any more.

#![no_main]

mod disk;
mod front_end;
mod next;
mod script;

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;

thread_local! {
    static DISK: RefCell<disk::Disk> = RefCell::new(disk::Disk::new());
}

fuzz_target!(|data: &[u8]| {
    let script = script::Script::parse(data);
    DISK.with_borrow_mut(|disk| {
        front_end::play(disk.connect(), &script);
        disk.check();
    });
});
