//! What two nodes say to each other before controllers talk: who they are, which protocol they
//! share, and what is to be moved.

use super::DecodeError;
use super::TrafficClass;
use super::header::{HEADER_SIZE, Header, Kind};
use crate::controller::OlderCopy;
use crate::units::{DiskId, Epoch, MigrationId, Sectors};

/// The protocol this build speaks. An old and a new node agree on the highest that both know.
pub const PROTOCOL_VERSION: u16 = 2;

/// The oldest protocol this build speaks: before it a forwarded request could be carried out twice, or
/// after its client had left.
pub const MIN_PROTOCOL_VERSION: u16 = 2;

/// Longest name of a node or disk in bytes.
pub const MAX_NAME: usize = 128;

/// Longest greeting's payload in bytes.
pub const GREETING_LIMIT: u32 = 4096;

const MAX_TEXT: usize = 2048;

/// Longest path in an offer in bytes.
pub const MAX_PLACE: usize = 1024;

/// Optional parts of the protocol, one bit each. Unknown bits are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u32);

impl Features {
    /// What follows the welcome of a sync or copy connection is not encrypted. Only who trusts the
    /// network for that says so.
    pub const CLEAR_DATA: Self = Self(1);

    /// The data of copies, double writes and delayed writes may be compressed.
    pub const COMPRESSION: Self = Self(2);

    /// An offer may say where the disk is to be put. A node without it would put the disk where it
    /// puts all of them.
    pub const PLACES: Self = Self(4);

    /// A verification may say that an extent is a hole.
    pub const HOLES: Self = Self(8);

    /// An offer may name a policy. A node without it knows double writes only.
    pub const POLICIES: Self = Self(16);

    /// A disk may change hands before all of it has arrived, and the rest is pulled.
    pub const PULLS: Self = Self(32);

    /// The answer to an offer may say what the destination holds of the disk of an earlier time.
    pub const DELTAS: Self = Self(64);
    /// An offer may be of a disk on an image, which the destination fetches from its own repository.
    pub const IMAGES: Self = Self(128);

    /// Who has chunks of an image gives them to nodes that ask with [`Purpose::Image`].
    pub const IMAGE_CHUNKS: Self = Self(256);

    /// What the owner of a disk lacks may be in two places: in its image, and at the node that gave the disk away.
    pub const TWO_PLACES: Self = Self(512);

    /// On connections for chunks of images it may be asked what the name of an image stands for.
    pub const IMAGE_NAMES: Self = Self(1024);

    /// The answer to an offer may say that the destination's image reads as zeroes.
    pub const ZEROES: Self = Self(2048);

    /// A machine may have NICs whose guest announces itself. A node without it does not offer that to guests, and so has no
    /// QEMU that takes such a guest.
    pub const ANNOUNCING_GUESTS: Self = Self(4096);

    /// An offer names the disk's id, and nodes that meet compare which disks and machines both say they have.
    pub const OWNERS: Self = Self(1 << 16);

    /// The owner of a disk shows the node that owes it a part that it lives: a [`Message::Ping`](super::Message::Ping) on
    /// the connection on which it pulls.
    pub const OWNER_BEATS: Self = Self(1 << 17);

    /// These and the others.
    #[must_use]
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// What is in both.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether all of these are among them.
    #[must_use]
    pub const fn contain(self, others: Self) -> bool {
        self.common(others).0 == others.0
    }
}

/// Why a connection is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To move a disk; on the control connection an [`Offer`] follows.
    Migrate,
    /// To find out who owns a disk after a crash; control connection only.
    Resolve,
    /// To forward the I/O of clients that stayed after switchover; sync connection only.
    Forward,
    /// To move a virtual machine: its name stands in place of a disk's. On the control connection
    /// the nodes agree step by step; a copy connection carries its memory.
    Machine,
    /// To give the owner of a disk what it lacks of it; pull connection only.
    Pull,
    /// To ask for chunks of images; pull connection only, and only to nodes with [`Features::IMAGE_CHUNKS`].
    Image,
    /// To move a process with its RDMA connections: to the node where it goes, and to those where its partners are;
    /// control connection only. No disk is named.
    Process,
}

/// The first frame on every connection, from the node that opened it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Lowest protocol version that the sender speaks.
    pub min_version: u16,
    /// Highest protocol version that the sender speaks.
    pub max_version: u16,
    /// Optional parts that the sender knows and wants.
    pub features: Features,
    /// What the connection will carry.
    pub class: TrafficClass,
    /// Why it is opened.
    pub purpose: Purpose,
    /// The migration it belongs to.
    pub migration: MigrationId,
    /// The sender's node name; with TLS it must be the one in its certificate.
    pub node: String,
    /// The disk it is about.
    pub disk: String,
}

