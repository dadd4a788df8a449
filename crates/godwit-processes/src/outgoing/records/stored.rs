//! The durable record of a move, stored before each of its steps.

use godwit_move::{Course, Ending, Plane, Progress, Step};
use godwit_verbs::mover::Party;
use godwit_verbs::shim::Recreated;
use serde::{Deserialize, Serialize};

use super::super::preparing::chosen::{Chosen, name_of};
use super::super::steps::Where;
use crate::host::address::OwnAddress;
use crate::host::runc::Container;
use crate::host::subject::Subject;

/// The durable record of a move.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::outgoing) struct Outgoing {
    pub(in crate::outgoing) id: String,
    pub(in crate::outgoing) pid: u32,
    /// The container of the process, which moves with the process.
    #[serde(default)]
    pub(in crate::outgoing) container: Option<Container>,
    /// True if the process uses no RDMA, so there is no library to ask.
    #[serde(default)]
    pub(in crate::outgoing) plain: bool,
    pub(in crate::outgoing) command: String,
    pub(in crate::outgoing) to: String,
    pub(in crate::outgoing) address: Option<OwnAddress>,
    pub(in crate::outgoing) files: Vec<String>,
    pub(in crate::outgoing) partners: Vec<(String, Party)>,
    pub(in crate::outgoing) queue_pairs: usize,
    /// True if any queue pair is for datagrams.
    #[serde(default)]
    pub(in crate::outgoing) datagrams: bool,
    pub(in crate::outgoing) layout: String,
    pub(in crate::outgoing) started_at: String,
    pub(in crate::outgoing) moving: Course,
    /// True if this move does not hold the process: the process was not asked to suspend yet, or refused. Any other
    /// holder is the move of a connected process.
    #[serde(default)]
    pub(in crate::outgoing) not_held: bool,
    /// The objects of the process's last recreation.
    pub(in crate::outgoing) made: Option<Recreated>,
    /// Memory rounds that the destination has received.
    #[serde(default)]
    pub(in crate::outgoing) rounds: u32,
    /// True if objects were made ahead of the process.
    #[serde(default)]
    pub(in crate::outgoing) ahead: bool,
    /// True if the process at the destination has taken the objects made ahead.
    #[serde(default)]
    pub(in crate::outgoing) attached: bool,
    /// True if the process at the destination has gone on. Another move may hold the process as a partner since then.
    #[serde(default)]
    pub(in crate::outgoing) goes_on: bool,
}

impl Outgoing {
    /// Returns the subject of the move.
    pub(in crate::outgoing) fn chosen(&self) -> Chosen {
        Chosen {
            pid: self.pid,
            container: self.container.clone(),
            plain: self.plain,
            reasons: Vec::new(),
        }
    }

    /// Returns the subject's name for messages.
    pub(in crate::outgoing) fn name(&self) -> String {
        name_of(self.pid, self.container.as_ref())
    }

    /// Returns the number of memory rounds that the image builds on.
    pub(in crate::outgoing) fn rounds_before(&self) -> u32 {
        match self.moving.progress(Plane::Memory) {
            Progress::Copied => self.rounds,
            _ => 0,
        }
    }

    /// Returns the subject of the image.
    pub(in crate::outgoing) fn subject(&self) -> Subject {
        Subject {
            pid: self.pid,
            layout: self.layout.clone(),
            container: self.container.clone(),
        }
    }

    /// Returns true if the process is still to be resumed. A process held by another move must not be resumed by this
    /// one.
    pub(in crate::outgoing) fn is_to_go_on(&self, place: Where) -> bool {
        match place {
            Where::Here => !self.not_held,
            Where::There => !self.goes_on,
        }
    }

    /// Returns the process's place if its datagram queue pairs may have changed there.
    pub(in crate::outgoing) fn may_have_others(&self, ending: &Ending) -> Option<Where> {
        match ending {
            _ if !self.datagrams => None,
            Ending::Moved { .. } => Some(Where::There),
            Ending::Stayed { .. } => (!self.not_held).then_some(Where::Here),
            Ending::Gone { .. } => None,
        }
    }

    /// Records that a step is about to be stored and begun: after a suspend request the process may be suspended,
    /// whatever the answer.
    pub(in crate::outgoing) fn holds_from(&mut self, step: Step) {
        self.not_held &= step != Step::Stop;
    }

