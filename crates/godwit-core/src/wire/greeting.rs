//! Greetings that two nodes exchange before their controllers talk: identities, the common protocol, and the disk to
//! move.

use super::DecodeError;
use super::TrafficClass;
use super::header::{HEADER_SIZE, Header, Kind};
use crate::controller::{
    ActiveAreas, DOUBLE_WRITE, MAX_AREAS, OlderCopy, POLICIES, PolicyDescription,
};
use crate::units::{DiskId, Epoch, MigrationId, Sectors};

/// Protocol version of this build. An old and a new node agree on the highest version known to both.
pub const PROTOCOL_VERSION: u16 = 2;

/// Oldest supported protocol version: earlier versions could carry out a forwarded request twice, or after its client
/// had left.
pub const MIN_PROTOCOL_VERSION: u16 = 2;

/// Maximum bytes of a node's or disk's name.
pub const MAX_NAME: usize = 128;

/// Maximum bytes of a greeting's payload.
pub const GREETING_LIMIT: u32 = 4096;

const MAX_TEXT: usize = 2048;

/// Code of an older copy that differs in the areas of a log.
const BUT: u8 = 4;

/// Maximum bytes of a path in an offer.
pub const MAX_PLACE: usize = 1024;

/// Optional parts of the protocol, one bit each. Unknown bits are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u32);

impl Features {
    /// The data after the welcome of a sync or copy connection is not encrypted. Only for nodes that trust the network.
    pub const CLEAR_DATA: Self = Self(1);

    /// The data of copies, double writes and delayed writes may be compressed.
    pub const COMPRESSION: Self = Self(2);

    /// An offer may name a place for the disk. A node without this feature would use its default place.
    pub const PLACES: Self = Self(4);

    /// A verification may announce an extent as a hole.
    pub const HOLES: Self = Self(8);

    /// An offer may name a policy. A node without this feature supports double writes only.
    pub const POLICIES: Self = Self(16);

    /// A disk may change hands before all of it has arrived, and the rest is pulled.
    pub const PULLS: Self = Self(32);

    /// The answer to an offer may announce an older copy of the disk at the destination.
    pub const DELTAS: Self = Self(64);
    /// An offer may be of a disk on an image, which the destination fetches from its own repository.
    pub const IMAGES: Self = Self(128);

    /// The node gives chunks of images to nodes that ask with [`Purpose::Image`].
    pub const IMAGE_CHUNKS: Self = Self(256);

    /// The blocks that an owner lacks may be in two places: in the disk's image, and at the node that gave the disk
    /// away.
    pub const TWO_PLACES: Self = Self(512);

    /// Connections for chunks of images also resolve an image's name.
    pub const IMAGE_NAMES: Self = Self(1024);

    /// The answer to an offer may announce that the destination's image reads as zeroes.
    pub const ZEROES: Self = Self(2048);

    /// A machine may have NICs whose guest announces itself. A node without this feature does not offer announcements
    /// to guests, and so has no QEMU that takes such a guest.
    pub const ANNOUNCING_GUESTS: Self = Self(4096);

    /// An offer names the disk's id, and nodes that meet compare the disks and machines that both claim to have.
    pub const OWNERS: Self = Self(1 << 16);

    /// The owner of a disk gives the owing node signs of life: a [`Message::Ping`](super::Message::Ping) on the pull
    /// connection.
    pub const OWNER_BEATS: Self = Self(1 << 17);

    /// A destination may [follow](super::Message::Follow) a disk that stays at its source.
    pub const FOLLOWS: Self = Self(1 << 18);

    /// The node stores grants of protected machines for nodes that ask with [`Purpose::Witness`].
    pub const WITNESS: Self = Self(1 << 19);

    /// A destination that follows may keep writes apart behind each [checkpoint](super::Message::CheckpointMark).
    pub const CHECKPOINTS: Self = Self(1 << 20);

    /// The answer to an offer may announce a former primary's disk, with its activity log.
    pub const ACTIVITY: Self = Self(1 << 21);

