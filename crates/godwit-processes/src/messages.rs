//! The messages between two nodes about a moving process. The source's node asks and the other node answers, on one
//! connection.

use std::io;
use std::time::Duration;

use godwit_verbs::control::{Answer as LibraryAnswer, Request, Status};
use godwit_verbs::preflight::Offer;
use godwit_verbs::shim::{Connection, Plan, QueuePairState, Recreated, Redirect};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

use super::images::ImageFile;
use crate::host::address::OwnAddress;
use crate::host::runc::Container;
use crate::host::subject::Subject;
use godwit_peers::framed;

/// Longest message in bytes: the longest answer of a process.
const MAX_MESSAGE: u32 = 16 << 20;
/// Longest time for a begun message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(20);

/// A request from the source's node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    /// Find the processes of your host at the other ends of these queue pairs.
    Find {
        /// The queue pairs of the process to move.
        ours: Vec<QueuePairState>,
    },
    /// Show the resources for this process, and the obstacles.
    Look {
        /// The process number to keep, unless the process comes in a container.
        pid: u32,
        /// The container of the process.
        #[serde(default)]
        container: Option<Container>,
        /// The address to bring.
        address: Option<OwnAddress>,
        /// The files to bring.
        files: Vec<String>,
        /// Files and folders that the process has open, has mapped or watches, but would not bring.
        #[serde(default)]
        needs: Vec<String>,
    },
    /// Claim this process, found on this connection, for the time of this move. The process works on.
    Claim {
        pid: u32,
        /// The process to move.
        moving: u32,
    },
    /// Pass a request to the library of this partner, which this move has claimed.
    Partner {
        pid: u32,
        /// Prepare, suspend, drain, connect, switch, abandon or resume (of the found queue pairs), or status.
        request: Request,
    },
    /// Make objects ahead of the arriving process. The objects are destroyed when the connection ends.
    Hold {
        /// The arriving process.
        pid: u32,
        /// The numbers of the process's threads.
        #[serde(default)]
        threads: Vec<u32>,
        /// The objects of the process.
        plan: Plan,
    },
    /// Connect queue pairs made ahead.
    ConnectHeld {
        /// The queue pairs with their remote ends.
        connections: Vec<Connection>,
    },
    /// Destroy the objects made ahead.
    GiveUpHeld,
    /// Receive this round of the memory of the arriving process. The bytes of the files follow after [`Answer::Ready`],
    /// each file with its BLAKE3 hash. The round is forgotten when the connection ends.
    Memory(MemoryOffer),
    /// Receive this image. The bytes of the files follow after [`Answer::Ready`], each file with its BLAKE3 hash.
    Image(Box<ImageOffer>),
    /// Restore the process from the image.
    Restore,
    /// Decide for good if the process runs at your host. A process that does not run there never will by this move.
    Settle,
    /// Give the process the objects made ahead, or else have the process recreate its device objects; or repeat the
    /// result.
    Recreate,
    /// Pass a request to the arrived process: one of connect, resume, redirect, redirects and status.
    Moved {
        /// The request.
        request: Request,
    },
    /// Tell the processes of your host the new places of datagram queue pairs.
    Redirect {
        /// The datagram queue pairs of the moved process.
        redirects: Vec<Redirect>,
    },
    /// Forget the move, which has ended.
    Over,
}

/// Memory of a process, saved while the process worked: all memory, or the changes since the previous round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryOffer {
    /// Number of the round, from 1.
    pub round: u32,
    /// CRIU's files.
    pub image: Vec<ImageFile>,
}

/// The image of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOffer {
    /// The process's number.
    pub pid: u32,
    /// The layout that distinguishes the process from another process of this number.
    pub(crate) layout: String,
    /// The container of the process.
    #[serde(default)]
    pub(crate) container: Option<Container>,
    /// The address brought along.
    pub address: Option<OwnAddress>,
    /// Memory rounds sent before. The image then has the changes since the last round; with 0 rounds the image has all
    /// memory.
    #[serde(default)]
    pub(crate) rounds: u32,
    /// CRIU's files.
    pub image: Vec<ImageFile>,
    /// Files brought along, by path.
    pub files: Vec<ImageFile>,
}

