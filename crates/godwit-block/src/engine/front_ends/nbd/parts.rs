//! Requests of clients carried out in pieces: each piece fits a lane, and a client that stalls in the middle of a piece
//! holds only the piece.

use godwit_core::request::{Operation, RequestError, RequestTag};
use godwit_core::units::{Bytes, Extent, Lba, Sectors};

use crate::engine::connections::lanes::LANE;
use crate::engine::connections::receive::Lost;
use crate::engine::connections::{ConnectionKey, Head, Life, Parse, Party};
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Waiter};
use crate::nbd::{ReplyHeader, RequestHeader};
use godwit_io::stream::Frame;

/// The part of a client's request that an engine request covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Part {
    /// The whole request.
    All,
    /// A piece of a write, or of a read whose pieces may be answered in any order.
    Piece {
        whole: WholeKey,
        /// Range after the piece.
        left: Option<Extent>,
    },
    /// A piece of a read whose answer must come in one. Carried out once nothing else of the connection is pending,
    /// with the next piece after it.
    Alone { first: bool, left: Option<Extent> },
}

/// The index of a request of several pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct WholeKey(u32);

/// A request of several pieces.
#[derive(Clone, Copy, Debug)]
struct Whole {
    /// Pieces that were handed over and not answered.
    pieces: u32,
    /// True if no more pieces follow.
    complete: bool,
    /// Error of the first piece that failed.
    failed: Option<RequestError>,
}

/// The requests of several pieces under way: for each connection the one being received, and those with pieces in
/// slots.
#[derive(Default)]
pub(in crate::engine) struct Wholes {
    entries: Vec<Whole>,
    free: Vec<u32>,
}

impl Wholes {
    fn open(&mut self) -> WholeKey {
        let whole = Whole {
            pieces: 0,
            complete: false,
            failed: None,
        };
        match self.free.pop() {
            Some(index) => {
                self.entries[index as usize] = whole;
                WholeKey(index)
            }
            None => {
                self.entries.push(whole);
                WholeKey(self.entries.len() as u32 - 1)
            }
        }
    }

    /// Counts a piece as handed over; the piece is the last if `left` is `None`.
    fn begin(&mut self, key: WholeKey, left: Option<Extent>) {
        let whole = &mut self.entries[key.0 as usize];
        whole.pieces += 1;
        whole.complete = left.is_none();
    }

    /// Counts a piece as answered. Returns the overall result after the last piece.
    fn end(
        &mut self,
        key: WholeKey,
        result: Result<(), RequestError>,
    ) -> Option<Result<(), RequestError>> {
        let whole = &mut self.entries[key.0 as usize];
        whole.pieces -= 1;
        whole.failed = whole.failed.or(result.err());
        let outcome = whole.failed.map_or(Ok(()), Err);
        self.close_if_over(key).then_some(outcome)
    }

    /// Ends a request whose rest will not be received.
    pub(in crate::engine) fn cut_off(&mut self, key: WholeKey) {
        self.entries[key.0 as usize].complete = true;
        self.close_if_over(key);
    }

    fn close_if_over(&mut self, key: WholeKey) -> bool {
        let whole = self.entries[key.0 as usize];
        let over = whole.complete && whole.pieces == 0;
        if over {
            self.free.push(key.0);
        }
        over
    }
}

/// Returns the first piece of a range, and the rest.
fn cut(extent: Extent) -> (Extent, Option<Extent>) {
    let most = Bytes(LANE as u64).sectors().unwrap_or(1) as u32;
    let sectors = extent.sectors().min(most);
    let first = Extent::new(extent.start(), sectors).unwrap_or(extent);
    let next = Lba(extent.start().0 + u64::from(sectors));
    (first, Extent::new(next, extent.sectors() - sectors))
}

/// Returns the request that a piece belongs to.
pub(in crate::engine) const fn whole_of(head: &Head) -> Option<WholeKey> {
    match head {
        Head::Client {
            part: Part::Piece { whole, .. },
            ..
        } => Some(*whole),
        _ => None,
    }
}

/// Returns the next piece of a client's request.
fn following(head: Head) -> Option<Head> {
    let Head::Client {
        request,
        operation,
        rest,
        part,
    } = head
    else {
        return None;
    };
    let (extent, part) = match part {
        Part::All => return None,
        Part::Piece { whole, left } => {
            let (extent, left) = cut(left?);
            (extent, Part::Piece { whole, left })
        }
        Part::Alone { left, .. } => {
            let (extent, left) = cut(left?);
            (extent, Part::Alone { first: false, left })
        }
    };
    let operation = match operation {
        Operation::Write { fua, .. } => Operation::Write { extent, fua },
        _ => Operation::Read(extent),
    };
    Some(Head::Client {
        request,
        operation,
        rest,
        part,
    })
}

impl Engine {
    /// Takes a client's read, write or flush, or its first piece.
    pub(in crate::engine) fn begin_parts(
        &mut self,
        key: ConnectionKey,
        request: RequestHeader,
        operation: Operation,
        structured: bool,
    ) {
        let is_long = |extent: Extent| extent.bytes() > LANE as u64;
        let (operation, part) = match operation {
            Operation::Read(extent) if is_long(extent) => {
                let (first, left) = cut(extent);
                let part = if request.takes_chunks(structured) {
                    let whole = self.connections.wholes.open();
                    Part::Piece { whole, left }
                } else {
                    Part::Alone { first: true, left }
                };
                (Operation::Read(first), part)
            }
            Operation::Write { extent, fua } if is_long(extent) => {
                let (extent, left) = cut(extent);
                let whole = self.connections.wholes.open();
                let part = Part::Piece { whole, left };
                (Operation::Write { extent, fua }, part)
            }
            operation => (operation, Part::All),
        };
        let head = Head::Client {
            request,
            operation,
            rest: None,
            part,
        };
        if let Part::Alone { .. } = part {
            if let Some(connection) = self.connections.get_mut(key) {
                connection.parse = Parse::Alone(Some(head));
            }
            self.go_on_alone(key);
        } else {
            self.admit(key, head, false);
        }
    }

