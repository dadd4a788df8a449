//! The subjects of moves, with the planes and steps of each.

use serde::{Deserialize, Serialize};

/// A part of a subject that moves in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plane {
    /// The blocks of a disk, or of all disks of a machine.
    Disks,
    /// Memory.
    Memory,
    /// NICs, with held packets.
    Nics,
    /// Objects of a device, such as queue pairs and memory regions.
    Objects,
    /// Connections to partners through the objects.
    Connections,
    /// The process itself, as files.
    Image,
}

impl Plane {
    /// Returns the plane without which this plane cannot be used.
    const fn rests_on(self) -> Option<Self> {
        match self {
            Plane::Connections => Some(Plane::Objects),
            Plane::Disks | Plane::Memory | Plane::Nics | Plane::Objects | Plane::Image => None,
        }
    }
}

/// The furthest point that a plane has reached.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// Nothing was begun.
    #[default]
    Untouched,
    /// Copying was begun.
    Copying,
    /// A copy is at the destination.
    Copied,
    /// Freezing was begun.
    Freezing,
    /// The plane does not change any more.
    Frozen,
    /// Sending the rest was begun, so the destination may know of the move.
    Sending,
    /// The destination has everything that it needs to run the subject.
    Sent,
}

/// A step of a move: a phase, and the plane concerned if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Looks for obstacles and claims all that the move needs. Changes nothing.
    Prepare,
    /// Copies the plane while the subject runs.
    Copy(Plane),
    /// Makes the subject and its partners keep back new requests.
    Stop,
    /// Waits until nothing is in flight.
    Drain,
    /// Takes the plane's final state.
    Freeze(Plane),
    /// Sends the destination the rest of the plane that the subject needs to run.
    Send(Plane),
    /// Passes the point of no return.
    Decide,
    /// Asks the deciding end for the decision.
    Settle,
    /// Makes the plane usable at the destination.
    TakeUp(Plane),
    /// Lets the subject and its partners go on.
    Resume,
    /// Sends the rest of the plane while the subject runs at the destination.
    Pull(Plane),
    /// The way back: makes the plane usable at the source again.
    TakeBack(Plane),
    /// The way back: lets the subject and its partners go on at the source.
    ResumeHere,
    /// Releases all that waits for the subject.
    LetGo,
    /// No further step.
    End,
}

impl Step {
    /// Returns true if the move can still be cancelled before this step.
    pub const fn cancellable(self) -> bool {
        matches!(
            self,
            Step::Prepare
                | Step::Copy(_)
                | Step::Stop
                | Step::Drain
                | Step::Freeze(_)
                | Step::Send(_)
                | Step::Decide
        )
    }

    /// Returns true if the step needs the subject to exist at the source.
    pub const fn needs_subject_here(self) -> bool {
        match self {
            Step::Prepare
            | Step::Copy(_)
            | Step::Stop
            | Step::Drain
            | Step::Freeze(_)
            | Step::ResumeHere => true,
            Step::TakeBack(plane) => !matches!(plane, Plane::Image | Plane::Objects),
            Step::Send(_)
            | Step::Decide
            | Step::Settle
            | Step::TakeUp(_)
            | Step::Resume
            | Step::Pull(_)
            | Step::LetGo
            | Step::End => false,
        }
    }

    /// Returns true if repeating the step is harmless, whatever its last attempt did.
    pub(crate) const fn repeatable(self) -> bool {
        match self {
            Step::TakeUp(_) | Step::Resume | Step::ResumeHere | Step::LetGo => true,
            Step::TakeBack(plane) => !matches!(plane, Plane::Image),
            _ => false,
        }
    }
}

/// The end that decides at the point of no return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decider {
    /// The source stores that it gave the subject away.
    Source,
    /// The destination stores that it runs the subject: the source has only an image of it.
    Destination,
}

/// The subject of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A disk, with its clients.
    Disk,
    /// A virtual machine, with disks, memory and NICs.
    Machine,
    /// A process.
    Process,
    /// A container.
    Container,
}

