//! The order of the steps.

use serde::{Deserialize, Serialize};

/// How often a step is tried whose outcome is not known, where trying it again does no harm.
pub const MAX_TRIES: u32 = 20;

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Until no other move has the process or one of its partners; this one has them then. Nothing is touched.
    Wait,
    /// The process's memory is copied to the destination while it works. The move goes on without what was not copied.
    PreCopy,
    /// What the process will need is made at the destination and at its partners, while it works. The move goes on
    /// without what was not made.
    PreSetup,
    /// The process and its partners keep new requests back.
    Suspend,
    /// They wait until nothing is in flight.
    Drain,
    /// The process gives the device's objects back.
    Release,
    /// The process becomes an image at the source, and runs nowhere.
    Dump,
    /// The image is copied to the destination.
    Send,
    /// The destination makes the process of the image. From here on only it knows whether the process runs there.
    Restore,
    /// The destination says whether the process runs there; if it does not, it never will.
    Settle,
    /// The process makes its objects again at the destination.
    Recreate,
    /// The process and its partners connect to each other's new queue pairs.
    Connect,
    /// All go on.
    Resume,
    /// The way back: the source makes the process of the image.
    BringBack,
    /// The way back: the process makes its objects again at the source.
    RecreateHere,
    /// The way back: the process at the source and its partners connect to each other.
    ConnectHere,
    /// The way back: the process at the source and its partners go on.
    ResumeHere,
    /// Partners go on without the process: their requests to it fail.
    ResumePartners,
    /// Nothing more; see [`Move::ending`].
    End,
}

impl Step {
    /// Whether the move can still be cancelled before this step.
    pub const fn cancellable(self) -> bool {
        matches!(
            self,
            Step::Wait
                | Step::PreCopy
                | Step::PreSetup
                | Step::Suspend
                | Step::Drain
                | Step::Release
                | Step::Dump
                | Step::Send
                | Step::Restore
        )
    }

    /// Whether the process has to run at the source for it.
    pub const fn needs_process_here(self) -> bool {
        matches!(
            self,
            Step::Wait
                | Step::PreCopy
                | Step::PreSetup
                | Step::Suspend
                | Step::Drain
                | Step::Release
                | Step::Dump
                | Step::RecreateHere
                | Step::ConnectHere
                | Step::ResumeHere
        )
    }

    /// The step's name for people and programs.
    pub const fn name(self) -> &'static str {
        match self {
            Step::Wait => "claiming",
            Step::PreCopy => "precopying",
            Step::PreSetup => "presetup",
            Step::Suspend => "suspending",
            Step::Drain => "waiting",
            Step::Release => "releasing",
            Step::Dump => "dumping",
            Step::Send => "sending",
            Step::Restore => "restoring",
            Step::Settle => "asking",
            Step::Recreate => "recreating",
            Step::Connect => "connecting",
            Step::Resume => "resuming",
            Step::BringBack => "bringing_back",
            Step::RecreateHere | Step::ConnectHere | Step::ResumeHere => "going_on_here",
            Step::ResumePartners => "releasing_partners",
            Step::End => "ended",
        }
    }
}

/// What became of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happened {
    /// It is done. Of [`Step::Settle`]: the process runs at the destination.
    Done,
    /// It was not done, and why. Of [`Step::Restore`] and [`Step::Settle`]: the process does not run at the destination
    /// and never will by this move.
    Failed(String),
    /// Nobody answered: it may be done, or be done later.
    Unknown(String),
    /// The process at the source has ended, of itself or by somebody's signal.
    Died(String),
}

/// What is done for a move while the process works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// Its memory is copied.
    pub memory: bool,
    /// The device's objects are made.
    pub objects: bool,
}

/// How a move ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// The process runs at the destination. `lost` says which connections do not work, and why.
    Moved {
        /// Absent if all work.
        lost: Option<String>,
    },
    /// The process runs at the source.
    Stayed {
        /// Why it did not move.
        why: String,
        /// Which connections do not work, and why; absent if all do.
        lost: Option<String>,
    },
    /// The process runs nowhere.
    Gone {
        /// Why it did not move, and why it was not brought back.
        why: String,
    },
}

/// A move of one process, as its coordinator at the source keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    step: Step,
    /// Whether [`Step::PreCopy`] comes after [`Step::Wait`].
    #[serde(default)]
    pre_copy: bool,
    /// Whether [`Step::PreCopy`] was done, so that an image needs no more than what has changed since.
    #[serde(default)]
    copied: bool,
    /// Whether [`Step::PreSetup`] comes before [`Step::Suspend`].
    #[serde(default)]
    pre_setup: bool,
    /// Why it goes back.
    why: Option<String>,
    /// What does not work any more.
    lost: Option<String>,
    /// Whether the process was lost.
    gone: bool,
    /// Whether the process runs at the destination, as far as is known.
    there: bool,
    /// Whether [`Step::RecreateHere`] was begun by a coordinator that died: the keys that it made are not known.
    #[serde(default)]
    interrupted: bool,
    /// Whether dumping the process was begun.
    #[serde(default)]
    imaged: bool,
    /// Whether sending the image was begun.
    #[serde(default)]
    sent: bool,
    tries: u32,
}