    /// Handles a client's request, or a piece of one, that is complete with its data, and goes on with the next piece.
    pub(in crate::engine) fn part_received(
        &mut self,
        key: ConnectionKey,
        head: Head,
        tag: RequestTag,
    ) {
        let Head::Client {
            operation, part, ..
        } = head
        else {
            return;
        };
        let next = following(head);
        // Set before the handover, which may answer the piece or lose the connection at once.
        if let Some(connection) = self.connections.get_mut(key) {
            match (part, next) {
                (Part::Alone { .. }, next) => connection.parse = Parse::Alone(next),
                (Part::Piece { .. }, Some(next)) => connection.parse = Parse::Waiting(next),
                _ => {}
            }
        }
        if let Part::Piece { whole, left } = part {
            self.connections.wholes.begin(whole, left);
        }
        self.client_request(key, tag, operation);
        let connection = self.connections.get(key);
        let open = connection.is_some_and(|connection| connection.life != Life::Closing);
        if let (Part::Piece { .. }, Some(next), true) = (part, next, open) {
            self.admit(key, next, false);
        }
    }

    /// Resumes a waiting connection at the end of the turn, once all of its requests are answered.
    pub(in crate::engine) fn go_on_alone(&mut self, key: ConnectionKey) {
        if let Some(connection) = self.connections.get(key)
            && let Parse::Alone(_) = connection.parse
            && connection.unanswered == 0
        {
            self.memory
                .slots
                .wait(Class::Client, Waiter::Connection(key));
        }
    }

    /// Passes the controller's answer for a piece to the client.
    pub(super) fn answer_part(
        &mut self,
        tag: RequestTag,
        (key, request, operation, part): (ConnectionKey, RequestHeader, Operation, Part),
        result: Result<(), RequestError>,
    ) {
        let ended = match part {
            Part::Piece { whole, .. } => self.connections.wholes.end(whole, result),
            Part::All | Part::Alone { .. } => None,
        };
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let Party::Client { structured, .. } = connection.party else {
            return;
        };
        if connection.life == Life::Closing {
            return;
        }
        let reply = |result: Result<(), RequestError>| {
            ReplyHeader::new(&request, structured, result.map_err(|e| request.errno(e)))
        };
        let data = match (operation, result) {
            (Operation::Read(extent), Ok(())) => Some(extent),
            _ => None,
        };
        let header = match (part, data) {
            // The client was promised the whole answer.
            (Part::Alone { first: false, .. }, _) if result.is_err() => {
                return self.lost(key, &Lost::Unreadable);
            }
            (Part::Alone { first, .. }, _) => {
                if result.is_err() {
                    connection.parse = Parse::Alone(None);
                }
                first.then(|| reply(result))
            }
            (Part::All | Part::Piece { .. }, Some(extent)) => {
                let offset = Sectors(extent.start().0).bytes().0;
                let last = ended == Some(Ok(()));
                let length = extent.bytes() as u32;
                Some(ReplyHeader::chunk(&request, offset, length, last))
            }
            (Part::All | Part::Piece { .. }, None) => {
                (ended == Some(Ok(()))).then(|| reply(Ok(())))
            }
        };
        let slots = &mut self.memory.slots;
        let payload = data.and_then(|extent| slots.payload(tag, extent.bytes() as usize));
        if let Some(header) = header {
            let frame = Frame::new(&[header.as_bytes()], payload);
            connection.stream.queue(frame);
        } else if payload.is_some() {
            connection.stream.queue(Frame::new(&[], payload));
        }
        if let Some(Err(error)) = ended {
            let header = reply(Err(error));
            let frame = Frame::new(&[header.as_bytes()], None);
            connection.stream.queue(frame);
        }
        self.connections.mark(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_once() {
        let whole = Extent::new(Lba(7), 5000).expect("an extent");
        let (mut at, mut left) = (whole.start(), Some(whole));
        while let Some(range) = left {
            let (piece, next) = cut(range);
            assert_eq!(piece.start(), at);
            assert!(piece.bytes() <= LANE as u64);
            (at, left) = (piece.end(), next);
        }
        assert_eq!(at, whole.end());
    }

    #[test]
    fn a_request_ends_with_its_last_piece_and_keeps_its_first_error() {
        let mut wholes = Wholes::default();
        let more = Extent::new(Lba(0), 1);
        let key = wholes.open();
        wholes.begin(key, more);
        assert_eq!(wholes.end(key, Err(RequestError::NoSpace)), None);
        wholes.begin(key, more);
        wholes.begin(key, None);
        assert_eq!(wholes.end(key, Err(RequestError::Io)), None);
        assert_eq!(wholes.end(key, Ok(())), Some(Err(RequestError::NoSpace)));
        assert_eq!(wholes.open(), key, "its place is free again");

        wholes.begin(key, more);
        wholes.cut_off(key);
        assert_ne!(wholes.open(), key, "a piece of it is under way");
        wholes.end(key, Ok(()));
        assert_eq!(wholes.open(), key);
    }
}