const DISK: &[Step] = &[
    Step::Prepare,
    Step::Copy(Plane::Disks),
    Step::Stop,
    Step::Drain,
    Step::Decide,
    Step::Resume,
    Step::Pull(Plane::Disks),
];

const MACHINE: &[Step] = &[
    Step::Prepare,
    Step::Copy(Plane::Disks),
    Step::Copy(Plane::Memory),
    Step::Stop,
    Step::Send(Plane::Nics),
    Step::Send(Plane::Memory),
    Step::Decide,
    Step::Resume,
    Step::Pull(Plane::Memory),
];

const PROCESS: &[Step] = &[
    Step::Prepare,
    Step::Copy(Plane::Memory),
    Step::Copy(Plane::Objects),
    Step::Stop,
    Step::Drain,
    Step::Freeze(Plane::Objects),
    Step::Freeze(Plane::Image),
    Step::Send(Plane::Image),
    Step::Decide,
    Step::TakeUp(Plane::Objects),
    Step::TakeUp(Plane::Connections),
    Step::Resume,
];

/// The planes that are taken back, in order, each once it has reached this point.
const DISK_BACK: &[(Plane, Progress)] = &[(Plane::Disks, Progress::Copying)];

const MACHINE_BACK: &[(Plane, Progress)] = &[
    (Plane::Disks, Progress::Copying),
    (Plane::Nics, Progress::Sending),
    // The preparation has offered the title of memory in a memory pool.
    (Plane::Memory, Progress::Untouched),
];

const PROCESS_BACK: &[(Plane, Progress)] = &[
    (Plane::Image, Progress::Sending),
    (Plane::Objects, Progress::Freezing),
    (Plane::Connections, Progress::Freezing),
];

impl Subject {
    /// Returns the deciding end.
    pub const fn decider(self) -> Decider {
        match self {
            Subject::Disk | Subject::Machine => Decider::Source,
            Subject::Process | Subject::Container => Decider::Destination,
        }
    }

    /// Returns the steps to the destination in order. A course may leave out [`Step::Copy`] and [`Step::Pull`].
    pub const fn steps(self) -> &'static [Step] {
        match self {
            Subject::Disk => DISK,
            Subject::Machine => MACHINE,
            Subject::Process | Subject::Container => PROCESS,
        }
    }

    const fn back(self) -> &'static [(Plane, Progress)] {
        match self {
            Subject::Disk => DISK_BACK,
            Subject::Machine => MACHINE_BACK,
            Subject::Process | Subject::Container => PROCESS_BACK,
        }
    }

    /// Returns true if the move goes on without a plane that was not copied ahead.
    pub(crate) const fn moves_without_copies(self) -> bool {
        matches!(self.decider(), Decider::Destination)
    }

    /// Returns the subject's noun for messages.
    pub(crate) const fn noun(self) -> &'static str {
        match self {
            Subject::Disk => "disk",
            Subject::Machine => "machine",
            Subject::Process | Subject::Container => "process",
        }
    }

    /// Returns the first step of the way back. `progress` has the furthest point of each plane.
    pub(crate) fn way_back(self, progress: impl Fn(Plane) -> Progress) -> Step {
        let touched = |plane: Plane, from| progress(plane.rests_on().unwrap_or(plane)) >= from;
        let mut back = self.back().iter();
        back.find(|(plane, from)| touched(*plane, *from))
            .map_or(Step::ResumeHere, |(plane, _)| Step::TakeBack(*plane))
    }

    /// Returns the step after taking back `plane`. A plane that rests on one that was not taken back is left out.
    pub(crate) fn after_take_back(self, plane: Plane, taken: bool) -> Step {
        let mut back = self.back().iter().map(|(plane, _)| *plane);
        let _earlier = back.find(|one| *one == plane);
        back.find(|next| taken || next.rests_on() != Some(plane))
            .map_or(Step::ResumeHere, Step::TakeBack)
    }
}
