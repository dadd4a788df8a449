//! The order of the steps of a move.

use serde::{Deserialize, Serialize};

/// Most attempts at an idempotent step with an unknown outcome.
pub const MAX_TRIES: u32 = 20;

/// The next step of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Waits until no other move has the process or a partner, then claims all of them. Touches no process.
    Wait,
    /// Copies the process's memory to the destination while the process runs. The move goes on without memory that was
    /// not copied.
    PreCopy,
    /// Makes objects for the process at the destination and at the partners while the process runs. The move goes on
    /// without objects that were not made.
    PreSetup,
    /// Makes the process and its partners keep back new requests.
    Suspend,
    /// Waits until nothing is in flight between the process and its partners.
    Drain,
    /// Makes the process give back the objects of the device.
    Release,
    /// Dumps the process into an image at the source. The process runs nowhere then.
    Dump,
    /// Copies the image to the destination.
    Send,
    /// Restores the process from the image at the destination. From here on only the destination knows whether the
    /// process runs there.
    Restore,
    /// Asks the destination whether the process runs there. After a negative answer the process never will.
    Settle,
    /// Makes the process's objects again at the destination.
    Recreate,
    /// Connects the process and its partners to each other's new queue pairs.
    Connect,
    /// Lets the process and its partners go on.
    Resume,
    /// The way back: restores the process from the image at the source.
    BringBack,
    /// The way back: makes the process's objects again at the source.
    RecreateHere,
    /// The way back: connects the process at the source and its partners to each other.
    ConnectHere,
    /// The way back: lets the process at the source and its partners go on.
    ResumeHere,
    /// Lets the partners go on without the process. Their requests to the process fail.
    ResumePartners,
    /// No further step; see [`Move::ending`].
    End,
}

impl Step {
    /// Returns true if the move can still be cancelled before this step.
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

    /// Returns true if the step needs the process to run at the source.
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

    /// Returns the step's name for people and programs.
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

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happened {
    /// Success. For [`Step::Settle`]: the process runs at the destination.
    Done,
    /// Failure, with the reason. For [`Step::Restore`] and [`Step::Settle`]: the process does not run at the
    /// destination, and this move never makes the process run there.
    Failed(String),
    /// No answer: the step may be done now or later.
    Unknown(String),
    /// The process at the source has ended by itself or by a signal.
    Died(String),
}

/// The work done ahead of a move, while the process runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// True to copy the process's memory.
    pub memory: bool,
    /// True to make the device's objects.
    pub objects: bool,
}

/// The ending of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// The process runs at the destination.
    Moved {
        /// The connections that do not work, and the reasons; absent if all work.
        lost: Option<String>,
    },
    /// The process runs at the source.
    Stayed {
        /// The reason why the process did not move.
        why: String,
        /// The connections that do not work, and the reasons; absent if all work.
        lost: Option<String>,
    },
    /// The process runs nowhere.
    Gone {
        /// The reasons why the process neither moved nor was restored at the source.
        why: String,
    },
}

/// A move of one process, as the coordinator at the source keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    step: Step,
    /// True if [`Step::PreCopy`] comes after [`Step::Wait`].
    #[serde(default)]
    pre_copy: bool,
    /// True once [`Step::PreCopy`] was done: the image then needs only later changes.
    #[serde(default)]
    copied: bool,
    /// True if [`Step::PreSetup`] comes before [`Step::Suspend`].
    #[serde(default)]
    pre_setup: bool,
    /// The reason for the way back.
    why: Option<String>,
    /// The connections that do not work any more.
    lost: Option<String>,
    /// True if the process was lost.
    gone: bool,
    /// True if the process is known to run at the destination.
    there: bool,
    /// True if a coordinator that died had begun [`Step::RecreateHere`]: the new keys are unknown.
    #[serde(default)]
    interrupted: bool,
    /// True once dumping the process was begun.
    #[serde(default)]
    imaged: bool,
    /// True once sending the image was begun.
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
    /// Returns a new move with this work ahead.
    pub fn with(ahead: Ahead) -> Self {
        Self {
            pre_copy: ahead.memory,
            pre_setup: ahead.objects,
            ..Self::default()
        }
    }

    /// Returns the current step.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Returns true if the destination may know of the move.
    pub fn reached_destination(&self) -> bool {
        self.sent
    }

    /// Returns true if the destination received the process's memory at [`Step::PreCopy`]. The destination may have
    /// lost the memory since.
    pub fn memory_was_copied(&self) -> bool {
        self.copied
    }

    /// Returns true if the source may have an image of the process. A dump may end the process and still fail.
    pub fn has_image(&self) -> bool {
        self.imaged
    }

    /// Returns true if a process with objects at [`Step::RecreateHere`] may never have given these back: the partners
    /// then know the keys.
    pub fn objects_may_be_old(&self) -> bool {
        !self.interrupted
    }

    /// Returns the ending of a finished move.
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

    /// Cancels the move if no point of no return has passed, and lets the process go on at the source. Returns true if
    /// the move was cancelled.
    pub fn cancel(&mut self, why: &str) -> bool {
        let can = self.step.cancellable();
        if can {
            self.back_before(why.to_owned());
        }
        can
    }

    /// Reacts to a failure to store [`Move::step`]: after a death, the coordinator would continue from the stored step.
    /// Cancels the move if possible. Returns true if the current step may be carried out nevertheless; otherwise the
    /// step must be stored first.
    pub fn unstored(&mut self, why: &str) -> bool {
        self.cancel(why);
        // Repeating these steps is harmless, and the process must not wait for a disk that is full.
        matches!(self.step, Step::ResumeHere | Step::ResumePartners)
    }

    /// Continues after the coordinator's death, from the state stored before [`Move::step`] began. `lives` is true if
    /// the process runs at the source.
    pub fn recover(&mut self, lives: bool) {
        let why = "the node ended while the process was moved".to_owned();
        match self.step {
            Step::Wait if lives => self.back(Step::End, why),
            // A process that lives was not dumped.
            Step::PreCopy | Step::PreSetup | Step::Suspend | Step::Drain if lives => {
                self.back(Step::ResumeHere, why);
            }
            // The image of a process that still runs is never used.
            Step::Release | Step::Dump | Step::Send if lives => {
                self.back(Step::RecreateHere, why);
            }
            Step::Dump | Step::Send => self.back(Step::BringBack, why),
            // The process may have been restored from the image already.
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

    /// Records the outcome of the step and goes to the next step.
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
            // The destination restores only on request, and the request was sent.
            (Step::Restore, Happened::Unknown(_)) => self.go(Step::Settle),
            (Step::Restore | Step::Settle, Happened::Failed(why)) => {
                self.back(Step::BringBack, why)
            }
            // In doubt the process stays in the image.
            (Step::Settle, Happened::Unknown(_)) => {}

            // These steps are idempotent.
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
                // The process has run at the destination, so the image is outdated.
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
            // A dump ends the process last, so the image may be complete even if the dump was reported as failed.
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

    /// Takes the way back from a step that was not done or does not matter.
    fn back_before(&mut self, why: String) {
        let first = match self.step {
            // Nothing was changed, so there is nothing to undo.
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