/// Where the source wants the destination to put a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a folder that the destination has a name for.
    Pool(String),
    /// At this path: that of a file that is to be made, or of a block device.
    Path(String),
}

/// How the destination comes to have a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransferPolicy {
    /// One pass; writes behind its head go to both nodes.
    #[default]
    DoubleWrite,
    /// Rounds over what was written meanwhile.
    PreCopy,
    /// One pass; all writes go to both nodes.
    Mirror,
    /// What is seldom written is pushed; the disk changes hands, and the rest is pulled. Only for nodes with
    /// [`Features::PULLS`].
    PushPull,
}

impl TransferPolicy {
    const fn code(self) -> u8 {
        match self {
            Self::DoubleWrite => 1,
            Self::PreCopy => 2,
            Self::Mirror => 3,
            Self::PushPull => 4,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::DoubleWrite,
            2 => Self::PreCopy,
            3 => Self::Mirror,
            4 => Self::PushPull,
            _ => return None,
        })
    }
}

/// The image that a disk was created from, and does not bring along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedImage {
    /// Its name, for people.
    pub image: String,
    /// Its manifest's name, which stands for its content.
    pub manifest: String,
    /// Whether what nobody asks for is fetched, too.
    pub prefetch: bool,
}

/// What the source wants to move; follows the hello on a migration's control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The epoch in which the destination will serve.
    pub epoch: Epoch,
    /// The disk's size.
    pub capacity: Sectors,
    /// Bytes that the image occupies at the source, so that the destination can refuse when it has
    /// no space for them.
    pub allocated: u64,
    /// Longest copy in sectors.
    pub chunk_sectors: u32,
    /// Chunks in flight at once.
    pub window_chunks: u16,
    /// Copy connections that the source opens beside the control and sync connections.
    pub copy_connections: u8,
    /// Where the disk is to be put; the destination chooses when left out. Only for nodes with
    /// [`Features::PLACES`].
    pub place: Option<Place>,
    /// How it is moved. Others than [`TransferPolicy::DoubleWrite`] only for nodes with
    /// [`Features::POLICIES`].
    pub policy: TransferPolicy,
    /// The image that what the source does not send is in. Only for nodes with [`Features::IMAGES`].
    pub image: Option<OfferedImage>,
    /// What tells the disk from others of its name. Only for nodes with [`Features::OWNERS`].
    pub id: Option<DiskId>,
}

/// Why a node said no, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// No common protocol version.
    Version,
    /// The certificate does not belong to the node that it claims to be.
    Identity,
    /// A disk of that name exists and is in use.
    DiskExists,
    /// No such disk or migration.
    Unknown,
    /// Not enough space.
    NoSpace,
    /// Busy with another migration of this disk, or at its limit.
    Busy,
    /// The request is malformed or makes no sense.
    Invalid,
    /// Something failed inside the node.
    Internal,
}

impl RefusalCode {
    const fn code(self) -> u16 {
        match self {
            Self::Version => 1,
            Self::Identity => 2,
            Self::DiskExists => 3,
            Self::Unknown => 4,
            Self::NoSpace => 5,
            Self::Busy => 6,
            Self::Invalid => 7,
            Self::Internal => 8,
        }
    }

    const fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Version,
            2 => Self::Identity,
            3 => Self::DiskExists,
            4 => Self::Unknown,
            5 => Self::NoSpace,
            6 => Self::Busy,
            7 => Self::Invalid,
            _ => Self::Internal,
        }
    }
}

/// A node's no, with words for a person.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people.
    pub text: String,
}

/// The answer to a [`Hello`] or an [`Offer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Yes to a hello.
    Welcome {
        /// The version both will speak.
        version: u16,
        /// The optional parts both will use.
        features: Features,
        /// The name of the node that answers.
        node: String,
    },
    /// Yes to an offer: the image is ready to receive, and holds this of the disk. Others than
    /// [`OlderCopy::None`] only to nodes with [`Features::DELTAS`], and [`OlderCopy::Zeroes`] only to those with
    /// [`Features::ZEROES`].
    Accepted(OlderCopy),
    /// No; the connection is closed after it.
    Refused(Refusal),
}

impl Reply {
    /// The optional parts that both sides use from here on.
    pub const fn features(&self) -> Features {
        match self {
            Self::Welcome { features, .. } => *features,
            Self::Accepted(_) | Self::Refused(_) => Features(0),
        }
    }
}

/// Any greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Greeting {
    /// See [`Hello`].
    Hello(Hello),
    /// See [`Offer`].
    Offer(Offer),
    /// See [`Reply`].
    Reply(Reply),
}

