//! The arrival and departure of clients.
//!
//! A client that leaves with unanswered requests may go on at another node, or by another connection. So the engine
//! looks for hung-up clients before serving a new client, and before sending forwarded requests again. Their last
//! requests may still lie in the kernel, behind others that this thread reads first, or may have arrived while this
//! thread stood still.

use std::os::fd::{AsFd, BorrowedFd};

use godwit_core::request::RequestTag;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::engine::connections::receive::Lost;
use crate::engine::connections::{ConnectionKey, Life};
use crate::engine::run::Engine;
use crate::engine::slots::Owner;
use godwit_io::stream::StreamError;

impl Engine {
    /// Handles a client that attaches to this node.
    pub(in crate::engine) fn client_attaches(&mut self) {
        self.look_for_hang_ups();
        self.cx.core.handle_client_attached(self.cx.now);
        self.drain();
    }

    /// Closes the connections of hung-up clients, with their unread requests, and gives up the requests of a virtual
    /// machine whose QEMU has hung up.
    pub(in crate::engine) fn look_for_hang_ups(&mut self) {
        let clients = self
            .connections
            .iter()
            .filter(|connection| connection.is_client() && connection.life != Life::Closing)
            .map(|connection| (connection.key, connection.stream.socket()));
        let gone = hung_up(clients);
        for key in gone {
            self.lost(key, &Lost::Stream(StreamError::Closed));
        }
        let front_end = self.vhost.front_end.as_ref();
        let socket = front_end.map(|front_end| ((), front_end.socket().as_fd()));
        if !hung_up(socket.into_iter()).is_empty() {
            self.give_up(|owner| matches!(owner, Owner::Ring { .. }));
        }
    }

    /// Handles the loss of a client's connection.
    pub(in crate::engine) fn client_left(&mut self, key: ConnectionKey) {
        let is_its =
            |owner: Owner| matches!(owner, Owner::Client { connection, .. } if connection == key);
        let tags = self.memory.slots.owned_by(is_its);
        self.cx.core.handle_client_left(self.cx.now, tags);
        self.drain();
    }

    /// Handles the loss of the virtual machine's QEMU. The next server of the machine repeats its requests.
    pub(in crate::engine) fn front_end_left(&mut self) {
        let tags = self
            .memory
            .slots
            .owned_by(|owner| matches!(owner, Owner::Ring { .. }));
        self.cx.core.handle_client_left(self.cx.now, tags);
        self.drain();
    }

    fn give_up(&mut self, is_its: impl Fn(Owner) -> bool) {
        let tags: Vec<RequestTag> = self.memory.slots.owned_by(is_its);
        self.cx.core.handle_requests_given_up(self.cx.now, tags);
        self.drain();
    }
}

/// Returns the keys of sockets whose other ends are closed. In doubt returns none.
fn hung_up<'a, K: Copy>(sockets: impl Iterator<Item = (K, BorrowedFd<'a>)>) -> Vec<K> {
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let (keys, mut polled): (Vec<_>, Vec<_>) = sockets
        .map(|(key, socket)| (key, PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)))
        .unzip();
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match poll(&mut polled, Some(&now)) {
        Ok(0) | Err(_) => Vec::new(),
        Ok(_) => keys
            .into_iter()
            .zip(&polled)
            .filter(|(_, polled)| polled.revents().intersects(gone))
            .map(|(key, _)| key)
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn who_has_hung_up_is_known_although_its_words_are_not_read() {
        let (here, mut there) = UnixStream::pair().expect("a pair");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut far = TcpStream::connect(address).expect("connected");
        let (near, _) = listener.accept().expect("accepted");
        there.write_all(b"last words").expect("sent");
        far.write_all(b"last words").expect("sent");
        let gone = || hung_up([(1, here.as_fd()), (2, near.as_fd())].into_iter());
        assert_eq!(gone(), [0; 0]);
        drop(there);
        assert_eq!(gone(), [1]);
        drop(far);
        while gone() != [1, 2] {
            std::thread::yield_now();
        }
    }
}
