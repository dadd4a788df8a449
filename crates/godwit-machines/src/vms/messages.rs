//! The messages between the nodes of a VM's move, on the VM's control connection.
//!
//! ```text
//!  source                                     destination
//!    │── Offer ────────────────────────────────► │ looks for blockers
//!    │ ◄─────────────────── Ready or Blocked(..) ─│ the VM is stored as incoming
//!    │── Start ────────────────────────────────► │ QEMU -incoming defer -S
//!    │ ◄───────────────────────────────── Started ─│ (meanwhile disks are copied until converged)
//!    │ ═══════════ memory, on a connection of its own ═══════════►
//!    │── Nic .. ───────────────────────────────► │ the guest stands still: its NICs' states
//!    │── Load ─────────────────────────────────► │ waits until QEMU can run the guest
//!    │ ◄────────────────────────────────── Loaded ─│
//!    │   disks change hands: see `disks/group.rs` │
//!    │── Given ────────────────────────────────► │ all disks are its own: announces, cont
//!    │ ◄─────────────────────────────── Announced ─│
//!    │── Nic .., NicsQuiet, NicsDone ──────────► │ packets that still came to the source
//!    │ ◄───────────────────────────────── Running ─│
//! ```
//!
//! If the guest is to run before all its memory is there, the rest follows until the destination's QEMU has everything.
//! If the connections break meanwhile, the source makes new ones:
//!
//! ```text
//!    │── Resume ───────────────────────────────► │ its QEMU listens anew
//!    │ ◄─────────────────────────────────── Ready ─│
//!    │ ═══════════ memory, on a connection of its own ═══════════►
//!    │ ◄────────────────────────── Pulled or Failed ─│
//! ```
//!
//! In between both sides send beats; silence counts as the other side's death. No message transfers the right to run
//! the guest: the right comes with the disks, or with the memory in a pool. For a VM with neither, the source stores
//! that it gave the VM away. The destination asks for this word, also after a restart of either node:
//!
//! ```text
//!    │ ◄───────────────────────────────────── Ask ─│ on a connection of the destination's
//!    │── Word(Given, Kept, Undecided) ─────────► │
//! ```

use std::io;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

use godwit_api::MemoryMode;
use godwit_qemu::machine::Machine;

use crate::nics::links::NicPlacing;
use crate::nics::pieces::NicPiece;
use crate::protect::messages::Opening;
use crate::vms::memory::pooled::PoolOffer;
use godwit_peers::framed;

/// Longest message in bytes: a command line is the longest part.
const MAX_MESSAGE: u32 = 1 << 20;

/// Time between two beats of a side.
pub(crate) const PING_EVERY: Duration = Duration::from_secs(1);

/// Longest silence of a side.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

/// An order from the source.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Offer this VM.
    Offer(Box<MachineOffer>),
    /// Start a QEMU that waits for its memory.
    Start,
    /// Report once QEMU has the state being sent, without which the guest cannot run.
    Load {
        /// True if the guest ran. A guest that stood still stands still at the destination, too.
        runs: bool,
    },
    /// A piece for a NIC: of its state before [`Order::Load`], and after [`Order::Given`] of the packets that came to
    /// the source before the network knew the destination.
    Nic(NicPiece),
    /// All packets to the VM's NICs at the source are sent, except for packets that overtake each other.
    NicsQuiet,
    /// No more pieces for NICs follow.
    NicsDone,
    /// The disks are given away, durably.
    Given,
    /// The VM stays at the source.
    Abort {
        /// The reason, for the log.
        reason: String,
    },
    /// Take the rest of the memory on another connection: the last one is broken. Begins a connection.
    Resume,
    /// Answer if this connection's migration gave the VM to the asking node. Begins a connection, and is its only
    /// order.
    Ask {
        /// The id of the offered VM.
        id: String,
    },
    /// The rest of the memory is gone. May begin a connection.
    Lost {
        /// The reason.
        reason: String,
    },
    /// Begins a connection between the nodes of a protection, which has its own messages from here on.
    Protection(Box<Opening>),
    /// A beat of the source.
    Ping,
}