impl Greeting {
    /// The whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(128);
        let mut status = 0;
        let kind = match self {
            Self::Hello(hello) => {
                put(&mut body, &hello.min_version.to_le_bytes());
                put(&mut body, &hello.max_version.to_le_bytes());
                put(&mut body, &hello.features.0.to_le_bytes());
                body.push(hello.class.code());
                body.push(match hello.purpose {
                    Purpose::Migrate => 1,
                    Purpose::Resolve => 2,
                    Purpose::Forward => 3,
                    Purpose::Machine => 4,
                    Purpose::Pull => 5,
                    Purpose::Image => 6,
                    Purpose::Process => 7,
                });
                put(&mut body, &hello.migration.0);
                put_text(&mut body, &hello.node, MAX_NAME);
                put_text(&mut body, &hello.disk, MAX_NAME);
                Kind::Hello
            }
            Self::Offer(offer) => {
                put(&mut body, &offer.epoch.0.to_le_bytes());
                put(&mut body, &offer.capacity.0.to_le_bytes());
                put(&mut body, &offer.allocated.to_le_bytes());
                put(&mut body, &offer.chunk_sectors.to_le_bytes());
                put(&mut body, &offer.window_chunks.to_le_bytes());
                body.push(offer.copy_connections);
                let names_policy = offer.policy != TransferPolicy::default()
                    || offer.image.is_some()
                    || offer.id.is_some();
                match &offer.place {
                    // Older nodes know nothing of what would follow.
                    None if names_policy => body.push(0),
                    None => {}
                    Some(Place::Pool(name)) => {
                        body.push(1);
                        put_text(&mut body, name, MAX_NAME);
                    }
                    Some(Place::Path(path)) => {
                        body.push(2);
                        put_text(&mut body, path, MAX_PLACE);
                    }
                }
                if names_policy {
                    body.push(offer.policy.code());
                }
                match &offer.image {
                    None if offer.id.is_some() => body.push(0),
                    None => {}
                    Some(image) => {
                        body.push(1 + u8::from(image.prefetch));
                        put_text(&mut body, &image.image, MAX_NAME);
                        put_text(&mut body, &image.manifest, MAX_NAME);
                    }
                }
                if let Some(id) = &offer.id {
                    put(&mut body, &id.0);
                }
                Kind::Offer
            }
            Self::Reply(Reply::Welcome {
                version,
                features,
                node,
            }) => {
                put(&mut body, &version.to_le_bytes());
                put(&mut body, &features.0.to_le_bytes());
                put_text(&mut body, node, MAX_NAME);
                Kind::Welcome
            }
            Self::Reply(Reply::Accepted(older)) => {
                match older {
                    // Older nodes know nothing of what would follow.
                    OlderCopy::None => {}
                    OlderCopy::Since(migration) => {
                        body.push(1);
                        put(&mut body, &migration.0);
                    }
                    OlderCopy::Unknown => body.push(2),
                    OlderCopy::Zeroes => body.push(3),
                }
                Kind::Accepted
            }
            Self::Reply(Reply::Refused(refusal)) => {
                status = refusal.code.code();
                put_text(&mut body, &refusal.text, MAX_TEXT);
                Kind::Refused
            }
        };
        let header = Header {
            payload_length: body.len() as u32,
            status,
            ..Header::new(kind)
        };
        let mut frame = Vec::with_capacity(HEADER_SIZE + body.len());
        frame.extend_from_slice(&header.encode());
        frame.extend_from_slice(&body);
        frame
    }

    /// Reads a greeting whose header is known; `body` is its payload. A hello from a later version
    /// may be longer than this build knows: what comes after is ignored.
    ///
    /// # Errors
    /// [`DecodeError`] when it is not a greeting, is cut short, or names something too long.
    pub fn decode(header: &Header, body: &[u8]) -> Result<Self, DecodeError> {
        if header.payload_length > GREETING_LIMIT || header.payload_length as usize != body.len() {
            return Err(DecodeError::PayloadLength(header.payload_length));
        }
        let mut from = body;
        Ok(match header.kind {
            Kind::Hello => Self::Hello(Hello {
                min_version: u16::from_le_bytes(take(&mut from)?),
                max_version: u16::from_le_bytes(take(&mut from)?),
                features: Features(u32::from_le_bytes(take(&mut from)?)),
                class: {
                    let [code] = take(&mut from)?;
                    TrafficClass::from_code(code).ok_or(DecodeError::Field("traffic class"))?
                },
                purpose: match take(&mut from)? {
                    [1] => Purpose::Migrate,
                    [2] => Purpose::Resolve,
                    [3] => Purpose::Forward,
                    [4] => Purpose::Machine,
                    [5] => Purpose::Pull,
                    [6] => Purpose::Image,
                    [7] => Purpose::Process,
                    _ => return Err(DecodeError::Field("purpose")),
                },
                migration: MigrationId(take(&mut from)?),
                node: take_text(&mut from, MAX_NAME)?,
                disk: take_text(&mut from, MAX_NAME)?,
            }),
            Kind::Offer => Self::Offer(Offer {
                epoch: Epoch(u64::from_le_bytes(take(&mut from)?)),
                capacity: Sectors(u64::from_le_bytes(take(&mut from)?)),
                allocated: u64::from_le_bytes(take(&mut from)?),
                chunk_sectors: u32::from_le_bytes(take(&mut from)?),
                window_chunks: u16::from_le_bytes(take(&mut from)?),
                copy_connections: u8::from_le_bytes(take(&mut from)?),
                place: match take::<1>(&mut from) {
                    Err(_) | Ok([0]) => None,
                    Ok([1]) => Some(Place::Pool(take_text(&mut from, MAX_NAME)?)),
                    Ok([2]) => Some(Place::Path(take_text(&mut from, MAX_PLACE)?)),
                    Ok(_) => return Err(DecodeError::Field("place")),
                },
                policy: match take(&mut from) {
                    Err(_) => TransferPolicy::default(),
                    Ok([code]) => {
                        TransferPolicy::from_code(code).ok_or(DecodeError::Field("policy"))?
                    }
                },
                image: match take(&mut from) {
                    Err(_) | Ok([0]) => None,
                    Ok([how @ 1..=2]) => Some(OfferedImage {
                        image: take_text(&mut from, MAX_NAME)?,
                        manifest: take_text(&mut from, MAX_NAME)?,
                        prefetch: how == 2,
                    }),
                    Ok(_) => return Err(DecodeError::Field("image")),
                },
                id: match from.is_empty() {
                    true => None,
                    false => Some(DiskId(take(&mut from)?)),
                },
            }),
            Kind::Welcome => Self::Reply(Reply::Welcome {
                version: u16::from_le_bytes(take(&mut from)?),
                features: Features(u32::from_le_bytes(take(&mut from)?)),
                node: take_text(&mut from, MAX_NAME)?,
            }),
            Kind::Accepted => Self::Reply(Reply::Accepted(match take(&mut from) {
                Err(_) | Ok([0]) => OlderCopy::None,
                Ok([1]) => OlderCopy::Since(MigrationId(take(&mut from)?)),
                Ok([2]) => OlderCopy::Unknown,
                Ok([3]) => OlderCopy::Zeroes,
                Ok(_) => return Err(DecodeError::Field("older copy")),
            })),
            Kind::Refused => Self::Reply(Reply::Refused(Refusal {
                code: RefusalCode::from_code(header.status),
                text: take_text(&mut from, MAX_TEXT)?,
            })),
            other => return Err(DecodeError::Kind(other as u8)),
        })
    }
}

