//! A model of a move: a process, its partner and the two nodes, where any step can fail, be done without anybody hearing
//! of it, be half done, or be the one in which a node or the process dies. Every order of up to three such faults is
//! tried. Whatever happens, the process runs at one place at most, and what the move says of it is true.

use super::destination::Arrival;
use super::{Ahead, Ending, Happened, Move, Step};

#[derive(Clone, Debug, PartialEq)]
struct Process {
    suspended: bool,
    /// Which of its objects are there: counts how often they were made.
    objects: Option<u32>,
    connected: bool,
}

#[derive(Clone, Debug)]
struct World {
    source: Option<Process>,
    image: Option<Process>,
    /// Whether making it of its image at the source was tried.
    tried_back: bool,
    sent: bool,
    arrival: Arrival,
    destination: Option<Process>,
    /// What the destination stored of the objects that it has made.
    recreated: Option<u32>,
    made: u32,
    partner_suspended: bool,
    /// Whether the destination has memory ahead of the process; it goes with the source's connection until the image is there.
    memory_there: bool,
    /// Whether the image has only what changed since.
    image_needs_memory: bool,
    /// Whether the destination has objects ahead of the process; they go with the source's connection.
    held: bool,
    /// Whether the partner has queue pairs that are connected to those.
    prepared: bool,
    /// What the destination stored: whether the process has taken what was made ahead of it.
    attached: bool,
    /// The objects whose keys the source's node was told of on the way back.
    told: Option<u32>,
    /// What the source's node has stored: the move, and those objects.
    stored: (Move, Option<u32>),
    /// The objects that the partner is connected to.
    partner_knows: u32,
    partner_connected: bool,
    /// Whether this move has the process and its partner.
    claimed: bool,
    /// Whether anything was asked of them that changes them.
    touched: bool,
}

/// What goes wrong with a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// It is refused.
    Refused,
    /// It is not done, and nobody says so.
    Lost,
    /// It is done, and nobody says so.
    Unheard,
    /// The partner's or the destination's half is done, then it fails.
    Half,
    /// The source's node dies before it has done anything.
    DiesBefore,
    /// The source's node dies after it is done.
    DiesAfter,
    /// Somebody kills the process at the source.
    Killed,
    /// It is done, and said to have failed.
    Misreported,
    /// It cannot be stored now, and can be later.
    NotStored,
    /// It cannot be stored, and the source's node dies.
    NotStoredAndDies,
    /// The partner is let go before it, since nothing was heard of the move.
    PartnerLetGo,
    /// The destination's node dies, and what it was told meanwhile is not known.
    DestinationDies,
}

const FAULTS: [Fault; 13] = [
    Fault::None,
    Fault::Refused,
    Fault::Lost,
    Fault::Unheard,
    Fault::Half,
    Fault::DiesBefore,
    Fault::DiesAfter,
    Fault::Killed,
    Fault::Misreported,
    Fault::NotStored,
    Fault::NotStoredAndDies,
    Fault::PartnerLetGo,
    Fault::DestinationDies,
];

type Done = Result<(), String>;

fn no(why: &str) -> Done {
    Err(why.to_owned())
}