    /// Does the same as [`Course::unstored`]. A step that was not stored sent no request.
    pub(in crate::outgoing) fn unstored(&mut self, why: &str) -> bool {
        self.not_held |= self.moving.step() == Step::Stop;
        self.moving.unstored(why)
    }
}

#[cfg(test)]
mod tests {
    use godwit_move::{Kind, Outcome, Refusal, Subject as Moved};

    use super::*;

    const MEMORY: Step = Step::Copy(Plane::Memory);
    const OBJECTS: Step = Step::Copy(Plane::Objects);

    fn without(left_out: &[Step]) -> Course {
        Course::new(Moved::Process, left_out.iter().copied())
    }

    fn refusal(what: &str) -> Refusal {
        Refusal::new(Kind::Refused, what)
    }

    fn plan(moving: Course) -> Outgoing {
        let stored = serde_json::json!({
            "id": "1", "pid": 7, "command": "", "to": "b", "address": null, "files": [], "partners": [],
            "queue_pairs": 1, "layout": "", "started_at": "", "moving": moving, "not_held": true, "made": null,
        });
        serde_json::from_value(stored).expect("a plan")
    }

    /// Covers each way to [`Step::ResumeHere`] without a request to the process, and two ways with a request.
    #[test]
    fn a_process_that_was_not_suspended_by_a_move_is_not_resumed_by_it() {
        let begun = |mut plan: Outgoing| {
            plan.holds_from(plan.moving.step());
            plan
        };
        let in_turn = |moving: Course| {
            let mut plan = begun(plan(moving));
            plan.moving.happened(Outcome::Done);
            plan
        };
        let ahead = begun(in_turn(without(&[MEMORY])));
        let mut cancelled = ahead.clone();
        assert!(cancelled.moving.cancel(refusal("cancelled")));
        let mut recovered = ahead.clone();
        recovered.moving.recover(true);
        let mut unstored = ahead.clone();
        unstored.unstored("the disk is full");
        let mut later = begun(in_turn(without(&[MEMORY, OBJECTS])));
        later.unstored("the disk is full");
        let mut first = in_turn(without(&[MEMORY, OBJECTS]));
        assert!(first.moving.cancel(refusal("cancelled")));
        for plan in [cancelled, recovered, unstored, later, first] {
            let plan = begun(plan);
            assert_eq!(plan.moving.step(), Step::ResumeHere);
            assert!(plan.not_held, "{plan:?}");
        }
        let mut asked = ahead;
        asked.moving.happened(Outcome::Done);
        let asked = begun(asked);
        let mut died = asked.clone();
        died.moving.recover(true);
        let mut failed = asked;
        failed.moving.happened(Outcome::Unknown(refusal("silence")));
        for plan in [died, failed] {
            let plan = begun(plan);
            assert_eq!(plan.moving.step(), Step::ResumeHere);
            assert!(!plan.not_held, "{plan:?}");
        }
    }

    #[test]
    fn a_process_that_went_on_is_not_told_to_again() {
        let mut plan = plan(without(&[]));
        assert!(plan.is_to_go_on(Where::There) && !plan.is_to_go_on(Where::Here));
        plan.goes_on = true;
        plan.not_held = false;
        // A restarted node reads this record.
        let stored = serde_json::to_vec(&plan).expect("JSON");
        let plan: Outgoing = serde_json::from_slice(&stored).expect("a plan");
        assert!(!plan.is_to_go_on(Where::There) && plan.is_to_go_on(Where::Here));
    }

    #[test]
    fn senders_are_told_where_a_process_is_that_may_have_other_queue_pairs() {
        let mut plan = plan(without(&[]));
        let why = || refusal("why");
        let moved = Ending::Moved {
            lost: Some("why".to_owned()),
        };
        let stayed = Ending::Stayed {
            why: why(),
            lost: None,
        };
        assert_eq!(plan.may_have_others(&moved), None);
        plan.datagrams = true;
        assert_eq!(plan.may_have_others(&moved), Some(Where::There));
        assert_eq!(plan.may_have_others(&stayed), None);
        plan.not_held = false;
        assert_eq!(plan.may_have_others(&stayed), Some(Where::Here));
        assert_eq!(plan.may_have_others(&Ending::Gone { why: why() }), None);
    }
}
