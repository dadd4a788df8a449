//! Disks that stay: the destination follows, so that every acknowledged write is at both nodes.
//!
//! A migration that never hands its disk over ([`Switchover::Never`](crate::Switchover::Never)) ends its copy as any
//! other. The source then stops to post and to delay writes, sends what is left, and asks the destination to follow.
//! Once the destination follows, a write is acknowledged only after the destination has the write:
//!
//! ```text
//!  source                                  destination
//!  Behind   ══ copies, double writes ═════════►
//!  Catching ══ delayed and posted writes ═════►
//!  Asked    ── Follow(m, e) ──────────────────► follows
//!  Logging  ◄───────────────────── Follows(m) ──│
//!  Following: flushed, and the log is stored      │
//!     ╳ link lost: Severed, holds all answers   │ sever, take: Serving(e+1)
//!  go_alone or yield_to                         │ or cancel
//! ```
//!
//! Neither node decides alone after a loss. The source answers nothing, reads included, and the destination takes
//! nothing more, until their bodies have learned which of them goes on.
//!
//! With checkpoints, the memory of the disk's machine is as old as the last whole checkpoint, and the disk may not be
//! ahead of the memory: the destination keeps later writes apart ([`kept`]).
//!
//! The source notes where its image may differ from the destination's ([`activity`]), so that it need not be compared if
//! the destination takes the disk and this node comes back.

pub(in crate::controller) mod activity;
pub(in crate::controller) mod destination;
pub(in crate::controller) mod kept;
pub(in crate::controller) mod source;

use crate::controller::Controller;
use crate::wire::Message;

impl Controller {
    /// Handles a frame about following.
    pub(in crate::controller) fn follow_message(&mut self, message: &Message) {
        match *message {
            Message::Follow {
                migration,
                epoch,
                checkpoints,
            } => self.follow(migration, epoch, checkpoints),
            Message::Follows { migration } => self.followed(migration),
            Message::CheckpointMark { migration, number } => {
                self.checkpoint_marked(migration, number);
            }
            _ => {}
        }
    }
}
