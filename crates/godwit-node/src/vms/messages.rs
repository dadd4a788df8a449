//! What the nodes of a VM's move say to each other, on the control connection of the machine.
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
//! When the guest is to run before all its memory is there, the rest follows until the destination's
//! QEMU has it. Should the connections break meanwhile, the source makes new ones:
//!
//! ```text
//!    │── Resume ───────────────────────────────► │ its QEMU listens anew
//!    │ ◄─────────────────────────────────── Ready ─│
//!    │ ═══════════ memory, on a connection of its own ═══════════►
//!    │ ◄────────────────────────── Pulled or Failed ─│
//! ```
//!
//! In between both say that they are there; silence is taken for the other's death. No message
//! transfers the right to run the guest: that comes with the disks, or with the memory in a pool. For a machine that has
//! neither the source stores that it gave the machine away, and whoever waits there for its word asks for it, also after a
//! restart of either node:
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
use crate::peers::framed;
use crate::vms::memory::pooled::PoolOffer;

/// Longest message in bytes: a command line is the longest part.
const MAX_MESSAGE: u32 = 1 << 20;

/// How often either side says that it is there.
pub(crate) const PING_EVERY: Duration = Duration::from_secs(1);

/// How long either side may be silent.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

/// From the source.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Will you take this VM?
    Offer(Box<MachineOffer>),
    /// Start a QEMU that waits for its memory.
    Start,
    /// What the guest cannot run without is sent: say when QEMU has it.
    Load {
        /// Whether the guest ran: it is to stand still there as it stood here otherwise.
        runs: bool,
    },
    /// A part of what the destination needs of a NIC: its state before [`Order::Load`], and after [`Order::Given`]
    /// the packets that came to the source before the network knew the destination.
    Nic(NicPiece),
    /// All that came to the machine's NICs at the source is sent, but for packets that overtake each other.
    NicsQuiet,
    /// Nothing more comes of the NICs.
    NicsDone,
    /// The disks are given away, durably.
    Given,
    /// The VM stays here.
    Abort {
        /// Why, for the log.
        reason: String,
    },
    /// The memory's connection is broken: will you take the rest on another? Begins a connection.
    Resume,
    /// Did you give me the machine by this connection's migration? Begins a connection, and is all that is said on it. `id`
    /// is that of the machine that was offered.
    Ask {
        /// See above.
        id: String,
    },
    /// The rest of the memory is gone. May begin a connection.
    Lost {
        /// Why.
        reason: String,
    },
    /// The source is there.
    Ping,
}

/// From the destination.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The VM can come.
    Ready,
    /// What stands in its way.
    Blocked(Vec<String>),
    /// What its user should know; [`Answer::Ready`] follows. Only for sources that told where NICs are.
    Notices(Vec<String>),
    /// QEMU waits for the memory.
    Started,
    /// QEMU can run the guest.
    Loaded,
    /// The network was told that the machine is here.
    Announced,
    /// The guest runs here, or stands still as it did at the source.
    Running {
        /// Microseconds since all disks belong to the destination.
        owned_for_us: u64,
        /// Microseconds since the guest runs.
        running_for_us: u64,
    },
    /// All of the memory is here.
    Pulled,
    /// The answer to [`Order::Ask`].
    Word(Word),
    /// It does not work out.
    Failed(String),
    /// The destination is there.
    Pong,
}

/// What the source of a move durably knows of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Word {
    /// The machine is the destination's.
    Given,
    /// It is not, and by this migration it never will be.
    Kept,
    /// That is not decided.
    Undecided,
    /// Nothing of such a move.
    Nothing,
}

/// What is to be moved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MachineOffer {
    /// What tells the machine from others of its name; empty from an earlier version.
    #[serde(default)]
    pub(crate) id: String,
    /// The epoch that begins when it is given away.
    #[serde(default)]
    pub(crate) epoch: u64,
    /// How the VM is started.
    pub(crate) machine: Machine,
    /// Its machine type with its version.
    pub(crate) machine_type: Option<String>,
    /// The version of its QEMU, as three numbers.
    pub(crate) qemu: [u64; 3],
    /// Bytes of its memory.
    pub(crate) memory_bytes: u64,
    /// When the memory moves.
    pub(crate) memory: MemoryMode,
    /// The memory that stays where it is, if it does.
    #[serde(default)]
    pub(crate) pool: Option<PoolOffer>,
    /// Each disk's name and the bytes that its image occupies.
    pub(crate) disks: Vec<(String, u64)>,
    /// What tells each of the disks from others of its name, in hexadecimal; missing from an earlier version.
    #[serde(default)]
    pub(crate) disk_ids: Vec<String>,
    /// Bytes of an IP packet that each NIC's uplink takes at most.
    #[serde(default)]
    pub(crate) nic_mtus: Vec<u32>,
    /// Where its NICs are at the source, which takes [`Answer::Notices`] when it tells.
    #[serde(default)]
    pub(crate) nic_placings: Vec<NicPlacing>,
}

/// Sends a message.
pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> io::Result<()> {
    framed::write(stream, message, MAX_MESSAGE, SILENCE).await
}

/// Reads a message. What has arrived of it is lost when the future is dropped.
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