impl Default for Move {
    fn default() -> Self {
        Self {
            step: Step::Wait,
            pre_copy: false,
            copied: false,
            pre_setup: false,
            why: None,
            lost: None,
            gone: false,
            there: false,
            interrupted: false,
            imaged: false,
            sent: false,
            tries: 0,
        }
    }
}

impl Move {
    /// One that does this while the process works.
    pub fn with(ahead: Ahead) -> Self {
        Self {
            pre_copy: ahead.memory,
            pre_setup: ahead.objects,
            ..Self::default()
        }
    }

    /// What is to be done now.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Whether the destination may know of the move.
    pub fn reached_destination(&self) -> bool {
        self.sent
    }

    /// Whether the destination has the process's memory as it was at [`Step::PreCopy`]. It may have lost it since.
    pub fn memory_was_copied(&self) -> bool {
        self.copied
    }

    /// Whether the process may have become an image at the source: what dumps it may end it and fail all the same.
    pub fn has_image(&self) -> bool {
        self.imaged
    }

    /// Whether a process that has its objects at [`Step::RecreateHere`] never gave them back, so that its partners know
    /// its keys.
    pub fn objects_may_be_old(&self) -> bool {
        !self.interrupted
    }

    /// How it ended, once it has.
    pub fn ending(&self) -> Option<Ending> {
        let why = || self.why.clone().unwrap_or_default();
        (self.step == Step::End).then(|| {
            if self.gone {
                Ending::Gone { why: why() }
            } else if self.there {
                Ending::Moved {
                    lost: self.lost.clone(),
                }
            } else {
                Ending::Stayed {
                    why: why(),
                    lost: self.lost.clone(),
                }
            }
        })
    }

    /// Gives up, if that is still possible: the process goes on at the source. Says whether it was.
    pub fn cancel(&mut self, why: &str) -> bool {
        let can = self.step.cancellable();
        if can {
            self.back_before(why.to_owned());
        }
        can
    }

    /// Takes that [`Move::step`] could not be stored: a death of the coordinator would go on from the step that is stored.
    /// Says whether the step may be carried out nevertheless; if not, it is to be stored first. The way back is taken
    /// where it is open.
    pub fn unstored(&mut self, why: &str) -> bool {
        self.cancel(why);
        // Whoever goes on does so again without harm, and must not wait for a disk that is full.
        matches!(self.step, Step::ResumeHere | Step::ResumePartners)
    }

    /// Goes on after the death of the coordinator, from what it had stored before it began [`Move::step`]. `lives` says
    /// whether the process runs at the source.
    pub fn recover(&mut self, lives: bool) {
        let why = "the node ended while the process was moved".to_owned();
        match self.step {
            Step::Wait if lives => self.back(Step::End, why),
            // Whether the process was dumped shows in whether it lives.
            Step::PreCopy | Step::PreSetup | Step::Suspend | Step::Drain if lives => {
                self.back(Step::ResumeHere, why);
            }
            // An image of a process that runs is made use of by nobody.
            Step::Release | Step::Dump | Step::Send if lives => {
                self.back(Step::RecreateHere, why);
            }
            Step::Dump | Step::Send => self.back(Step::BringBack, why),
            // The process that the image is of may have been brought back already.
            Step::BringBack if lives => self.step = Step::RecreateHere,
            Step::BringBack => {}
            Step::Restore => self.go(Step::Settle),
            Step::Wait
            | Step::PreCopy
            | Step::PreSetup
            | Step::Suspend
            | Step::Drain
            | Step::Release => {
                self.lose(format!("{why}, and the process has ended"));
            }
            Step::RecreateHere | Step::ConnectHere | Step::ResumeHere if !lives => {
                self.lose(format!("{why}, and the process has ended"));
            }
            Step::RecreateHere => self.interrupted = true,
            Step::Settle
            | Step::Recreate
            | Step::Connect
            | Step::Resume
            | Step::ConnectHere
            | Step::ResumeHere
            | Step::ResumePartners
            | Step::End => {}
        }
    }