    /// Returns the union of both sets.
    #[must_use]
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Returns the intersection of both sets.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns true if the set contains all of `others`.
    #[must_use]
    pub const fn contain(self, others: Self) -> bool {
        self.common(others).0 == others.0
    }
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To move a disk; on the control connection an [`Offer`] follows.
    Migrate,
    /// To determine the owner of a disk after a crash; control connection only.
    Resolve,
    /// To forward the I/O of clients that stayed after switchover; sync connection only.
    Forward,
    /// To move a virtual machine, named in the disk's place. On the control connection the nodes agree step by step; a
    /// copy connection carries the machine's memory.
    Machine,
    /// To give the owner of a disk the missing blocks; pull connection only.
    Pull,
    /// To ask for chunks of images; pull connection only, and only to nodes with [`Features::IMAGE_CHUNKS`].
    Image,
    /// To move a process with its RDMA connections: to the destination node, and to the nodes of its partners; control
    /// connection only. No disk is named.
    Process,
    /// To ask for the grant of a protected machine, or change the grant; control connection only, and only to nodes with
    /// [`Features::WITNESS`]. The id of the protection stands in the migration's place.
    Witness,
}

/// The first frame on every connection, from the node that opened it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Lowest protocol version of the sender.
    pub min_version: u16,
    /// Highest protocol version of the sender.
    pub max_version: u16,
    /// Optional parts that the sender supports and wants.
    pub features: Features,
    /// Traffic class of the connection.
    pub class: TrafficClass,
    /// Purpose of the connection.
    pub purpose: Purpose,
    /// Migration of the connection.
    pub migration: MigrationId,
    /// The sender's node name; with TLS it must match the certificate.
    pub node: String,
    /// Name of the disk.
    pub disk: String,
}

/// Place that the source requests for a disk at the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A folder named by the destination.
    Pool(String),
    /// A path: of a file to be created, or of a block device.
    Path(String),
}

/// The image that a disk was created from, and leaves behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedImage {
    /// The image's name, for people.
    pub image: String,
    /// The manifest's name, which stands for the image's content.
    pub manifest: String,
    /// True if blocks without requests are fetched too.
    pub prefetch: bool,
}

/// The source's offer of a disk; follows the hello on a migration's control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The epoch in which the destination will serve.
    pub epoch: Epoch,
    /// The disk's size.
    pub capacity: Sectors,
    /// Bytes that the image occupies at the source. The destination can refuse for lack of space.
    pub allocated: u64,
    /// Longest copy in sectors.
    pub chunk_sectors: u32,
    /// Maximum number of chunks in flight.
    pub window_chunks: u16,
    /// Copy connections that the source opens beside the control and sync connections.
    pub copy_connections: u8,
    /// Place for the disk; `None`: chosen by the destination. Only for nodes with [`Features::PLACES`].
    pub place: Option<Place>,
    /// Policy of the move. Only for nodes with the features that the policy needs.
    pub policy: &'static PolicyDescription,
    /// The image with the blocks that the source does not send. Only for nodes with [`Features::IMAGES`].
    pub image: Option<OfferedImage>,
    /// The disk's id, which distinguishes disks of the same name. Only for nodes with [`Features::OWNERS`].
    pub id: Option<DiskId>,
}

/// Reason for a refusal, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// No common protocol version.
    Version,
    /// The certificate does not match the claimed node name.
    Identity,
    /// A disk of this name exists and is in use.
    DiskExists,
    /// No such disk or migration.
    Unknown,
    /// Not enough space.
    NoSpace,
    /// Busy with another migration of this disk, or at its limit.
    Busy,
    /// The request is malformed or makes no sense.
    Invalid,
    /// An internal failure of the node.
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

/// A node's refusal, with a text for people.
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
    /// Acceptance of a hello.
    Welcome {
        /// Protocol version of the connection.
        version: u16,
        /// Optional parts that both nodes will use.
        features: Features,
        /// Name of the answering node.
        node: String,
    },
    /// Acceptance of an offer: the image is ready to receive, and holds this older copy of the disk. Values other than
    /// [`OlderCopy::None`] only to nodes with [`Features::DELTAS`], and [`OlderCopy::Zeroes`] only to nodes with
    /// [`Features::ZEROES`].
    Accepted(OlderCopy),
    /// Acceptance of an offer: the image is the disk as taken, except for these areas. Needs [`Features::ACTIVITY`].
    AcceptedBut(ActiveAreas),
    /// Refusal; the connection is closed afterwards.
    Refused(Refusal),
}