impl ImageOffer {
    /// Returns the process of the image.
    pub fn subject(&self) -> Subject {
        Subject {
            pid: self.pid,
            layout: self.layout.clone(),
            container: self.container.clone(),
        }
    }
}

/// An answer of the other node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Not done, with the reason.
    Refused(String),
    /// Not considered, since too much is under way. This connection ends.
    Busy(String),
    /// To [`Ask::Claim`]: another move, named here, has the process for now.
    Waits(String),
    /// To [`Ask::Find`].
    Found(Vec<FoundProcess>),
    /// To [`Ask::Look`].
    Looked {
        /// The host's resources.
        offer: Offer,
        /// The other obstacles.
        reasons: Vec<String>,
    },
    /// To [`Ask::Partner`], [`Ask::Moved`], [`Ask::Hold`] and [`Ask::ConnectHeld`].
    Library(LibraryAnswer),
    /// The bytes of an image or round may follow.
    Ready,
    /// The process runs here.
    Here {
        /// Duration of the restore, in milliseconds.
        milliseconds: f64,
    },
    /// The process does not run here and never will by this move, with the reason.
    NotHere(String),
    /// To [`Ask::Recreate`].
    Recreated {
        /// The recreated objects; for objects made ahead, only the keys.
        made: Recreated,
        /// True if the objects were made ahead, and so are connected to the partners' prepared queue pairs.
        #[serde(default)]
        attached: bool,
        /// The reason for objects made ahead that went unused.
        #[serde(default)]
        warning: Option<String>,
        /// Duration of the step, in milliseconds.
        milliseconds: f64,
    },
    /// To all other requests.
    Done,
}

/// A process at the other end of some connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FoundProcess {
    /// The process's number.
    pub pid: u32,
    /// The concerned queue pairs of the process, and the obstacles to a hold.
    pub status: Status,
}

/// Writes a message and its length.
pub async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> io::Result<()> {
    framed::write(stream, message, MAX_MESSAGE, MESSAGE_TIMEOUT).await
}

/// Reads a message; it has to begin within this time.
pub async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    within: Duration,
) -> io::Result<T> {
    let begins = framed::length(stream, MAX_MESSAGE);
    let length = tokio::time::timeout(within, begins).await.map_err(|_| {
        let text = format!("no answer within {} s", within.as_secs());
        io::Error::new(io::ErrorKind::TimedOut, text)
    })??;
    tokio::time::timeout(MESSAGE_TIMEOUT, framed::body(stream, length))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn messages_cross() {
        let (mut here, mut there) = tokio::io::duplex(1 << 16);
        write(&mut here, &Ask::Restore).await.expect("writes");
        write(&mut here, &Ask::Settle).await.expect("writes");
        assert!(matches!(read(&mut there, SOON).await, Ok(Ask::Restore)));
        assert!(matches!(read(&mut there, SOON).await, Ok(Ask::Settle)));
    }

    #[tokio::test]
    async fn hostile_bytes_are_errors() {
        let with_length = |length: u32, body: &[u8]| [&length.to_le_bytes(), body].concat();
        for bytes in [
            with_length(MAX_MESSAGE + 1, b""),
            with_length(MAX_MESSAGE, b"\"restore\""),
            with_length(u32::MAX, b"{}"),
            with_length(4, b"\"no\""),
            with_length(2, b"\xff\xff"),
            with_length(0, b""),
            vec![1, 0],
        ] {
            let read: io::Result<Ask> = read(&mut bytes.as_slice(), SOON).await;
            read.expect_err(&format!("{bytes:?}"));
        }
    }
}
