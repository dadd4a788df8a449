//! The state of the world during a move, and the effect of each step.

use godwit_move::{
    Act, Arrival, Course, Decider, Ending, Order, Plane, Progress, Started, Step, Subject,
};

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Process {
    suspended: bool,
    /// The generation of the existing objects: a count of how often objects were made.
    objects: Option<u32>,
    connected: bool,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) source: Option<Process>,
    image: Option<Process>,
    /// True once a restore from the image at the source was tried.
    pub(super) tried_back: bool,
    sent: bool,
    arrival: Arrival,
    destination: Option<Process>,
    /// The destination's stored generation of the objects made there.
    pub(super) recreated: Option<u32>,
    made: u32,
    partner_suspended: bool,
    /// True if the destination has pre-copied memory, which is lost with the source's connection until the image
    /// arrives.
    memory_there: bool,
    /// True if the image contains only later changes.
    pub(super) image_needs_memory: bool,
    /// True if the destination has objects ahead of the process, which are lost with the source's connection.
    pub(super) held: bool,
    /// True if the partner has queue pairs connected to the objects at the destination.
    pub(super) prepared: bool,
    /// The destination's stored flag: true if the process took over the objects made ahead.
    attached: bool,
    /// The generation of the objects whose keys the source's node learned on the way back.
    pub(super) told: Option<u32>,
    /// The state stored by the source's node: the move and `told`.
    pub(super) stored: (Course, Option<u32>),
    /// The generation of the objects that the partner is connected to.
    partner_knows: u32,
    partner_connected: bool,
    /// True if this move has the process and the partner.
    claimed: bool,
    /// True once a step may have changed the process or the partner.
    pub(super) touched: bool,
}

type Done = Result<(), String>;

fn no(why: &str) -> Done {
    Err(why.to_owned())
}

impl World {
    pub(super) fn new() -> Self {
        Self {
            source: Some(Process {
                suspended: false,
                objects: Some(1),
                connected: true,
            }),
            image: None,
            tried_back: false,
            sent: false,
            arrival: Arrival::Coming,
            destination: None,
            recreated: None,
            made: 1,
            told: None,
            stored: (Course::new(Subject::Process, []), None),
            partner_suspended: false,
            memory_there: false,
            image_needs_memory: false,
            held: false,
            prepared: false,
            attached: false,
            partner_knows: 1,
            partner_connected: true,
            claimed: false,
            touched: false,
        }
    }

    fn at(&mut self, here: bool) -> Result<&mut Process, String> {
        let place = if here {
            &mut self.source
        } else {
            &mut self.destination
        };
        place.as_mut().ok_or_else(|| "no such process".to_owned())
    }

    pub(super) fn recreate(&mut self, here: bool, may_be_old: bool) -> Done {
        if !here && let Some(made) = self.recreated {
            // The destination's node has stored the generation.
            let process = self.at(here)?;
            assert_eq!(process.objects, Some(made));
            return Ok(());
        }
        let next = self.made + 1;
        let process = self.at(here)?;
        if process.objects.is_some() {
            return if here && may_be_old {
                Ok(())
            } else {
                no("its keys are not known")
            };
        }
        (process.objects, process.connected) = (Some(next), false);
        self.made = next;
        if here {
            self.told = Some(next);
        } else {
            self.recreated = Some(next);
            self.attached = std::mem::take(&mut self.held);
            let connected = self.attached && self.prepared;
            self.at(here)?.connected = connected;
        }
        Ok(())
    }

    /// Connects both sides, the partner first.
    fn connect(&mut self, here: bool, half: bool) -> Done {
        self.at(here)?.objects.ok_or("it has no objects")?;
        if !self.partner_suspended {
            return no("the partner is not suspended");
        }
        let keys = if here { self.told } else { self.recreated };
        if !here && self.attached && std::mem::take(&mut self.prepared) {
            self.partner_knows = keys.unwrap_or(self.partner_knows);
            self.partner_connected = true;
            return if half {
                no("not all were switched")
            } else {
                Ok(())
            };
        }
        // Without new keys the partner keeps the known ones.
        self.partner_knows = keys.unwrap_or(self.partner_knows);
        self.partner_connected = true;
        let process = self.at(here)?;
        if half || !process.suspended {
            return no("the process was not connected");
        }
        process.connected = true;
        Ok(())
    }

    pub(super) fn resume_partner(&mut self) {
        (self.partner_suspended, self.prepared) = (false, false);
    }

    fn resume(&mut self, here: bool, half: bool) -> Done {
        self.resume_partner();
        let process = self.at(here)?;
        if half || process.objects.is_none() {
            return no("the process did not go on");
        }
        process.suspended = false;
        Ok(())
    }

    fn restore(&mut self) -> Done {
        if !self.sent || self.arrival.ordered(Order::Run, Decider::Destination) != Act::Start {
            self.settle();
            return no("there is nothing that may be restored");
        }
        assert!(
            self.memory_there || !self.image_needs_memory,
            "it is made of a part of its memory: {self:?}"
        );
        self.destination = self.image.clone();
        self.arrival.started(Started::Runs, Decider::Destination);
        Ok(())
    }

    /// Returns true if the process runs at the destination. The answer is final.
    pub(super) fn settle(&mut self) -> bool {
        if self.arrival.ordered(Order::Settle, Decider::Destination) == Act::Look
            && self
                .arrival
                .looked(self.destination.is_some(), Decider::Destination)
                == Act::Clear
        {
            self.arrival.cleared();
        }
        self.arrival == Arrival::Here
    }

