//! A node with its disk, the machine that runs here, and its part in the protection.

use core::time::Duration;

use godwit_protect::checkpoints::{Checkpoint, Checkpoints, Gathering};
use godwit_protect::{Ask, Backup, Grant, Member, Primary, PrimaryRecord, PrimaryState};

use crate::pair::Planted;

/// A set of the guest's works, a bit each.
pub(crate) type Works = u8;

/// The works that write to the disk. Others change the memory alone.
pub(crate) const WRITES: Works = 0b0101_0101;

/// All times: the model has none.
pub(crate) const NOW: Duration = Duration::ZERO;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Primary(Primary),
    Backup(Backup),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub(crate) role: Role,
    /// The durable record of a primary; a backup has none.
    pub(crate) stored: Option<PrimaryRecord>,
    pub(crate) disk: Works,
    /// The memory of the machine that runs here.
    pub(crate) memory: Option<Works>,
    /// The write whose answer the guest waits for.
    pub(crate) open: Works,
    /// Primary: the checkpoints, from the moment that the disk is followed until the backup is given up.
    pub(crate) session: Option<Session>,
    /// Backup: the checkpoints that have come.
    pub(crate) standby: Option<Standby>,
    /// Backup: true while the ownership is on its way to the store.
    pub(crate) taking: bool,
    /// The answer to the last request to the witness.
    pub(crate) answer: Option<(Ask, Grant)>,
}

/// A frame on the disk's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DiskFrame {
    Write(Works),
    Mark(Checkpoint),
}

/// The checkpoints of a primary, and the packets that wait for their acknowledgements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Session {
    pub(crate) checkpoints: Checkpoints,
    pub(crate) last: Checkpoint,
    /// The newest state that a held packet of each epoch was sent from.
    held: Vec<(Checkpoint, Works)>,
}

impl Session {
    pub(crate) const fn new() -> Self {
        Self {
            checkpoints: Checkpoints::new(Duration::ZERO, NOW),
            last: Checkpoint(0),
            held: Vec::new(),
        }
    }

    /// Returns the session of a node that has started again: nothing is known of the backup, and packets are held.
    pub(crate) fn lost() -> Self {
        Self {
            last: Checkpoint(1),
            ..Self::new()
        }
    }

    fn hold(&mut self, packet: Works) {
        let epoch = self.last.next();
        match self.held.last_mut().filter(|(of, _)| *of == epoch) {
            Some((_, held)) => *held = packet,
            None => self.held.push((epoch, packet)),
        }
    }

    /// Returns what clients see from the packets of all epochs up to this one, which leave.
    pub(crate) fn release(&mut self, through: Checkpoint) -> Works {
        let seen = self.held.iter().filter(|(epoch, _)| *epoch <= through);
        let seen = seen.fold(0, |seen, (_, packet)| seen | packet);
        self.held.retain(|(epoch, _)| *epoch > through);
        seen
    }
}

/// The checkpoints of a backup. The disk of the node is as at the last whole checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Standby {
    gathering: Gathering,
    /// The memory of the last whole checkpoint.
    pub(crate) memory: Works,
    /// The memories of later checkpoints.
    memories: Vec<(Checkpoint, Works)>,
    /// Kept writes and marks of later checkpoints.
    kept: Vec<DiskFrame>,
    pub(crate) severed: bool,
}

impl Standby {
    pub(crate) fn new() -> Self {
        Self {
            gathering: Gathering::new(1),
            memory: 0,
            memories: Vec::new(),
            kept: Vec::new(),
            severed: false,
        }
    }
}

impl Node {
    pub(crate) const fn new(role: Role, stored: Option<PrimaryRecord>) -> Self {
        Self {
            role,
            stored,
            disk: 0,
            memory: None,
            open: 0,
            session: None,
            standby: None,
            taking: false,
            answer: None,
        }
    }

    pub(crate) const fn primary(&self) -> Option<&Primary> {
        match &self.role {
            Role::Primary(primary) => Some(primary),
            Role::Backup(_) => None,
        }
    }

    pub(crate) const fn backup(&self) -> Option<&Backup> {
        match &self.role {
            Role::Backup(backup) => Some(backup),
            Role::Primary(_) => None,
        }
    }

    /// Returns true if the guest's packets leave without a word of another node.
    pub(crate) const fn releases_unasked(&self) -> bool {
        self.memory.is_some() && self.session.is_none()
    }

