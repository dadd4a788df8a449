//! The messages of a connection for questions about parts of images.
//!
//! ```text
//! question   kind: 1 a chunk, 2 the manifest itself,    1 byte
//!            3 the meaning of an image's name
//!            the manifest's name, or the hash of the   32 bytes
//!            image's name
//!            the chunk's number, or 0                   8 bytes
//! answer     1 here it is, 2 not that chunk,            1 byte
//!            3 nothing of that manifest or name
//!            number of bytes that follow; 0 but for 1   4 bytes
//! ```
//!
//! The meaning of a name is the name of a manifest, and the time of its push in 20 bytes, like `2025-01-31T12:00:00Z`.
//!
//! Numbers are little-endian. The opener of the connection asks, one question after the other. Answers are checked by
//! their hash. Only the meaning of a name cannot be checked; see [`super::names`].

use std::io;

use bytes::Bytes;
use godwit_image::{CHUNK_BYTES, Manifest, ManifestId, PushTime};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of a question.
const QUESTION: usize = 41;

/// A question to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// The chunk of this number in the manifest.
    Chunk { manifest: ManifestId, number: u64 },
    /// The manifest of an image.
    Manifest(ManifestId),
    /// The meaning of the name with this hash. Only for nodes with
    /// [`Features::IMAGE_NAMES`](godwit_core::wire::Features::IMAGE_NAMES).
    Name(NameHash),
}

/// The BLAKE3 hash of an image's name: as long as a manifest's, however long the name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameHash([u8; 32]);

impl NameHash {
    pub(super) fn of(name: &str) -> Self {
        Self(*blake3::hash(name.as_bytes()).as_bytes())
    }
}

/// The meaning of an image's name, as the repository told a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Meaning {
    pub(super) manifest: ManifestId,
    /// The time of the push: of two manifests pushed under the name, the later one counts.
    pub(super) pushed: PushTime,
}

impl Meaning {
    /// Bytes on a connection.
    const LENGTH: usize = 32 + PushTime::LENGTH;

    pub(super) fn encode(&self) -> Bytes {
        [&self.manifest.0[..], &self.pushed.as_bytes()[..]]
            .concat()
            .into()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (manifest, pushed) = bytes.split_first_chunk::<32>()?;
        Some(Self {
            manifest: ManifestId(*manifest),
            pushed: PushTime::from_bytes(pushed.try_into().ok()?)?,
        })
    }
}

/// The other node's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The requested bytes, not yet checked.
    Here(Bytes),
    /// The node has parts of the image, but not this chunk.
    NotThatChunk,
    /// The node has nothing of the image or name.
    Nothing,
}

impl Question {
    /// Returns the manifest of the question; none for a question about a name.
    pub(super) const fn manifest(self) -> Option<ManifestId> {
        match self {
            Self::Chunk { manifest, .. } | Self::Manifest(manifest) => Some(manifest),
            Self::Name(_) => None,
        }
    }

    /// Returns the length of the longest valid answer.
    const fn longest(self) -> u64 {
        match self {
            Self::Chunk { .. } => CHUNK_BYTES,
            Self::Manifest(_) => Manifest::MAX_BYTES,
            Self::Name(_) => Meaning::LENGTH as u64,
        }
    }

    fn encode(self) -> [u8; QUESTION] {
        let (what, name, number) = match self {
            Self::Chunk { manifest, number } => (1, manifest.0, number),
            Self::Manifest(manifest) => (2, manifest.0, 0),
            Self::Name(name) => (3, name.0, 0),
        };
        let mut bytes = [0; QUESTION];
        bytes[0] = what;
        bytes[1..33].copy_from_slice(&name);
        bytes[33..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; QUESTION]) -> Option<Self> {
        let (what, rest) = bytes.split_first()?;
        let (name, number) = rest.split_first_chunk::<32>()?;
        let manifest = ManifestId(*name);
        match what {
            1 => Some(Self::Chunk {
                manifest,
                number: u64::from_le_bytes(number.try_into().ok()?),
            }),
            2 => Some(Self::Manifest(manifest)),
            3 => Some(Self::Name(NameHash(*name))),
            _ => None,
        }
    }