impl World {
    fn new() -> Self {
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
            stored: (Move::default(), None),
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

    fn recreate(&mut self, here: bool, may_be_old: bool) -> Done {
        if !here && let Some(made) = self.recreated {
            // The destination's node has stored it.
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

    /// The partner's half first.
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
        // Without any it keeps those that it knows.
        self.partner_knows = keys.unwrap_or(self.partner_knows);
        self.partner_connected = true;
        let process = self.at(here)?;
        if half || !process.suspended {
            return no("the process was not connected");
        }
        process.connected = true;
        Ok(())
    }

    fn resume_partner(&mut self) {
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
        if !self.sent || !self.arrival.may_restore() {
            return no("there is nothing that may be restored");
        }
        assert!(
            self.memory_there || !self.image_needs_memory,
            "it is made of a part of its memory: {self:?}"
        );
        self.arrival = Arrival::Restoring;
        self.destination = self.image.clone();
        self.arrival = Arrival::Here;
        Ok(())
    }

    /// Whether the process runs at the destination; the answer is for good.
    fn settle(&mut self) -> bool {
        self.arrival = self.arrival.settled(self.destination.is_some());
        self.arrival == Arrival::Here
    }

    fn carry_out(&mut self, moving: &Move, half: bool) -> Done {
        if moving.step() != Step::Wait {
            assert!(self.claimed, "another move may have the process");
        }
        match moving.step() {
            // Half: what was taken is given back.
            Step::Wait if half => no("half"),
            Step::Wait => {
                self.claimed = true;
                Ok(())
            }
            // Half: some rounds are there.
            Step::PreCopy => {
                self.memory_there = !half;
                if half { no("half") } else { Ok(()) }
            }
            Step::PreSetup => {
                // Half: nobody hears that what was made is not wanted.
                (self.held, self.prepared) = (true, true);
                if half { no("half") } else { Ok(()) }
            }
            Step::Suspend => {
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
            Step::Release => {
                let process = self.at(true)?;
                // What was given back of the objects is made again.
                (process.objects, process.connected) = (None, false);
                if half { no("half") } else { Ok(()) }
            }
            Step::Dump if half => no("half"),
            Step::Dump => {
                self.image = self.source.take();
                self.image_needs_memory = moving.memory_was_copied();
                if self.image.is_some() {
                    Ok(())
                } else {
                    no("no such process")
                }
            }
            Step::Send if self.image_needs_memory && !self.memory_there => {
                no("the memory that it needs is not there")
            }
            Step::Send => {
                self.sent = !half;
                if half { no("half") } else { Ok(()) }
            }
            Step::Restore if half => {
                // Its node finds nothing of it, and says so for good.
                self.arrival = Arrival::Never;
                no("half")
            }
            Step::Restore => self.restore().inspect_err(|_| {
                self.arrival = self.arrival.settled(self.destination.is_some());
            }),
            Step::Settle if self.settle() => Ok(()),
            Step::Settle => no("it does not run there"),
            Step::Recreate => self.recreate(false, false),
            Step::RecreateHere => self.recreate(true, moving.objects_may_be_old()),
            Step::Connect => self.connect(false, half),
            Step::ConnectHere => self.connect(true, half),
            Step::Resume => self.resume(false, half),
            Step::ResumeHere => self.resume(true, half),
            Step::BringBack if half => no("half"),
            Step::BringBack => {
                assert!(self.source.is_none(), "restored over the process itself");
                self.source = self.image.clone();
                self.source
                    .as_ref()
                    .map(drop)
                    .ok_or_else(|| "there is no image".to_owned())
            }
            Step::ResumePartners => {
                self.resume_partner();
                Ok(())
            }
            Step::End => unreachable!(),
        }
    }

    /// What came ahead is kept with the image, and not without.
    fn forget_memory(&mut self) {
        self.memory_there &= self.sent;
    }

    /// A partner that goes on breaks its connection where nobody answers it.
    fn partner_goes_on(&mut self) {
        let other = self.source.as_ref().or(self.destination.as_ref());
        let answers = other.is_some_and(|process| {
            process.connected && process.objects == Some(self.partner_knows)
        });
        self.partner_connected &= self.partner_suspended || answers;
    }

    fn runs_at_one_place_at_most(&self) {
        assert!(
            self.source.is_none() || self.destination.is_none(),
            "the process runs at two places: {self:?}"
        );
    }

    /// Whether the process and its partner can work with each other.
    fn works(&self, process: &Process) -> bool {
        process.connected
            && process.objects == Some(self.partner_knows)
            && self.partner_connected
            && !process.suspended
            && !self.partner_suspended
    }

    fn judge(&self, ending: &Ending) {
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
                assert!(!why.is_empty());
                assert!(
                    lost.is_none() || self.touched,
                    "nothing was touched, and {lost:?} is said to be lost"
                );
                said(&self.source, lost);
            }
            Ending::Gone { why } => {
                assert!(!why.is_empty());
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

/// Whether nobody but this host takes part in the step, so that its outcome is heard of.
fn local(step: Step) -> bool {
    matches!(
        step,
        Step::Release | Step::Dump | Step::BringBack | Step::RecreateHere
    )
}

fn try_step(world: &mut World, moving: &mut Move, fault: Fault) {
    world.touched |= moving.step() != Step::Wait;
    if matches!(fault, Fault::NotStored | Fault::NotStoredAndDies) {
        let goes_on = moving.unstored("it cannot be stored");
        if fault == Fault::NotStoredAndDies {
            if goes_on {
                let _unheard = world.carry_out(moving, false);
            }
            (*moving, world.told) = world.stored.clone();
            moving.recover(world.source.is_some());
            return;
        }
        if !goes_on {
            return;
        }
    } else {
        world.stored = (moving.clone(), world.told);
    }
    let step = moving.step();
    world.tried_back |= step == Step::BringBack;
    if fault == Fault::DestinationDies && step != Step::Recreate {
        // A holder ends with its node.
        world.held = false;
        world.forget_memory();
    }
    let mut happened = match fault {
        Fault::PartnerLetGo => {
            // What it made ahead goes as well.
            world.resume_partner();
            world.partner_goes_on();
            world
                .carry_out(moving, false)
                .map_or_else(Happened::Failed, |()| Happened::Done)
        }
        Fault::DestinationDies if step == Step::Recreate => {
            if world.recreated.is_none() {
                let _unheard = world.recreate(false, false);
                // It knows that it asked the process, and not what that made.
                world.recreated = None;
            }
            world.held = false;
            Happened::Unknown("silence".to_owned())
        }
        Fault::DiesBefore => {
            world.held = false;
            world.forget_memory();
            moving.recover(world.source.is_some());
            return;
        }
        Fault::DiesAfter => {
            let told = world.told;
            let _unheard = world.carry_out(moving, false);
            // What the source's node was told, it had not stored.
            world.told = told;
            world.held = false;
            world.forget_memory();
            moving.recover(world.source.is_some());
            return;
        }
        Fault::Killed => {
            world.source = None;
            world
                .carry_out(moving, false)
                .map_or_else(Happened::Failed, |()| Happened::Done)
        }
        Fault::None | Fault::NotStored | Fault::NotStoredAndDies => world
            .carry_out(moving, false)
            .map_or_else(Happened::Failed, |()| Happened::Done),
        Fault::Half => world
            .carry_out(moving, true)
            .map_or_else(Happened::Failed, |()| Happened::Done),
        Fault::Refused if matches!(step, Step::Restore | Step::Settle) => {
            if world.settle() {
                Happened::Done
            } else {
                Happened::Failed("refused".to_owned())
            }
        }
        Fault::Refused => Happened::Failed("refused".to_owned()),
        // What the destination says of a restore, and what is said of one here, is true.
        Fault::Misreported if matches!(step, Step::Restore | Step::Settle | Step::BringBack) => {
            world
                .carry_out(moving, false)
                .map_or_else(Happened::Failed, |()| Happened::Done)
        }
        Fault::Misreported => {
            let _unheard = world.carry_out(moving, false);
            Happened::Failed("it failed after it was done".to_owned())
        }
        Fault::Lost | Fault::Unheard | Fault::DestinationDies if local(step) => world
            .carry_out(moving, false)
            .map_or_else(Happened::Failed, |()| Happened::Done),
        Fault::Lost | Fault::DestinationDies => Happened::Unknown("silence".to_owned()),
        Fault::Unheard => {
            let _unheard = world.carry_out(moving, false);
            Happened::Unknown("silence".to_owned())
        }
    };
    // The world looks whether the process has ended when something fails at the source.
    let at_source = step.needs_process_here();
    if at_source
        && world.source.is_none()
        && matches!(happened, Happened::Failed(_) | Happened::Unknown(_))
    {
        happened = Happened::Died("the process has ended".to_owned());
    }
    moving.happened(happened);
}

fn explore(
    world: &World,
    moving: &Move,
    faults: usize,
    path: &mut Vec<(Step, Fault)>,
    ends: &mut u64,
) {
    assert!(path.len() < 200, "it does not end: {path:?}");
    if let Some(ending) = moving.ending() {
        *ends += 1;
        let judged = std::panic::catch_unwind(|| world.judge(&ending));
        assert!(judged.is_ok(), "{ending:?} after {path:?}");
        return;
    }
    for fault in FAULTS {
        if fault != Fault::None && faults == 0 {
            continue;
        }
        let (mut next, mut after) = (world.clone(), moving.clone());
        path.push((moving.step(), fault));
        try_step(&mut next, &mut after, fault);
        next.partner_goes_on();
        next.runs_at_one_place_at_most();
        let left = if fault == Fault::None {
            faults
        } else {
            faults - 1
        };
        explore(&next, &after, left, path, ends);
        path.pop();
    }
}

const NOTHING: Ahead = Ahead {
    memory: false,
    objects: false,
};
const MEMORY: Ahead = Ahead {
    memory: true,
    ..NOTHING
};
const OBJECTS: Ahead = Ahead {
    objects: true,
    ..NOTHING
};
const ALL: Ahead = Ahead {
    memory: true,
    objects: true,
};

#[test]
fn the_process_runs_at_one_place_and_what_is_said_of_it_is_true() {
    for moving in [NOTHING, OBJECTS, ALL].map(Move::with) {
        let mut ends = 0;
        explore(&World::new(), &moving, 3, &mut Vec::new(), &mut ends);
        assert!(ends > 10_000, "{ends} ends");
    }
}

#[test]
fn a_move_without_faults_takes_the_steps_in_order() {
    use Step::*;
    let all = [
        Wait, PreCopy, PreSetup, Suspend, Drain, Release, Dump, Send, Restore, Recreate, Connect,
        Resume,
    ];
    for ahead in [NOTHING, OBJECTS, MEMORY, ALL] {
        let left_out = |step| match step {
            PreCopy => !ahead.memory,
            PreSetup => !ahead.objects,
            _ => false,
        };
        let expected: Vec<Step> = all.into_iter().filter(|step| !left_out(*step)).collect();
        let (mut world, mut moving, mut steps) = (World::new(), Move::with(ahead), Vec::new());
        while moving.step() != End {
            steps.push(moving.step());
            try_step(&mut world, &mut moving, Fault::None);
        }
        assert_eq!(steps, expected);
        assert_eq!(moving.ending(), Some(Ending::Moved { lost: None }));
    }
}

#[test]
fn a_move_goes_on_without_what_was_not_made_ahead() {
    for fault in [Fault::Refused, Fault::Lost, Fault::Unheard, Fault::Half] {
        let (mut world, mut moving) = (World::new(), Move::with(ALL));
        for fault in [Fault::None, fault, fault] {
            try_step(&mut world, &mut moving, fault);
        }
        assert_eq!(moving.step(), Step::Suspend);
        while moving.step() != Step::End {
            try_step(&mut world, &mut moving, Fault::None);
        }
        assert_eq!(moving.ending(), Some(Ending::Moved { lost: None }));
        world.judge(&Ending::Moved { lost: None });
        assert!(!world.held && !world.prepared, "{fault:?}: {world:?}");
        assert!(!world.image_needs_memory, "{fault:?}: {world:?}");
    }
}

#[test]
fn a_move_is_cancelled_until_the_destination_was_told_to_restore() {
    let (mut world, mut moving) = (World::new(), Move::with(ALL));
    loop {
        let (mut there, mut cancelled) = (world.clone(), moving.clone());
        let could = cancelled.cancel("cancelled");
        assert_eq!(could, moving.step().cancellable());
        while cancelled.step() != Step::End {
            try_step(&mut there, &mut cancelled, Fault::None);
        }
        let stayed = Ending::Stayed {
            why: "cancelled".to_owned(),
            lost: None,
        };
        let ending = cancelled.ending().unwrap();
        assert_eq!(ending == stayed, could, "{ending:?}");
        there.judge(&ending);
        if moving.step() == Step::End {
            return;
        }
        try_step(&mut world, &mut moving, Fault::None);
    }
}

#[test]
fn in_doubt_the_process_stays_in_its_image() {
    let mut moving = Move::default();
    for _ in 0..6 {
        moving.happened(Happened::Done);
    }
    assert_eq!(moving.step(), Step::Restore);
    for _ in 0..1000 {
        moving.happened(Happened::Unknown("silence".to_owned()));
        assert_eq!(moving.step(), Step::Settle);
    }
    moving.happened(Happened::Failed("it does not run there".to_owned()));
    assert_eq!(moving.step(), Step::BringBack);
}
