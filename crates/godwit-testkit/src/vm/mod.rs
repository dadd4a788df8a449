//! Virtual machines with a verifying guest: the guest itself ([`GuestImage`]), QEMU's command line for it
//! ([`GuestMachine`]), and its console ([`GuestConsole`]), which carries reports and commands.
//!
//! **Two clocks.** A guest reports the largest gap between two writes by its own clock. This clock stands still while
//! QEMU has stopped the machine and moves with the machine, so it shows the cost of the disk, not the cost of the stop.
//! Therefore each write also prints a tick, and the console clocks the ticks where they arrive, on the host:
//! [`GuestConsole::host_gap`] includes the time in which the machine did not run anywhere.

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