    /// Returns the next question, or nothing when the other side ends in order.
    ///
    /// # Errors
    /// The connection failed, or the bytes are no question.
    pub(super) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let mut bytes = [0; QUESTION];
        match from.read_exact(&mut bytes).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        };
        let question = Self::decode(&bytes);
        question
            .map(Some)
            .ok_or_else(|| io::Error::other("it asks for something unknown"))
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// The connection failed, or the bytes are no answer to this question.
    pub(super) async fn ask(
        self,
        connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> io::Result<Answer> {
        connection.write_all(&self.encode()).await?;
        connection.flush().await?;
        let what = connection.read_u8().await?;
        let length = u64::from(connection.read_u32_le().await?);
        match (what, length) {
            (1, 1..) if length <= self.longest() => {
                let mut bytes = Vec::new();
                connection.take(length).read_to_end(&mut bytes).await?;
                if bytes.len() as u64 != length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(Answer::Here(bytes.into()))
            }
            (2, 0) => Ok(Answer::NotThatChunk),
            (3, 0) => Ok(Answer::Nothing),
            _ => Err(io::Error::other("it answers something that makes no sense")),
        }
    }
}

impl Answer {
    /// Sends the answer.
    ///
    /// # Errors
    /// The connection failed.
    pub(super) async fn write(&self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let (what, bytes) = match self {
            Self::Here(bytes) => (1, &bytes[..]),
            Self::NotThatChunk => (2, &[][..]),
            Self::Nothing => (3, &[][..]),
        };
        let mut head = [what; 5];
        head[1..].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        to.write_all(&head).await?;
        to.write_all(bytes).await?;
        to.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: ManifestId = ManifestId([7; 32]);
    const CHUNK: Question = Question::Chunk {
        manifest: MANIFEST,
        number: 0x0102_0304_0506,
    };

    const NAME: Question = Question::Name(NameHash([9; 32]));

    fn meaning() -> Meaning {
        Meaning {
            manifest: MANIFEST,
            pushed: "2025-01-31T12:00:00Z".parse().expect("a second"),
        }
    }

    #[test]
    fn what_a_name_stands_for_is_understood_and_nothing_like_it() {
        let bytes = meaning().encode();
        assert_eq!(Meaning::decode(&bytes), Some(meaning()));
        let longer = [&bytes[..], &[0]].concat();
        let mut no_time = bytes.to_vec();
        no_time[32] = b'x';
        for wrong in [&bytes[..51], &longer, &no_time, &[]] {
            assert_eq!(Meaning::decode(wrong), None, "{wrong:?}");
        }
    }

    #[tokio::test]
    async fn what_is_asked_and_answered_is_understood() {
        for (question, answer) in [
            (CHUNK, Answer::Here(Bytes::from_static(b"some bytes"))),
            (CHUNK, Answer::NotThatChunk),
            (
                Question::Manifest(MANIFEST),
                Answer::Here(vec![1; 300_000].into()),
            ),
            (Question::Manifest(MANIFEST), Answer::Nothing),
            (NAME, Answer::Here(meaning().encode())),
            (NAME, Answer::Nothing),
        ] {
            let (mut here, mut there) = tokio::io::duplex(1 << 20);
            let said = answer.clone();
            let gives = godwit_context::spawn(async move {
                let asked = Question::read(&mut there).await.expect("asked");
                said.write(&mut there).await.expect("said");
                (asked, Question::read(&mut there).await.expect("ended"))
            });
            assert_eq!(question.ask(&mut here).await.expect("answered"), answer);
            drop(here);
            assert_eq!(gives.await.expect("done"), (Some(question), None));
        }
    }

    #[tokio::test]
    async fn what_makes_no_sense_is_refused_and_nothing_is_set_aside_for_it() {
        let too_long = (CHUNK_BYTES as u32 + 1).to_le_bytes();
        let longest = u32::MAX.to_le_bytes();
        for answer in [
            &[1, 0, 0, 0, 0][..],
            &[&[1], &too_long[..]].concat(),
            &[&[1], &longest[..]].concat(),
            &[1, 9, 0, 0, 0, 1, 2],
            &[2, 1, 0, 0, 0, 1],
            &[9, 0, 0, 0, 0],
            &[1, 0],
        ] {
            let (mut here, mut there) = tokio::io::duplex(1 << 10);
            there.write_all(answer).await.expect("written");
            there.shutdown().await.expect("ended");
            let asked = godwit_context::spawn(async move { CHUNK.ask(&mut here).await });
            // The answering end must not close before the question arrives.
            let _ = Question::read(&mut there).await;
            assert!(asked.await.expect("done").is_err(), "{answer:?}");
        }
        let mut unknown = CHUNK.encode();
        unknown[0] = 4;
        assert!(Question::read(&mut &unknown[..]).await.is_err());
    }
}
