//! The protection of a machine: the node that runs the machine, the node that takes over after its death, and the
//! witness that decides between them.
//!
//! The *primary* runs the machine. The *backup* holds the machine's disks, and receives every write. While the machine
//! is protected, the primary acknowledges a write only after the backup has the write. A *witness* stores one
//! [`Grant`], and changes the grant by compare-and-swap alone. The grant says which of the two nodes may run the
//! machine, and whether the other node may take the machine:
//!
//! ```text
//!  primary                        witness                         backup
//!  Alone                          1: first, unpaired              Syncing
//!    │═════════════ disks, then every write, acknowledged twice ════►│
//!    │◄───────────────────────────────────────────────── in sync ────│ Following
//!  Pairing ── pair ─────────────► 2: first, paired
//!  Paired
//!    ╳ dies                                         silence: severs  │ Asking
//!                                 3: second, unpaired ◄───── take ────│
//!                                                                     │ Took: stores that it owns the disks, runs
//!  Severed ── alone ────────────► 3: second, unpaired
//!  Ended ◄────────────────────────┘
//! ```
//!
//! Each node that loses the other one stops first and asks afterwards: the primary holds every acknowledgement, and the
//! backup acknowledges no further write. Both ask the witness for the next term, so one of them gets it. No clock takes
//! part in that decision.
//!
//! This crate only decides. A node stores [`Primary::record`] before carrying out the [`Order`]s of a call, and reports
//! what has happened. `tests/pair_model` tries every order of writes, crashes, and messages lost, repeated and late.
//! [`checkpoints`] has the rest of a machine that is protected with its memory.

mod backup;
mod beats;
pub mod checkpoints;
mod grant;
mod primary;

pub use backup::{Backup, BackupState};
pub use beats::{Heard, Pings, Sign, Timing};
pub use grant::{Ask, Grant, Member, Term};
pub use primary::{Primary, PrimaryRecord, PrimaryState};

/// An order to the node, to be carried out in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Ask the witness, and report the answer. Repeated by `retry` until an answer has come.
    Ask(Ask),
    /// Primary: hold the guest's I/O. No acknowledgement may leave, with or without the backup.
    Hold,
    /// Primary: acknowledge without the backup. A machine that was ended starts again.
    GoAlone,
    /// Primary: the machine is protected.
    Protected,
    /// Primary: the backup may run the machine. The machine ends here. The disks here stay as they are, and their answers
    /// are held, until the backup has shown that it durably owns them: a backup that dies before gives the machine back.
    End,
    /// Backup: acknowledge no further write of the primary.
    Sever,
    /// Backup: own the disks, and run the machine.
    Take(Term),
}
