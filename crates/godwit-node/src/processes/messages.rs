//! What nodes ask each other about a process that moves. One asks, the other answers, on one connection.

use std::io;
use std::time::Duration;

use godwit_verbs::control::{Answer as LibraryAnswer, Request, Status};
use godwit_verbs::preflight::Offer;
use godwit_verbs::shim::{Connection, Plan, QueuePairState, Recreated, Redirect};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

use super::images::ImageFile;
use crate::peers::framed;
use crate::processes::host::address::OwnAddress;
use crate::processes::host::runc::Container;
use crate::processes::host::subject::Subject;

/// Longest message in bytes: as long as an answer of a process may be.
const MAX_MESSAGE: u32 = 16 << 20;
/// How long a message may take once it has begun.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(20);

/// From the source's node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    /// Which processes of your host are the other ends of these queue pairs?
    Find {
        /// Those of the process that is to move.
        ours: Vec<QueuePairState>,
    },
    /// What is there for this process, and what stands in its way?
    Look {
        /// The number that it needs, unless it comes in a container.
        pid: u32,
        /// The container that it would come in.
        #[serde(default)]
        container: Option<Container>,
        /// The address that it would bring.
        address: Option<OwnAddress>,
        /// The files that it would bring.
        files: Vec<String>,
        /// Files and folders that it has open, has mapped or watches, and would not bring.
        #[serde(default)]
        needs: Vec<String>,
    },
    /// Have this process, which was found on this connection, for this move as long as the move needs it. It works on.
    Claim {
        /// The partner.
        pid: u32,
        /// The process that is to move.
        moving: u32,
    },
    /// Ask this partner's library; this move has claimed it.
    Partner {
        /// The partner.
        pid: u32,
        /// One of prepare, suspend, drain, connect, switch, abandon, resume (of the queue pairs that were found) and status.
        request: Request,
    },
    /// Have objects made ahead of a process that will come. They are given up when the connection ends.
    Hold {
        /// The process.
        pid: u32,
        /// The numbers of its threads.
        #[serde(default)]
        threads: Vec<u32>,
        /// What it has.
        plan: Plan,
    },
    /// Have queue pairs that were made ahead connected.
    ConnectHeld {
        /// Which, and where to.
        connections: Vec<Connection>,
    },
    /// What was made ahead is not wanted.
    GiveUpHeld,
    /// Take this part of the memory of a process that will come. Its files' bytes follow after [`Answer::Ready`], each with its
    /// BLAKE3 hash. It is forgotten when the connection ends.
    Memory(MemoryOffer),
    /// Take this image. Its files' bytes follow after [`Answer::Ready`], each with its BLAKE3 hash.
    Image(Box<ImageOffer>),
    /// Make the process of it.
    Restore,
    /// Does the process run at your host? If it does not, it never will by this move.
    Settle,
    /// Have the process take what was made ahead of it or else make its device's objects again, or say what it made.
    Recreate,
    /// Ask the process that came: one of connect, resume, redirect, redirects and status.
    Moved {
        /// What.
        request: Request,
    },
    /// Tell your host's processes where queue pairs for datagrams are that they may send to.
    Redirect {
        /// Those of the process that moved.
        redirects: Vec<Redirect>,
    },
    /// The move has ended; nothing of it is needed any more.
    Over,
}

/// Memory of a process as it was when it worked: all of it, or what has changed since the round before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryOffer {
    /// Which round it is; from 1.
    pub(crate) round: u32,
    /// CRIU's files.
    pub(crate) image: Vec<ImageFile>,
}

/// A process's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageOffer {
    /// The process.
    pub(crate) pid: u32,
    /// What tells it from another process of this number.
    pub(crate) layout: String,
    /// The container that it comes in.
    #[serde(default)]
    pub(crate) container: Option<Container>,
    /// The address that it brings.
    pub(crate) address: Option<OwnAddress>,
    /// How many rounds of its memory came before: the image has what changed since. If none, it has all.
    #[serde(default)]
    pub(crate) rounds: u32,
    /// CRIU's files.
    pub(crate) image: Vec<ImageFile>,
    /// Files that it brings along, by their paths.
    pub(crate) files: Vec<ImageFile>,
}

impl ImageOffer {
    /// What it is an image of.
    pub(crate) fn subject(&self) -> Subject {
        Subject {
            pid: self.pid,
            layout: self.layout.clone(),
            container: self.container.clone(),
        }
    }
}

/// From the other node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// It is not done, and why.
    Refused(String),
    /// It was not even looked at, since too much is under way, and this connection ends.
    Busy(String),
    /// To [`Ask::Claim`]: it is another move's for now, which is named.
    Waits(String),
    /// To [`Ask::Find`].
    Found(Vec<FoundProcess>),
    /// To [`Ask::Look`].
    Looked {
        /// What the host has.
        offer: Offer,
        /// What stands in the way beside that.
        reasons: Vec<String>,
    },
    /// To [`Ask::Partner`], [`Ask::Moved`], [`Ask::Hold`] and [`Ask::ConnectHeld`].
    Library(LibraryAnswer),
    /// The image may come.
    Ready,
    /// The process runs here.
    Here {
        /// How long its restore took, in milliseconds.
        milliseconds: f64,
    },
    /// The process does not run here and never will by this move, and why.
    NotHere(String),
    /// To [`Ask::Recreate`].
    Recreated {
        /// What it made; of what was made ahead of it, its keys alone.
        made: Recreated,
        /// Whether that was made ahead of it, so that it is connected to what its partners have prepared.
        #[serde(default)]
        attached: bool,
        /// Why nothing that was made ahead was used.
        #[serde(default)]
        warning: Option<String>,
        /// How long that took, in milliseconds.
        milliseconds: f64,
    },
    /// To the others.
    Done,
}

/// A process that is the other end of some connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FoundProcess {
    /// Its number.
    pub(crate) pid: u32,
    /// Its queue pairs that are concerned, and what keeps them from being held.
    pub(crate) status: Status,
}

/// Sends a message.
pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> io::Result<()> {
    framed::write(stream, message, MAX_MESSAGE, MESSAGE_TIMEOUT).await
}

/// Reads a message that begins within this time.
pub(crate) async fn read<T: DeserializeOwned>(
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
