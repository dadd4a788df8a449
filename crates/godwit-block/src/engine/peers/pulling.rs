//! The connection by which an owner pulls the missing parts of its disk from the node that gave the disk away: both
//! ends.

use std::io;

use godwit_core::Missing;
use godwit_core::action::{PULL_SLOTS, PullSlot};
use godwit_core::request::RequestTag;
use godwit_core::units::Extent;
use godwit_core::wire::{Message, TrafficClass};

use crate::engine::config::{EngineEvent, FirstMissing, MissingSnapshot};
use crate::engine::connections::streams::PeerStream;
use crate::engine::connections::{ConnectionKey, Uses};
use crate::engine::peers::links::FAREWELL;
use crate::engine::run::Engine;
use crate::engine::slots::chunks::Chunks;
use crate::image::notes::missing::MissingNotes;

/// The connections for pulls, and the pieces that have come.
pub(in crate::engine) struct Pulls {
    /// Connection for pulls, at either end.
    pulling: Option<ConnectionKey>,
    /// Connection to the image, if another node owes some of the missing parts.
    fetching: Option<ConnectionKey>,
    /// Pulled pieces that are not yet written, by slot.
    pieces: [Option<RequestTag>; PULL_SLOTS as usize],
    /// Notes of the missing parts that have arrived.
    notes: Option<MissingNotes>,
}

impl Pulls {
    pub(in crate::engine) const fn new(notes: Option<MissingNotes>) -> Self {
        Self {
            pulling: None,
            fetching: None,
            pieces: [None; PULL_SLOTS as usize],
            notes,
        }
    }

    /// Returns the connection for pulls of this class.
    pub(super) const fn connection(&self, class: TrafficClass) -> Option<ConnectionKey> {
        match class {
            TrafficClass::Pull => self.pulling,
            TrafficClass::Image => self.fetching,
            TrafficClass::Control | TrafficClass::Sync | TrafficClass::Copy => None,
        }
    }

    /// Returns the class of the pulls on this connection; `None` without pulls.
    pub(super) fn class_of(&self, key: ConnectionKey) -> Option<TrafficClass> {
        [TrafficClass::Pull, TrafficClass::Image]
            .into_iter()
            .find(|&class| self.connection(class) == Some(key))
    }

    /// Returns the tag of the buffer with the piece pulled for this slot.
    pub(in crate::engine) fn piece(&self, slot: PullSlot) -> Option<RequestTag> {
        self.pieces.get(usize::from(slot.0)).copied().flatten()
    }

    /// Forgets the piece pulled for this slot, and returns the tag of its buffer.
    pub(in crate::engine) fn take_piece(&mut self, slot: PullSlot) -> Option<RequestTag> {
        self.pieces.get_mut(usize::from(slot.0))?.take()
    }

    /// Forgets what was noted of an arrival that is over.
    pub(in crate::engine) fn forget_notes(&mut self) {
        self.notes = None;
    }

    /// Notes that a part has arrived.
    pub(in crate::engine) fn note(
        &self,
        missing: Option<&Missing>,
        extent: Extent,
    ) -> io::Result<()> {
        match (&self.notes, missing) {
            (Some(notes), Some(missing)) => notes.note(missing, extent),
            _ => Err(io::Error::other("nothing is stored of what it lacks")),
        }
    }
}

impl Engine {
    /// Takes a new connection for pulls, in place of an older one.
    pub(in crate::engine) fn pull_up(&mut self, stream: PeerStream, dialled: bool) {
        let owes = self.cx.core.record().owes().is_some();
        if dialled != owes {
            // The other end dialled, or was dialled, for a state that has passed. In place of the connection to the
            // owner, this connection would concern another migration.
            let disk = &self.cx.config.disk;
            tracing::debug!(disk, dialled, owes, "a connection to pull on came too late");
            return;
        }
        if owes && !self.memory.owed.has_memory() {
            match Chunks::for_pulls() {
                Ok(buffers) => self.memory.owed = buffers,
                Err(error) => {
                    let disk = &self.cx.config.disk;
                    tracing::warn!(disk, %error, "no memory for what the disk's owner lacks");
                    return self.cx.tell(EngineEvent::PullDown);
                }
            }
        }
        let Some(key) = self.adopt(stream, TrafficClass::Pull, Uses::default()) else {
            return self.cx.tell(EngineEvent::PullDown);
        };
        if let Some(old) = self.pulls.pulling.replace(key) {
            self.cx.core.handle_pull_lost(self.cx.now);
            self.close(old);
        }
        self.cx.core.handle_pull_up(self.cx.now, dialled);
        self.drain();
        self.advance(key);
    }