    pub(super) fn carry_out(&mut self, moving: &Course, half: bool) -> Done {
        let step = moving.step();
        if step != Step::Prepare {
            assert!(self.claimed, "another move may have the process");
        }
        match step {
            Step::Prepare
            | Step::Copy(_)
            | Step::Stop
            | Step::Drain
            | Step::Freeze(_)
            | Step::Send(_) => self.leave(moving, half),
            Step::Decide if half => {
                // The destination's node finds no trace of the process and gives a final answer.
                self.arrival = Arrival::Never;
                no("half")
            }
            Step::Decide => self.restore(),
            Step::Settle if self.settle() => Ok(()),
            Step::Settle => no("it does not run there"),
            Step::TakeUp(Plane::Objects) => self.recreate(false, false),
            Step::TakeUp(_) => self.connect(false, half),
            Step::Resume => self.resume(false, half),
            Step::TakeBack(Plane::Image) if half => no("half"),
            Step::TakeBack(Plane::Image) => {
                assert!(self.source.is_none(), "restored over the process itself");
                self.source = self.image.clone();
                self.source
                    .as_ref()
                    .map(drop)
                    .ok_or_else(|| "there is no image".to_owned())
            }
            Step::TakeBack(Plane::Objects) => self.recreate(true, !moving.was_interrupted()),
            Step::TakeBack(_) => self.connect(true, half),
            Step::ResumeHere => self.resume(true, half),
            Step::LetGo => {
                self.resume_partner();
                Ok(())
            }
            Step::Pull(_) | Step::End => unreachable!(),
        }
    }

    /// Carries out a step before the destination decides.
    fn leave(&mut self, moving: &Course, half: bool) -> Done {
        match moving.step() {
            // Half: the claims taken so far are given back.
            Step::Prepare if half => no("half"),
            Step::Prepare => {
                self.claimed = true;
                Ok(())
            }
            // Half: some rounds were copied.
            Step::Copy(Plane::Memory) => {
                self.memory_there = !half;
                if half { no("half") } else { Ok(()) }
            }
            Step::Copy(_) => {
                // Half: the destination never learns that the new objects are not wanted.
                (self.held, self.prepared) = (true, true);
                if half { no("half") } else { Ok(()) }
            }
            Step::Stop => {
                self.partner_suspended = true;
                if half {
                    return no("half");
                }
                self.at(true)?.suspended = true;
                Ok(())
            }
            Step::Drain if half => no("half"),
            Step::Drain if !self.partner_suspended => no("the partner is not held"),
            Step::Drain => Ok(()),
            Step::Freeze(Plane::Objects) => {
                let process = self.at(true)?;
                // The way back makes objects again that were given back.
                (process.objects, process.connected) = (None, false);
                if half { no("half") } else { Ok(()) }
            }
            Step::Freeze(_) if half => no("half"),
            Step::Freeze(_) => {
                self.image = self.source.take();
                self.image_needs_memory = moving.progress(Plane::Memory) == Progress::Copied;
                if self.image.is_some() {
                    Ok(())
                } else {
                    no("no such process")
                }
            }
            _ if self.image_needs_memory && !self.memory_there => {
                no("the memory that it needs is not there")
            }
            _ => {
                self.sent = !half;
                if half { no("half") } else { Ok(()) }
            }
        }
    }

    /// Pre-copied memory is kept with the image only.
    pub(super) fn forget_memory(&mut self) {
        self.memory_there &= self.sent;
    }

    /// Breaks the connection of a partner that goes on while no process answers.
    pub(super) fn partner_goes_on(&mut self) {
        let other = self.source.as_ref().or(self.destination.as_ref());
        let answers = other.is_some_and(|process| {
            process.connected && process.objects == Some(self.partner_knows)
        });
        self.partner_connected &= self.partner_suspended || answers;
    }

    pub(super) fn runs_at_one_place_at_most(&self) {
        assert!(
            self.source.is_none() || self.destination.is_none(),
            "the process runs at two places: {self:?}"
        );
    }

    /// Returns true if the process and the partner can communicate.
    fn works(&self, process: &Process) -> bool {
        process.connected
            && process.objects == Some(self.partner_knows)
            && self.partner_connected
            && !process.suspended
            && !self.partner_suspended
    }

    pub(super) fn judge(&self, ending: &Ending) {
        let said = |process: &Option<Process>, lost: &Option<String>| {
            let process = process
                .as_ref()
                .expect("the process runs where it is said to run");
            assert!(
                lost.is_some() || self.works(process),
                "connections do not work, and nothing is said of it: {self:?}"
            );
        };
        match ending {
            Ending::Moved { lost } => said(&self.destination, lost),
            Ending::Stayed { why, lost } => {
                assert!(!why.what.is_empty());
                assert!(
                    lost.is_none() || self.touched,
                    "nothing was touched, and {lost:?} is said to be lost"
                );
                said(&self.source, lost);
            }
            Ending::Gone { why } => {
                assert!(!why.what.is_empty());
                assert!(
                    self.source.is_none() && self.destination.is_none(),
                    "{self:?}"
                );
                assert!(
                    self.image.is_none() || self.tried_back,
                    "the process is an image, and was not made of it again: {self:?}"
                );
            }
        }
    }
}