impl Reply {
    /// Returns the optional parts that both nodes use from here on.
    pub const fn features(&self) -> Features {
        match self {
            Self::Welcome { features, .. } => *features,
            Self::Accepted(_) | Self::AcceptedBut(_) | Self::Refused(_) => Features(0),
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
    /// Returns the whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(128);
        let mut status = 0;
        let kind = match self {
            Self::Hello(hello) => {
                hello.put(&mut body);
                Kind::Hello
            }
            Self::Offer(offer) => {
                offer.put(&mut body);
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
                older.put(&mut body);
                Kind::Accepted
            }
            Self::Reply(Reply::AcceptedBut(log)) => {
                body.push(BUT);
                put(&mut body, &log.of.0);
                body.extend(log.areas.iter().flat_map(|area| area.to_le_bytes()));
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

    /// Reads a greeting whose header is known; `body` is the payload. A hello from a later version may be longer than
    /// known to this build: extra bytes are ignored.
    ///
    /// # Errors
    /// [`DecodeError`] if the frame is not a greeting, is cut short, or contains a text that is too long.
    pub fn decode(header: &Header, body: &[u8]) -> Result<Self, DecodeError> {
        if header.payload_length > GREETING_LIMIT || header.payload_length as usize != body.len() {
            return Err(DecodeError::PayloadLength(header.payload_length));
        }
        let mut from = body;
        Ok(match header.kind {
            Kind::Hello => Self::Hello(Hello::take(&mut from)?),
            Kind::Offer => Self::Offer(Offer::take(&mut from)?),
            Kind::Welcome => Self::Reply(Reply::Welcome {
                version: u16::from_le_bytes(take(&mut from)?),
                features: Features(u32::from_le_bytes(take(&mut from)?)),
                node: take_text(&mut from, MAX_NAME)?,
            }),
            Kind::Accepted if body.first() == Some(&BUT) => {
                Self::Reply(Reply::AcceptedBut(take_activity(&body[1..])?))
            }
            Kind::Accepted => Self::Reply(Reply::Accepted(OlderCopy::take(&mut from)?)),
            Kind::Refused => Self::Reply(Reply::Refused(Refusal {
                code: RefusalCode::from_code(header.status),
                text: take_text(&mut from, MAX_TEXT)?,
            })),
            other => return Err(DecodeError::Kind(other as u8)),
        })
    }
}

impl Hello {
    fn put(&self, body: &mut Vec<u8>) {
        put(body, &self.min_version.to_le_bytes());
        put(body, &self.max_version.to_le_bytes());
        put(body, &self.features.0.to_le_bytes());
        body.push(self.class.code());
        body.push(match self.purpose {
            Purpose::Migrate => 1,
            Purpose::Resolve => 2,
            Purpose::Forward => 3,
            Purpose::Machine => 4,
            Purpose::Pull => 5,
            Purpose::Image => 6,
            Purpose::Process => 7,
            Purpose::Witness => 8,
        });
        put(body, &self.migration.0);
        put_text(body, &self.node, MAX_NAME);
        put_text(body, &self.disk, MAX_NAME);
    }

    fn take(from: &mut &[u8]) -> Result<Self, DecodeError> {
        Ok(Self {
            min_version: u16::from_le_bytes(take(from)?),
            max_version: u16::from_le_bytes(take(from)?),
            features: Features(u32::from_le_bytes(take(from)?)),
            class: {
                let [code] = take(from)?;
                TrafficClass::from_code(code).ok_or(DecodeError::Field("traffic class"))?
            },
            purpose: match take(from)? {
                [1] => Purpose::Migrate,
                [2] => Purpose::Resolve,
                [3] => Purpose::Forward,
                [4] => Purpose::Machine,
                [5] => Purpose::Pull,
                [6] => Purpose::Image,
                [7] => Purpose::Process,
                [8] => Purpose::Witness,
                _ => return Err(DecodeError::Field("purpose")),
            },
            migration: MigrationId(take(from)?),
            node: take_text(from, MAX_NAME)?,
            disk: take_text(from, MAX_NAME)?,
        })
    }
    /// Returns the version to speak with the sender, if there is a common one.
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

impl Offer {
    fn put(&self, body: &mut Vec<u8>) {
        put(body, &self.epoch.0.to_le_bytes());
        put(body, &self.capacity.0.to_le_bytes());
        put(body, &self.allocated.to_le_bytes());
        put(body, &self.chunk_sectors.to_le_bytes());
        put(body, &self.window_chunks.to_le_bytes());
        body.push(self.copy_connections);
        let named = self.policy.needs.contain(Features::POLICIES);
        let names_policy = named || self.image.is_some() || self.id.is_some();
        match &self.place {
            // Older nodes do not know the following fields.
            None if names_policy => body.push(0),
            None => {}
            Some(Place::Pool(name)) => {
                body.push(1);
                put_text(body, name, MAX_NAME);
            }
            Some(Place::Path(path)) => {
                body.push(2);
                put_text(body, path, MAX_PLACE);
            }
        }
        if names_policy {
            body.push(self.policy.code);
        }
        match &self.image {
            None if self.id.is_some() => body.push(0),
            None => {}
            Some(image) => {
                body.push(1 + u8::from(image.prefetch));
                put_text(body, &image.image, MAX_NAME);
                put_text(body, &image.manifest, MAX_NAME);
            }
        }
        if let Some(id) = &self.id {
            put(body, &id.0);
        }
    }

    fn take(from: &mut &[u8]) -> Result<Self, DecodeError> {
        Ok(Self {
            epoch: Epoch(u64::from_le_bytes(take(from)?)),
            capacity: Sectors(u64::from_le_bytes(take(from)?)),
            allocated: u64::from_le_bytes(take(from)?),
            chunk_sectors: u32::from_le_bytes(take(from)?),
            window_chunks: u16::from_le_bytes(take(from)?),
            copy_connections: u8::from_le_bytes(take(from)?),
            place: match take::<1>(from) {
                Err(_) | Ok([0]) => None,
                Ok([1]) => Some(Place::Pool(take_text(from, MAX_NAME)?)),
                Ok([2]) => Some(Place::Path(take_text(from, MAX_PLACE)?)),
                Ok(_) => return Err(DecodeError::Field("place")),
            },
            policy: match take(from) {
                Err(_) => DOUBLE_WRITE,
                Ok([code]) => {
                    let mut known = POLICIES.into_iter();
                    let policy = known.find(|policy| policy.code == code);
                    policy.ok_or(DecodeError::Field("policy"))?
                }
            },
            image: match take(from) {
                Err(_) | Ok([0]) => None,
                Ok([how @ 1..=2]) => Some(OfferedImage {
                    image: take_text(from, MAX_NAME)?,
                    manifest: take_text(from, MAX_NAME)?,
                    prefetch: how == 2,
                }),
                Ok(_) => return Err(DecodeError::Field("image")),
            },
            id: match from.is_empty() {
                true => None,
                false => Some(DiskId(take(from)?)),
            },
        })
    }
}

impl OlderCopy {
    fn put(&self, body: &mut Vec<u8>) {
        match self {
            // Older nodes do not know the following fields.
            Self::None => {}
            Self::Since(migration) => {
                body.push(1);
                put(body, &migration.0);
            }
            Self::Unknown => body.push(2),
            Self::Zeroes => body.push(3),
        }
    }

    fn take(from: &mut &[u8]) -> Result<Self, DecodeError> {
        Ok(match take(from) {
            Err(_) | Ok([0]) => Self::None,
            Ok([1]) => Self::Since(MigrationId(take(from)?)),
            Ok([2]) => Self::Unknown,
            Ok([3]) => Self::Zeroes,
            Ok(_) => return Err(DecodeError::Field("older copy")),
        })
    }
}

/// Reads an activity log that fills the rest of a greeting.
fn take_activity(mut from: &[u8]) -> Result<ActiveAreas, DecodeError> {
    let of = MigrationId(take(&mut from)?);
    let (areas, rest) = from.as_chunks();
    if areas.len() > MAX_AREAS || !rest.is_empty() {
        return Err(DecodeError::Field("activity log"));
    }
    let areas = areas.iter().map(|area| u32::from_le_bytes(*area)).collect();
    Ok(ActiveAreas { of, areas })
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