impl Hello {
    /// The version to speak with the sender, if there is one.
    pub const fn agree(&self) -> Option<u16> {
        if self.min_version <= PROTOCOL_VERSION && self.max_version >= self.min_version {
            let highest = if self.max_version < PROTOCOL_VERSION {
                self.max_version
            } else {
                PROTOCOL_VERSION
            };
            if highest < MIN_PROTOCOL_VERSION {
                None
            } else {
                Some(highest)
            }
        } else {
            None
        }
    }
}

fn put(body: &mut Vec<u8>, bytes: &[u8]) {
    body.extend_from_slice(bytes);
}

/// Writes at most `limit` bytes of the text, cut at a character's boundary.
fn put_text(body: &mut Vec<u8>, text: &str, limit: usize) {
    let text = &text[..text.floor_char_boundary(limit)];
    put(body, &(text.len() as u16).to_le_bytes());
    put(body, text.as_bytes());
}

fn take<const N: usize>(from: &mut &[u8]) -> Result<[u8; N], DecodeError> {
    let (head, rest) = from.split_first_chunk().ok_or(DecodeError::Body)?;
    *from = rest;
    Ok(*head)
}

fn take_text(from: &mut &[u8], limit: usize) -> Result<String, DecodeError> {
    let length = usize::from(u16::from_le_bytes(take(from)?));
    if length > limit {
        return Err(DecodeError::Field("text length"));
    }
    let (text, rest) = from.split_at_checked(length).ok_or(DecodeError::Body)?;
    *from = rest;
    core::str::from_utf8(text)
        .map(str::to_owned)
        .map_err(|_| DecodeError::Field("text"))
}

#[cfg(test)]
mod tests;