    /// Takes what became of the step.
    pub fn happened(&mut self, what: Happened) {
        self.tries += 1;
        let again = self.tries < MAX_TRIES;
        match (self.step, what) {
            (Step::Wait, Happened::Done) if self.pre_copy => self.go(Step::PreCopy),
            (Step::PreCopy, Happened::Done) => {
                self.copied = true;
                self.go_after_memory();
            }
            (Step::Wait, Happened::Done)
            | (Step::PreCopy, Happened::Failed(_) | Happened::Unknown(_)) => self.go_after_memory(),
            (Step::PreSetup, Happened::Done | Happened::Failed(_) | Happened::Unknown(_)) => {
                self.go(Step::Suspend);
            }
            (Step::Suspend, Happened::Done) => self.go(Step::Drain),
            (Step::Drain, Happened::Done) => self.go(Step::Release),
            (Step::Release, Happened::Done) => self.go(Step::Dump),
            (Step::Dump, Happened::Done) => self.go(Step::Send),
            (Step::Send, Happened::Done) => self.go(Step::Restore),
            (Step::Restore | Step::Settle, Happened::Done) => {
                self.there = true;
                self.go(Step::Recreate);
            }
            (Step::Recreate, Happened::Done) => self.go(Step::Connect),
            (Step::Connect, Happened::Done) => self.go(Step::Resume),
            (Step::Resume | Step::ResumeHere | Step::ResumePartners, Happened::Done) => {
                self.go(Step::End);
            }
            (Step::BringBack, Happened::Done) => self.go(Step::RecreateHere),
            (Step::RecreateHere, Happened::Done) => self.go(Step::ConnectHere),
            (Step::ConnectHere, Happened::Done) => self.go(Step::ResumeHere),

            (
                Step::Wait | Step::Suspend | Step::Drain | Step::Release | Step::Dump | Step::Send,
                Happened::Failed(why) | Happened::Unknown(why),
            ) => self.back_before(why),
            // The destination restores nothing that it was not told to, and it was told.
            (Step::Restore, Happened::Unknown(_)) => self.go(Step::Settle),
            (Step::Restore | Step::Settle, Happened::Failed(why)) => {
                self.back(Step::BringBack, why)
            }
            // In doubt the process stays where it is: in the image.
            (Step::Settle, Happened::Unknown(_)) => {}

            // These do no harm if they are done twice.
            (
                Step::Recreate
                | Step::Connect
                | Step::Resume
                | Step::ConnectHere
                | Step::ResumeHere
                | Step::ResumePartners,
                Happened::Unknown(_),
            ) if again => {}
            (Step::Recreate | Step::Connect, Happened::Failed(why) | Happened::Unknown(why)) => {
                // It has run there, so its image is no longer what it is.
                self.lacks(why);
                self.go(Step::ResumePartners);
            }
            (
                Step::RecreateHere | Step::ConnectHere,
                Happened::Failed(why) | Happened::Unknown(why),
            ) => {
                self.lacks(why);
                self.go(Step::ResumeHere);
            }
            (
                Step::Resume | Step::ResumeHere | Step::ResumePartners,
                Happened::Failed(why) | Happened::Unknown(why),
            ) => {
                self.lacks(why);
                self.go(Step::End);
            }
            (Step::BringBack, Happened::Failed(why) | Happened::Unknown(why)) => {
                let first = self.why.take().unwrap_or_default();
                self.lose(format!(
                    "{first}; the process was not restored where it was either: {why}"
                ));
            }
            (
                Step::Settle
                | Step::Restore
                | Step::Recreate
                | Step::Connect
                | Step::Resume
                | Step::ResumePartners
                | Step::End,
                Happened::Died(_),
            )
            | (Step::End, _) => {}
            // What dumps it ends it last, so its image may be whole whatever was said of the dump.
            (Step::Dump, Happened::Died(why)) if self.imaged => self.back(Step::BringBack, why),
            (_, Happened::Died(why)) => {
                let first = self
                    .why
                    .take()
                    .map(|first| first + "; ")
                    .unwrap_or_default();
                self.lose(format!("{first}{why}"));
            }
        }
    }

    /// Goes to what comes after the memory.
    fn go_after_memory(&mut self) {
        self.go(if self.pre_setup {
            Step::PreSetup
        } else {
            Step::Suspend
        });
    }

    fn go(&mut self, step: Step) {
        self.imaged |= matches!(step, Step::Dump | Step::Send | Step::BringBack);
        self.sent |= matches!(step, Step::Send);
        self.step = step;
        self.tries = 0;
    }

    fn back(&mut self, step: Step, why: String) {
        self.why = Some(why);
        self.go(step);
    }

    /// Goes back from a step that was not done, or of which it does not matter.
    fn back_before(&mut self, why: String) {
        let first = match self.step {
            // Nobody was told anything that would have to be taken back.
            Step::Wait => Step::End,
            Step::PreCopy | Step::PreSetup | Step::Suspend | Step::Drain => Step::ResumeHere,
            Step::Release | Step::Dump => Step::RecreateHere,
            _ => Step::BringBack,
        };
        self.back(first, why);
    }

    fn lacks(&mut self, what: String) {
        match &mut self.lost {
            Some(lost) => {
                lost.push_str("; ");
                lost.push_str(&what);
            }
            None => self.lost = Some(what),
        }
    }

    fn lose(&mut self, why: String) {
        self.gone = true;
        let next = match self.step {
            Step::Wait => Step::End,
            _ => Step::ResumePartners,
        };
        self.back(next, why);
    }
}
