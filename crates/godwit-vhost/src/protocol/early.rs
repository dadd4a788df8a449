//! Rings that a front end enables before it has said which features it takes.
//!
//! QEMU does so with NICs. The `vhost` crate takes that message only after `SET_FEATURES` with protocol features, and
//! would end the connection. So the message is recognized before the crate sees it, and carried out here.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use rustix::net::RecvFlags;
use vhost::vhost_user::message::FrontendReq;

/// Bytes of a message's header: what is asked, flags, and bytes that follow, each a u32 of this machine's order.
const HEADER: usize = 12;
/// Bytes that follow: a ring's index and whether it is enabled, each a u32.
const BODY: usize = 8;
/// The sender waits for an answer.
const NEEDS_REPLY: u32 = 1 << 3;
/// The version of the protocol, and that this is an answer.
const IS_REPLY: u32 = 1 | 1 << 2;

/// A ring is to be enabled, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Enable {
    pub(crate) ring: u32,
    pub(crate) enabled: bool,
    needs_reply: bool,
}

/// Takes the next message if it enables a ring, and leaves any other.
pub(crate) fn take(socket: &mut UnixStream) -> io::Result<Option<Enable>> {
    let mut header = [0_u8; HEADER];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    let (seen, _) = rustix::net::recv(&*socket, &mut header, flags)?;
    let [request, flags, length] = words(&header);
    let is_enable = request == FrontendReq::SET_VRING_ENABLE as u32;
    if seen < HEADER || !is_enable || length as usize != BODY {
        // The crate says what is wrong with it, if anything is.
        return Ok(None);
    }
    let mut message = [0; HEADER + BODY];
    socket.read_exact(&mut message)?;
    let [_, _, _, ring, enabled] = words(&message);
    Ok(Some(Enable {
        ring,
        enabled: enabled != 0,
        needs_reply: flags & NEEDS_REPLY != 0,
    }))
}

/// Answers a message, if an answer is waited for.
pub(crate) fn answer(socket: &mut UnixStream, enable: Enable, done: bool) -> io::Result<()> {
    if !enable.needs_reply {
        return Ok(());
    }
    let header = [FrontendReq::SET_VRING_ENABLE as u32, IS_REPLY, BODY as u32];
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

    fn message(request: FrontendReq, flags: u32, body: &[u32]) -> Vec<u8> {
        let length = body.len() as u32 * 4;
        let header = [request as u32, flags, length];
        let words = header.iter().chain(body);
        words.flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn only_messages_that_enable_rings_are_taken() {
        let (mut here, mut there) = UnixStream::pair().expect("a pair");
        let enable = message(FrontendReq::SET_VRING_ENABLE, 1 | NEEDS_REPLY, &[3, 1]);
        there.write_all(&enable).expect("writes");
        let other = message(FrontendReq::SET_VRING_NUM, 1, &[3, 256]);
        there.write_all(&other).expect("writes");
        let taken = take(&mut here).expect("reads").expect("enables a ring");
        assert_eq!((taken.ring, taken.enabled), (3, true));
        answer(&mut here, taken, true).expect("writes");
        let mut reply = [0; HEADER + 8];
        there.read_exact(&mut reply).expect("an answer");
        assert_eq!(reply[HEADER..], [0; 8], "it was done");
        assert_eq!(take(&mut here).expect("looks"), None);
        let mut left = vec![0; other.len()];
        here.read_exact(&mut left).expect("is left");
        assert_eq!(left, other);
        drop(there);
        assert_eq!(
            take(&mut here).expect("looks"),
            None,
            "the end is the crate's to see"
        );
    }
}