/// An answer from the destination.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The VM can come.
    Ready,
    /// The blockers of the move.
    Blocked(Vec<String>),
    /// Notices for the user; [`Answer::Ready`] follows. Sent only to a source that told the places of its NICs.
    Notices(Vec<String>),
    /// QEMU waits for the memory.
    Started,
    /// QEMU can run the guest.
    Loaded,
    /// The NICs were announced to the network.
    Announced,
    /// The guest runs here, or stands still as at the source.
    Running {
        /// Microseconds since the destination owns all disks.
        owned_for_us: u64,
        /// Microseconds since the guest runs.
        running_for_us: u64,
    },
    /// All of the memory is here.
    Pulled,
    /// The answer to [`Order::Ask`].
    Word(Word),
    /// The move has failed, with the reason.
    Failed(String),
    /// A beat of the destination.
    Pong,
}

/// The source's durable knowledge of the end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Word {
    /// The VM belongs to the destination.
    Given,
    /// The VM does not belong to the destination, and never will by this migration.
    Kept,
    /// The move is undecided.
    Undecided,
    /// The source knows no such move.
    Nothing,
}

/// The offer of a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineOffer {
    /// The id that distinguishes the VM from others of its name; empty from an earlier version.
    #[serde(default)]
    pub id: String,
    /// The epoch that begins with the handover.
    #[serde(default)]
    pub epoch: u64,
    /// The configuration of the VM's QEMU.
    pub machine: Machine,
    /// The machine type with its version.
    pub(crate) machine_type: Option<String>,
    /// The version of its QEMU, as three numbers.
    pub qemu: [u64; 3],
    /// Size of the memory in bytes.
    pub(crate) memory_bytes: u64,
    /// The mode of the memory's move.
    pub memory: MemoryMode,
    /// The memory that stays in its pool, if any.
    #[serde(default)]
    pub pool: Option<PoolOffer>,
    /// Each disk's name and the bytes occupied by its image.
    pub disks: Vec<(String, u64)>,
    /// The ids that distinguish the disks from others of their names, in hexadecimal; missing from an earlier version.
    #[serde(default)]
    pub(crate) disk_ids: Vec<String>,
    /// Largest IP packet of each NIC's uplink, in bytes.
    #[serde(default)]
    pub(crate) nic_mtus: Vec<u32>,
    /// The places of its NICs at the source. A source that tells them accepts [`Answer::Notices`].
    #[serde(default)]
    pub(crate) nic_placings: Vec<NicPlacing>,
}

pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> io::Result<()> {
    framed::write(stream, message, MAX_MESSAGE, SILENCE).await
}

/// Reads a message. Dropping the future loses a partly read message.
pub(crate) async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<T> {
    let length = framed::length(stream, MAX_MESSAGE).await?;
    framed::body(stream, length).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_cross() {
        let (mut here, mut there) = tokio::io::duplex(1 << 16);
        write(&mut here, &Answer::Blocked(vec![String::from("x")]))
            .await
            .expect("writes");
        write(&mut here, &Answer::Pong).await.expect("writes");
        let Answer::Blocked(list) = read(&mut there).await.expect("reads") else {
            panic!("another message");
        };
        assert_eq!(list, ["x"]);
        assert!(matches!(read(&mut there).await, Ok(Answer::Pong)));
    }

    #[tokio::test]
    async fn hostile_bytes_are_errors() {
        let with_length = |length: u32, body: &[u8]| [&length.to_le_bytes(), body].concat();
        for bytes in [
            with_length(MAX_MESSAGE + 1, b""),
            with_length(u32::MAX, b"{}"),
            with_length(9, b"short"),
            with_length(4, b"\"no\""),
            with_length(2, b"\xff\xff"),
            with_length(0, b""),
            vec![1, 0],
        ] {
            let read: io::Result<Order> = read(&mut bytes.as_slice()).await;
            read.expect_err(&format!("{bytes:?}"));
        }
    }
}
