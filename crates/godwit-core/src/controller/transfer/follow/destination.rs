//! The destination of a disk that stays at its source: follows, and takes the disk when told.

use crate::controller::transfer::follow::kept::Kept;
use crate::controller::{Controller, StartError};
use crate::event::{AbortReason, Event};
use crate::units::{Epoch, MigrationId, Time};
use crate::wire::{Message, TrafficClass};

/// State of a destination that was asked to follow.
#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct Following {
    /// The epoch in which the source serves.
    epoch: Epoch,
    /// True if frames of the source are dropped, because the source may no longer acknowledge.
    pub(in crate::controller) severed: bool,
    /// Present if the source's writes are kept apart behind each checkpoint.
    pub(in crate::controller) kept: Option<Kept>,
}

impl Controller {
    /// Handles the source's word that every acknowledged write is here.
    pub(in crate::controller) fn follow(
        &mut self,
        migration: MigrationId,
        epoch: Epoch,
        checkpoints: bool,
    ) {
        self.destination_heard();
        let receives = self.cx.authority.receiving() == Some(migration);
        let Some(destination) = self.destination.as_mut().filter(|_| receives) else {
            return;
        };
        // The epoch after the source's has to follow this node's own, or the disk could not be taken.
        if self.cx.authority.is_accepting() || epoch < self.cx.authority.record().epoch {
            self.cancel(self.cx.now, AbortReason::Protocol);
            return;
        }
        destination.following.get_or_insert(Following {
            epoch,
            severed: false,
            kept: checkpoints.then(Kept::default),
        });
        self.cx
            .send(TrafficClass::Control, Message::Follows { migration });
        self.cx.notify(Event::Follows { migration, epoch });
    }

    /// Returns true if the disk follows here: only the body ends the incoming migration.
    pub(in crate::controller) fn follows(&self) -> bool {
        let following = self.destination.as_ref().map(|it| it.following);
        following.flatten().is_some()
    }

    /// Takes nothing more from the source of a disk that follows here. Returns false if no disk follows.
    pub fn sever(&mut self, now: Time) -> bool {
        self.cx.now = now;
        let receives = self.cx.authority.receiving().is_some();
        let Some(destination) = self.destination.as_mut().filter(|_| receives) else {
            return false;
        };
        if let Some(following) = &mut destination.following {
            following.severed = true;
        }
        destination.following.is_some()
    }

    /// Becomes the owner of a disk that follows here, in the epoch after its source's, without the source's word. The
    /// caller knows that the source acknowledges no request any more. [`Event::ReceiveCompleted`] reports the end, or
    /// [`Event::ReceiveAborted`] if the received data cannot be made durable. With checkpoints the disk is as of the last
    /// one that was to be [applied](Self::apply_checkpoints).
    ///
    /// # Errors
    /// [`StartError::Busy`] unless a disk follows here and was [severed](Self::sever), and a checkpoint was to be applied
    /// if there are checkpoints.
    pub fn take(&mut self, now: Time) -> Result<(), StartError> {
        self.cx.now = now;
        let following = self.destination.as_ref().and_then(|it| it.following);
        let may = |it: &Following| it.severed && it.kept.is_none_or(|kept| kept.is_begun());
        let Some(following) = following.filter(may) else {
            return Err(StartError::Busy);
        };
        let Some(migration) = self.cx.authority.receiving() else {
            return Err(StartError::Busy);
        };
        let effects = self.cx.authority.take(migration, following.epoch.next());
        if effects.is_empty() {
            return Err(StartError::Busy);
        }
        // The machine is the only user of a disk that stays, and begins anew here.
        self.forwarding.disk_comes(&mut self.cx, false);
        self.apply(effects);
        self.run_ready();
        Ok(())
    }
}