    /// Returns true if this primary still hopes for its backup.
    pub(crate) fn awaits_backup(&self) -> bool {
        use PrimaryState::{Alone, Paired, Pairing};
        let state = self.primary().map(Primary::state);
        self.session.is_some() && matches!(state, Some(Alone | Pairing | Paired))
    }

    /// Lets the guest send a packet. Returns what clients see at once.
    pub(crate) fn send(&mut self, planted: Planted) -> Works {
        let Some(memory) = self.memory else {
            return 0;
        };
        let paired = self.primary().is_some_and(|primary| {
            let state = primary.state();
            matches!(state, PrimaryState::Paired | PrimaryState::Severed)
        });
        match &mut self.session {
            Some(session)
                if session.last > Checkpoint(0) && (planted != Planted::HoldsLate || paired) =>
            {
                session.hold(memory);
                0
            }
            _ => memory,
        }
    }

    /// Answers the open write. Returns what clients see at once.
    pub(crate) fn answer_write(&mut self, planted: Planted) -> Works {
        let open = core::mem::take(&mut self.open);
        let Some(memory) = self.memory.as_mut().filter(|_| open != 0) else {
            return 0;
        };
        *memory |= open;
        self.send(planted)
    }

    /// Gives the backup up: the packets leave, and the open write is answered. Returns what clients see.
    pub(crate) fn go_alone(&mut self, planted: Planted) -> Works {
        let session = self.session.take();
        let held = session.map_or(0, |mut session| session.release(Checkpoint(u64::MAX)));
        held | self.answer_write(planted)
    }

    /// Ends the machine: nothing leaves any more.
    pub(crate) fn end(&mut self) {
        (self.memory, self.open, self.session) = (None, 0, None);
    }

    /// Returns true if a write is here.
    pub(crate) fn has(&self, write: Works) -> bool {
        let kept = self.standby.iter().flat_map(|standby| &standby.kept);
        self.disk & write != 0 || kept.into_iter().any(|it| *it == DiskFrame::Write(write))
    }

    /// Takes a part of the memory's connection. Returns a checkpoint to acknowledge.
    pub(crate) fn memory_came(
        &mut self,
        (number, memory): (Checkpoint, Works),
        planted: Planted,
    ) -> Option<Checkpoint> {
        let standby = self.standby.as_mut()?;
        standby.memories.push((number, memory));
        if planted == Planted::MemoryAhead {
            standby.memory = memory;
        }
        let whole = standby.gathering.memory_came(number);
        self.apply(whole.expect("connections keep the order"), planted)
    }

    /// Takes a frame of the disk's connection. Returns a checkpoint to acknowledge.
    pub(crate) fn disk_came(&mut self, frame: DiskFrame, planted: Planted) -> Option<Checkpoint> {
        let standby = self.standby.as_mut()?;
        standby.kept.push(frame);
        match frame {
            DiskFrame::Write(write) => {
                if planted == Planted::DiskAhead {
                    self.disk |= write;
                }
                None
            }
            DiskFrame::Mark(number) => {
                let whole = standby.gathering.disk_came(0, number);
                self.apply(whole.expect("connections keep the order"), planted)
            }
        }
    }

    /// Applies a checkpoint that became whole, and those before.
    fn apply(&mut self, whole: Option<Checkpoint>, planted: Planted) -> Option<Checkpoint> {
        let (standby, number) = (self.standby.as_mut()?, whole?);
        let through = standby.memories.partition_point(|(of, _)| *of <= number);
        let memory = standby.memories.drain(..through).next_back();
        if let (Some((_, memory)), false) = (memory, planted == Planted::MemoryAhead) {
            standby.memory = memory;
        }
        let mark = DiskFrame::Mark(number);
        let end = standby.kept.iter().position(|it| *it == mark)?;
        for frame in standby.kept.drain(..=end) {
            if let DiskFrame::Write(write) = frame {
                self.disk |= write;
            }
        }
        if planted == Planted::DropsEarly {
            standby.kept.retain(|it| matches!(it, DiskFrame::Mark(_)));
        }
        Some(number)
    }

    /// Becomes the primary, and runs the machine from the last whole checkpoint.
    pub(crate) fn takes_over(&mut self, me: Member) {
        let Some(known) = self.backup().map(Backup::known) else {
            return;
        };
        let primary = Primary::new(me, known);
        self.taking = false;
        self.stored = Some(primary.record());
        self.role = Role::Primary(primary);
        self.memory = self.standby.take().map(|standby| standby.memory);
    }
}
