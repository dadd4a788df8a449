//! Messages that the `vhost` crate would reject, and end the connection for. They are recognized before the crate sees
//! them, and carried out here.
//!
//! - A ring is enabled before the front end has acknowledged its features, as QEMU does with NICs: the crate takes this
//!   message only after `SET_FEATURES` with protocol features.
//! - A machine is announced (`SEND_RARP`): the crate does not know this message.
//! - Slots of arriving memory are acknowledged although none has changed: QEMU gives such a message no request.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use rustix::net::RecvFlags;
use vhost::vhost_user::message::FrontendReq;

/// The request of a message without one.
const NONE: u32 = 0;
/// Bytes of a message's header: request, flags, and length of the body, each a u32 in this machine's byte order.
const HEADER: usize = 12;
/// Length of the body, of all messages: a ring's index and a flag to enable the ring, each a u32; a MAC address and two
/// more bytes; or nothing but zeroes.
const BODY: usize = 8;
/// The sender waits for an answer.
const NEEDS_REPLY: u32 = 1 << 3;
/// The version of the protocol, and the flag of an answer.
const IS_REPLY: u32 = 1 | 1 << 2;

/// The messages to take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Takes {
    pub(crate) enable: bool,
    pub(crate) announce: bool,
    pub(crate) unchanged: bool,
}

/// The request of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Enable or disable a ring.
    Enable { ring: u32, enabled: bool },
    /// Tell the network that a machine with this MAC address is here.
    Announce { mac: [u8; 6] },
    /// Go on with the memory as it is.
    Unchanged,
}

/// A message that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) asked: Asked,
    request: u32,
    needs_reply: bool,
}

/// Takes the next message if `takes` names its kind, and leaves any other in the socket.
pub(crate) fn take(socket: &mut UnixStream, takes: Takes) -> io::Result<Option<Message>> {
    const ENABLE: u32 = FrontendReq::SET_VRING_ENABLE as u32;
    const ANNOUNCE: u32 = FrontendReq::SEND_RARP as u32;
    if !takes.enable && !takes.announce && !takes.unchanged {
        return Ok(None);
    }
    let mut header = [0_u8; HEADER];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    let (seen, _) = rustix::net::recv(&*socket, &mut header, flags)?;
    let [request, flags, length] = words(&header);
    let is_taken = match request {
        ENABLE => takes.enable,
        ANNOUNCE => takes.announce,
        NONE => takes.unchanged,
        _ => false,
    };
    if !is_taken || seen < HEADER || length as usize != BODY {
        // The crate reports any error in the message.
        return Ok(None);
    }
    let mut message = [0; HEADER + BODY];
    socket.read_exact(&mut message)?;
    let [_, _, _, ring, enabled] = words(&message);
    let asked = match message[HEADER..].first_chunk() {
        Some(mac) if request == ANNOUNCE => Asked::Announce { mac: *mac },
        _ if request == NONE => Asked::Unchanged,
        _ => Asked::Enable {
            ring,
            enabled: enabled != 0,
        },
    };
    Ok(Some(Message {
        asked,
        request,
        needs_reply: flags & NEEDS_REPLY != 0,
    }))
}

/// Answers a message if the sender waits for an answer.
pub(crate) fn answer(socket: &mut UnixStream, message: Message, done: bool) -> io::Result<()> {
    if !message.needs_reply {
        return Ok(());
    }
    let header = [message.request, IS_REPLY, BODY as u32];
    let mut message: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    message.extend_from_slice(&u64::from(!done).to_ne_bytes());
    socket.write_all(&message)
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    std::array::from_fn(|word| {
        let part = bytes[word * 4..].first_chunk();
        u32::from_ne_bytes(part.copied().unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Takes = Takes {
        enable: true,
        announce: true,
        unchanged: true,
    };

    fn message(request: FrontendReq, flags: u32, body: &[u32]) -> Vec<u8> {
        let length = body.len() as u32 * 4;
        let header = [request as u32, flags, length];
        let words = header.iter().chain(body);
        words.flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn only_messages_that_the_crate_does_not_take_are_taken() {
        let (mut here, mut there) = UnixStream::pair().expect("a pair");
        let enable = message(FrontendReq::SET_VRING_ENABLE, 1 | NEEDS_REPLY, &[3, 1]);
        there.write_all(&enable).expect("writes");
        let mut announce = message(FrontendReq::SEND_RARP, 1, &[0, 0]);
        announce[HEADER..HEADER + 6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        there.write_all(&announce).expect("writes");
        let other = message(FrontendReq::SET_VRING_NUM, 1, &[3, 256]);
        there.write_all(&other).expect("writes");
        let only = |enable, announce| Takes {
            enable,
            announce,
            unchanged: false,
        };
        assert_eq!(take(&mut here, only(false, true)).expect("looks"), None);
        let taken = take(&mut here, ALL).expect("reads").expect("is ours");
        let (ring, enabled) = (3, true);
        assert_eq!(taken.asked, Asked::Enable { ring, enabled });
        answer(&mut here, taken, true).expect("writes");
        let mut reply = [0; HEADER + 8];
        there.read_exact(&mut reply).expect("an answer");
        assert_eq!(reply[HEADER..], [0; 8], "it was done");
        assert_eq!(take(&mut here, only(true, false)).expect("looks"), None);
        let taken = take(&mut here, ALL).expect("reads").expect("is ours");
        let mac = [2, 0, 0, 0, 0, 9];
        assert_eq!(taken.asked, Asked::Announce { mac });
        assert_eq!(take(&mut here, ALL).expect("looks"), None);
        let mut left = vec![0; other.len()];
        here.read_exact(&mut left).expect("is left");
        assert_eq!(left, other);
        let unchanged = [NONE, 1, 8, 0, 0].map(u32::to_ne_bytes).concat();
        there.write_all(&unchanged).expect("writes");
        assert_eq!(take(&mut here, only(true, true)).expect("looks"), None);
        let taken = take(&mut here, ALL).expect("reads").expect("is ours");
        assert_eq!(taken.asked, Asked::Unchanged);
        drop(there);
        assert_eq!(
            take(&mut here, ALL).expect("looks"),
            None,
            "the end is the crate's to see"
        );
    }
}
