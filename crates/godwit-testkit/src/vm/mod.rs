//! Virtual machines with a guest that verifies whatever it reads: the guest itself
//! ([`GuestImage`]), how QEMU is told to run it ([`GuestMachine`]), and its console
//! ([`GuestConsole`]), through which it reports and is told what to do.
//!
//! **Two clocks.** A guest reports the largest gap between two of its writes by its own clock. That
//! clock stands still while QEMU has stopped the machine and moves with it, so it shows what the
//! disk cost, not what the stop cost. Therefore each write also prints a tick, and the console
//! clocks the ticks where they arrive, on the host: [`GuestConsole::host_gap`] includes the time in
//! which the machine did not run anywhere.

mod adopted;
mod arrivals;
mod console;
mod guest;
mod machine;
mod monitor;
mod on_nodes;
mod stream;
mod windows;

pub use adopted::{AdoptedMachine, idle_qemu};
pub use console::GuestConsole;
pub use guest::{GuestImage, check_disk, format_disk, format_image};
pub use machine::{
    ConsoleSocket, DirtyPages, GuestLoad, GuestMachine, GuestNetwork, MachineDisk, PointerChase,
    block_nodes,
};
pub use monitor::Monitor;
pub use on_nodes::{Gaps, NodeGuest, NodeMachine, VM};
pub use stream::{Finished, Latency, Report};
pub use windows::{ChaseWindow, DirtyWindow, Windows};