    /// Takes a new connection to the disk's image, in place of an older one, beside the connection to a node that owes
    /// parts.
    pub(in crate::engine) fn fetch_up(&mut self, stream: PeerStream) {
        let Some(key) = self.adopt(stream, TrafficClass::Image, Uses::default()) else {
            return;
        };
        if let Some(old) = self.pulls.fetching.replace(key) {
            self.cx.core.handle_image_lost(self.cx.now);
            self.close(old);
        }
        self.cx.core.handle_image_up(self.cx.now);
        self.drain();
        self.advance(key);
    }

    /// Handles the loss of a connection, if the connection was used for pulls.
    pub(super) fn lose_pull(&mut self, key: ConnectionKey) {
        let Pulls {
            pulling, fetching, ..
        } = &mut self.pulls;
        let pulls = pulling.take_if(|it| *it == key).is_some();
        let fetches = fetching.take_if(|it| *it == key).is_some();
        if pulls {
            self.cx.core.handle_pull_lost(self.cx.now);
            self.drain();
            if self.cx.core.record().owes().is_some() {
                self.cx.tell(EngineEvent::PullDown);
            }
        }
        if fetches {
            self.cx.core.handle_image_lost(self.cx.now);
            self.drain();
        }
    }

    /// Ends pulling: all of the disk is at its owner.
    pub(super) fn end_pulling(&mut self) {
        self.pulls.forget_notes();
        self.memory.owed.let_go();
        self.stop_pulling();
    }

    /// Pulls nothing more for now.
    pub(in crate::engine) fn stop_pulling(&mut self) {
        let deadline = self.cx.now.after(FAREWELL);
        if let Some(key) = self.pulls.pulling.take() {
            self.cx.core.handle_pull_lost(self.cx.now);
            self.connections.leave(key, deadline);
        }
        if let Some(key) = self.pulls.fetching.take() {
            self.cx.core.handle_image_lost(self.cx.now);
            self.connections.leave(key, deadline);
        }
    }

    /// Handles a pulled piece that is complete, in the buffer of `tag`.
    pub(super) fn pulled(&mut self, key: ConnectionKey, message: Message, tag: RequestTag) {
        let expected = match (message, self.pulls.class_of(key)) {
            (Message::Pulled { slot, extent, .. }, Some(class)) => {
                let expected = self.cx.core.expects_pulled(class, slot, extent);
                expected.then_some((slot, class))
            }
            _ => None,
        };
        let Some((slot, class)) = expected else {
            // The request was pending when the frame began, and the connection has been lost since.
            return self.memory.slots.finish(tag);
        };
        self.pulls.pieces[usize::from(slot.0)] = Some(tag);
        self.cx.core.handle_pulled(self.cx.now, class, message);
        self.drain();
    }

    pub(in crate::engine) fn store_missing(&self) {
        let core = &self.cx.core;
        let (Some(pieces), Some(missing), Some(migration)) =
            (core.missing_to_store(), core.missing(), core.lacks())
        else {
            return;
        };
        let first = self.pulls.notes.is_none().then(|| FirstMissing {
            heat: missing.heat_pieces(),
            at_source: missing.pieces_at_source(),
        });
        self.cx.tell(EngineEvent::StoreMissing(MissingSnapshot {
            migration,
            pieces,
            first,
        }));
    }

    /// Confirms that the missing state is durable. The first call brings the notes for later arrivals.
    pub(in crate::engine) fn missing_stored(&mut self, notes: Option<MissingNotes>) {
        // If the disk does not arrive after all, the next arrival has notes of its own.
        if let Some(notes) = notes.filter(|_| self.cx.core.lacks().is_some()) {
            self.pulls.notes = Some(notes);
        }
        self.cx.core.handle_missing_stored(self.cx.now);
        // Published before another node hears of the end of its role.
        self.publish();
        self.drain();
    }
}
