//! The connection by which an owner pulls the missing parts of its disk from the node that gave the disk away: both
//! ends.

use godwit_core::action::PullSlot;
use godwit_core::request::RequestTag;
use godwit_core::units::Extent;
use godwit_core::wire::{Message, TrafficClass};

use crate::engine::config::{EngineEvent, FirstMissing, MissingSnapshot};
use crate::engine::connections::streams::PeerStream;
use crate::engine::connections::{ConnectionKey, Uses};
use crate::engine::run::Engine;
use crate::engine::slots::chunks::Chunks;
use crate::image::notes::missing::MissingNotes;

impl Engine {
    /// Takes a new connection for pulls, in place of an older one.
    pub(in crate::engine) fn pull_up(&mut self, stream: PeerStream, dialled: bool) {
        let owes = self.core.record().owes().is_some();
        if dialled != owes {
            // The other end dialled, or was dialled, for a state that has passed. In place of the connection to the
            // owner, this connection would concern another migration.
            let disk = &self.config.disk;
            tracing::debug!(disk, dialled, owes, "a connection to pull on came too late");
            return;
        }
        if owes && !self.owed.has_memory() {
            match Chunks::for_pulls() {
                Ok(buffers) => self.owed = buffers,
                Err(error) => {
                    let disk = &self.config.disk;
                    tracing::warn!(disk, %error, "no memory for what the disk's owner lacks");
                    return self.tell(EngineEvent::PullDown);
                }
            }
        }
        let Some(key) = self.adopt(stream, TrafficClass::Pull, Uses::default()) else {
            return self.tell(EngineEvent::PullDown);
        };
        if let Some(old) = self.pulling.replace(key) {
            self.core.handle_pull_lost(self.now);
            self.close(old);
        }
        self.core.handle_pull_up(self.now, dialled);
        self.drain();
        self.advance(key);
    }

    /// Takes a new connection to the disk's image, in place of an older one, beside the connection to a node that owes
    /// parts.
    pub(in crate::engine) fn fetch_up(&mut self, stream: PeerStream) {
        let Some(key) = self.adopt(stream, TrafficClass::Image, Uses::default()) else {
            return;
        };
        if let Some(old) = self.fetching.replace(key) {
            self.core.handle_image_lost(self.now);
            self.close(old);
        }
        self.core.handle_image_up(self.now);
        self.drain();
        self.advance(key);
    }

    /// Handles the loss of a connection, if the connection was used for pulls.
    pub(in crate::engine) fn lose_pull(&mut self, key: ConnectionKey) {
        if self.pulling.take_if(|pulling| *pulling == key).is_some() {
            self.core.handle_pull_lost(self.now);
            self.drain();
            if self.core.record().owes().is_some() {
                self.tell(EngineEvent::PullDown);
            }
        }
        if self.fetching.take_if(|fetching| *fetching == key).is_some() {
            self.core.handle_image_lost(self.now);
            self.drain();
        }
    }

    /// Ends pulling: all of the disk is at its owner.
    pub(in crate::engine) fn end_pulling(&mut self) {
        self.notes = None;
        self.owed.let_go();
        self.stop_pulling();
    }

    /// Pulls nothing more for now.
    pub(in crate::engine) fn stop_pulling(&mut self) {
        if let Some(key) = self.pulling.take() {
            self.core.handle_pull_lost(self.now);
            self.leave(key, super::links::FAREWELL);
        }
        if let Some(key) = self.fetching.take() {
            self.core.handle_image_lost(self.now);
            self.leave(key, super::links::FAREWELL);
        }
    }

    /// Returns the class of the pulls on this connection; `None` without pulls.
    pub(in crate::engine) fn pulls_on(&self, key: ConnectionKey) -> Option<TrafficClass> {
        match Some(key) {
            it if it == self.pulling => Some(TrafficClass::Pull),
            it if it == self.fetching => Some(TrafficClass::Image),
            _ => None,
        }
    }

    /// Handles a pulled piece that is complete, in the buffer of `tag`.
    pub(in crate::engine) fn pulled(
        &mut self,
        key: ConnectionKey,
        message: Message,
        tag: RequestTag,
    ) {
        let expected = match (message, self.pulls_on(key)) {
            (Message::Pulled { slot, extent, .. }, Some(class)) => {
                let expected = self.core.expects_pulled(class, slot, extent);
                expected.then_some((slot, class))
            }
            _ => None,
        };
        let Some((slot, class)) = expected else {
            // The request was pending when the frame began, and the connection has been lost since.
            return self.slots.finish(tag);
        };
        self.pulled[usize::from(slot.0)] = Some(tag);
        self.core.handle_pulled(self.now, class, message);
        self.drain();
    }

    /// Returns the tag of the buffer with the piece pulled for this slot.
    pub(in crate::engine) fn pulled_tag(&self, slot: PullSlot) -> Option<RequestTag> {
        self.pulled.get(usize::from(slot.0)).copied().flatten()
    }

    pub(in crate::engine) fn release_pulled(&mut self, slot: PullSlot) {
        let tag = self.pulled.get_mut(usize::from(slot.0));
        if let Some(tag) = tag.and_then(Option::take) {
            self.slots.finish(tag);
        }
    }

    pub(in crate::engine) fn note_here(&mut self, extent: Extent) {
        let noted = match (&self.notes, self.core.missing()) {
            (Some(notes), Some(missing)) => notes.note(missing, extent),
            _ => Err(std::io::Error::other("nothing is stored of what it lacks")),
        };
        if let Err(error) = noted {
            self.broken = Some(self.failure("note what has come of the disk", &error));
        }
    }

    pub(in crate::engine) fn store_missing(&self) {
        let (Some(pieces), Some(missing), Some(migration)) = (
            self.core.missing_to_store(),
            self.core.missing(),
            self.core.lacks(),
        ) else {
            return;
        };
        let first = self.notes.is_none().then(|| FirstMissing {
            heat: missing.heat_pieces(),
            at_source: missing.pieces_at_source(),
        });
        self.tell(EngineEvent::StoreMissing(MissingSnapshot {
            migration,
            pieces,
            first,
        }));
    }

    /// Confirms that the missing state is durable. The first call brings the notes for later arrivals.
    pub(in crate::engine) fn missing_stored(&mut self, notes: Option<MissingNotes>) {
        // If the disk does not arrive after all, the next arrival has notes of its own.
        if let Some(notes) = notes.filter(|_| self.core.lacks().is_some()) {
            self.notes = Some(notes);
        }
        self.core.handle_missing_stored(self.now);
        // Published before another node hears of the end of its role.
        self.publish();
        self.drain();
    }
}
