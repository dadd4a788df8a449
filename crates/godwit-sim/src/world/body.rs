//! Carries out the actions of a controller.

use godwit_core::Controller;
use godwit_core::action::Action;
use godwit_core::authority::Ownership;
use godwit_core::event::{AbortReason, Event, PauseReason, Phase};
use godwit_core::request::{RequestError, RequestTag};
use godwit_core::units::{Sectors, Time};
use godwit_core::wire::{Message, TrafficClass};

use super::Occurrence;
use super::World;
use super::name;
use super::node::Holder;
use super::{MICROSECOND, MILLISECOND};
use crate::plan::Moment;
use crate::run::coverage::Reached;

impl World {
    /// Starts a node's process from its stored state.
    pub(super) fn start_controller(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        it.clear();
        let limits = self.plan.limits;
        let mut controller = Controller::new(limits, Sectors(self.plan.sectors), it.record);
        if let Some(prepare) = &self.prepare {
            prepare(&mut controller);
        }
        self.forward_sessions += 1;
        controller.resume_forwarding(it.shared, self.forward_sessions);
        it.controller = Some(controller);
        self.restore_missing(node);
        self.restore_written(node);
        self.after_call(node);
    }

    /// Calls into a node's controller and carries out the resulting actions.
    pub(super) fn with<T>(
        &mut self,
        node: usize,
        call: impl FnOnce(&mut Controller, Time) -> T,
    ) -> Option<T> {
        let now = self.nodes[node].clock.local(self.now);
        let result = call(self.nodes[node].controller.as_mut()?, now);
        while let Some(action) = self.nodes[node]
            .controller
            .as_mut()
            .and_then(Controller::poll_action)
        {
            self.carry_out(node, action);
        }
        self.after_call(node);
        Some(result)
    }

    /// Updates the node after a call, and checks the invariants.
    fn after_call(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let Some(controller) = &it.controller else {
            return;
        };
        it.deadline = controller.next_deadline().map(|time| it.clock.global(time));
        let in_flight = controller.requests_in_flight();
        let serves = controller.serves();
        if serves {
            it.served_on = Some(it.record);
        }
        let delayed = controller.progress().map_or(0, |progress| {
            let promise = progress.promise;
            promise.delayed_bytes + promise.delayed_bytes_sent + promise.delayed_bytes_cancelled
        });
        let delays = std::mem::replace(&mut it.delayed, delayed) < delayed;
        let paused = std::mem::take(&mut it.excused);
        let early = std::mem::take(&mut it.early_answers);
        let held = it
            .holders
            .iter()
            .filter(|holder| {
                matches!(
                    holder,
                    Holder::Client(_) | Holder::Gone { .. } | Holder::Peer { .. }
                )
            })
            .count();
        if in_flight as usize != held {
            self.fail("the controller counts the requests that it has", || {
                format!("{} counts {in_flight}, has {held}", name(node))
            });
        }
        if !paused {
            let answered = if delays {
                Reached::AnsweredAlone
            } else {
                Reached::Posted
            };
            self.coverage.add(answered, early);
        }
        self.check_authority(node, serves);
    }

    fn carry_out(&mut self, node: usize, action: Action) {
        self.note(|| format!("{}  {}", name(node), describe(&action)));
        match action {
            Action::Disk { tag, operation } => self.start_disk(node, tag, operation),
            Action::Send { class, message } => self.send(node, class, message),
            Action::SendForwarder { message, .. } => self.send_forwarder(node, message),
            Action::DiscardUnsent { class } => self.discard(node, class),
            Action::Complete { tag, result } => self.complete(node, tag, result),
            Action::ReleaseReplica { tag } => {
                if self.nodes[node].holders[tag.0 as usize] != Holder::Replica {
                    self.fail("a tag is released once", || format!("{tag:?}"));
                }
                self.free_tag(node, tag);
            }
            Action::Persist { record } => self.store(node, record),
            Action::ReleasePulled { slot } => {
                self.nodes[node].pull_buffers[usize::from(slot.0)] = None;
            }
            Action::NoteHere { extent } => self.note_here(node, extent),
            Action::StoreMissing => self.store_missing(node),
            Action::Notify(event) => self.notified(node, &event),
        }
    }

    fn discard(&mut self, node: usize, class: TrafficClass) {
        if let Some(session) = self.nodes[node].migration {
            let dropped = self.network.discard_unsent(session, node, class);
            match class {
                TrafficClass::Copy => self.coverage.add(Reached::CopyDiscarded, dropped),
                TrafficClass::Sync => self.coverage.add(Reached::SyncDiscarded, dropped),
                TrafficClass::Control | TrafficClass::Pull | TrafficClass::Image => {
                    self.fail("control and pull frames are never discarded", || {
                        format!("{dropped} frames")
                    });
                }
            }
        }
    }

    fn complete(&mut self, node: usize, tag: RequestTag, result: Result<(), RequestError>) {
        let it = &mut self.nodes[node];
        let holder = it.holders[tag.0 as usize];
        let data = it.buffers[tag.0 as usize].take();
        if let (Some(id), Ok(())) = (it.doubled[tag.0 as usize].take(), result) {
            it.posted.push(id);
            it.early_answers += 1;
        }
        self.free_tag(node, tag);
        match holder {
            Holder::Client(place) => self.answered(node, place, result, data),
            Holder::Gone { .. } => {}
            Holder::Peer {
                session,
                theirs,
                number,
                read,
                write,
            } => {
                if let (Some(write), Ok(())) = (write, result) {
                    self.nodes[node].done.insert(write);
                }
                let data = data.filter(|_| read && result.is_ok());
                let message = Message::ForwardReply {
                    tag: theirs,
                    number,
                    length: data.as_ref().map_or(0, |data| data.len() as u32 * 512),
                    result,
                };
                self.transmit(session, node, TrafficClass::Sync, message, data);
            }
            Holder::Nobody | Holder::Replica => {
                self.fail("a request is answered once", || format!("{tag:?}"));
            }
        }
    }

    fn free_tag(&mut self, node: usize, tag: RequestTag) {
        let it = &mut self.nodes[node];
        it.holders[tag.0 as usize] = Holder::Nobody;
        it.buffers[tag.0 as usize] = None;
        it.free_tags.push(tag);
        for (session, connection) in std::mem::take(&mut self.nodes[node].blocked) {
            self.schedule(
                1,
                Occurrence::Unblocked {
                    from: 1 - node,
                    session,
                    connection,
                },
            );
        }
    }

    fn notified(&mut self, node: usize, event: &Event) {
        match *event {
            Event::PhaseEntered { phase, .. } => {
                self.phase = Some(phase);
                if !matches!(phase, Phase::Copying | Phase::Verifying | Phase::Converged) {
                    self.promise = None;
                }
                if phase == Phase::Committing {
                    self.forward_on_migration(node);
                }
                if phase == Phase::Converged {
                    self.reached(Reached::Converged);
                    self.schedule_switchover();
                }
                self.moment(Moment::Entered(phase));
            }
            Event::Paused { reason, .. } => {
                self.paused = true;
                self.reached(match reason {
                    PauseReason::GuestLatency => Reached::PausedGuestLatency,
                    PauseReason::LinkQueue => Reached::PausedLinkQueue,
                    PauseReason::InterfaceBudget => Reached::PausedInterfaceBudget,
                });
                self.give_double_writes_up(node);
                self.moment(Moment::Paused);
            }
            Event::PolicySwitched { .. } => self.policy_switched(node),
            Event::Resumed { .. } => {
                self.paused = false;
                self.reached(Reached::Resumed);
                self.moment(Moment::Resumed);
            }
            Event::MigrationCompleted { .. } => self.migration_completed(node),
            Event::MigrationAborted {
                reason, mismatch, ..
            } => {
                self.migration_aborted(node, reason);
                if reason == AbortReason::VerifyMismatch {
                    self.fail("the images are equal where verification looks", || {
                        format!("{mismatch:?}")
                    });
                }
            }
            Event::ReceiveAborted { .. } => {
                self.nodes[node].missing = None;
                if let Some(session) = self.nodes[node].migration.take() {
                    self.stop_serving_session(node, session);
                    self.close(session, node);
                }
            }
            Event::ReceiveCompleted { .. } => {
                self.phase = Some(Phase::Completed);
                self.moment(Moment::Entered(Phase::Completed));
            }
            Event::Owes { .. } => {
                self.reached(Reached::MovedInPart);
                let delay = self.link_random.magnitude(MICROSECOND, 5 * MILLISECOND);
                self.schedule(delay, Occurrence::ConnectPull(node));
            }
            Event::OwesNothing { .. } => {
                self.reached(Reached::OwesNothing);
                if let Some(session) = self.nodes[node].pull.take() {
                    self.close(session, node);
                }
            }
            Event::BecameBase { migration } => {
                self.reached(Reached::BecameBase);
                self.nodes[node].base = Some(migration);
            }
            Event::LeftImage { .. } => {
                self.reached(Reached::LeftImage);
                self.nodes[node].missing = None;
                self.leave_image(node);
            }
            Event::Whole { .. } => {
                self.reached(Reached::Whole);
                self.nodes[node].missing = None;
            }
            Event::OwnerMoved => {
                self.reached(Reached::OwnerMoved);
                self.nodes[node].forward = None;
                self.schedule_reconnect(node);
            }
            Event::NeedPeer { .. } => {
                let delay = self.link_random.between(20_000, 2_000_000);
                self.schedule(delay, Occurrence::Dial(node));
            }
            // Judging the obstacle takes longer than a run.
            Event::Obstructed { .. } => {}
            Event::AuthorityChanged { record } => {
                if let (Ownership::Accepted { .. }, Some(session)) =
                    (record.ownership, self.nodes[node].migration)
                {
                    self.serve_session(node, session, true);
                }
            }
            Event::SharingChanged { shared } => self.store_sharing(node, shared),
        }
    }

    /// Ends the wait for the destination after a pause or an abort.
    pub(super) fn give_double_writes_up(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        it.excused = true;
        let given_up = it.doubled.iter().flatten().count();
        it.doubled.fill(None);
        it.posted.clear();
        self.coverage.add(Reached::GivenUp, given_up as u64);
    }
}

/// Describes an action in one line, without unimportant parts.
fn describe(action: &Action) -> String {
    match action {
        Action::Disk { tag, operation } => format!("disk    {tag:?} {operation:?}"),
        Action::Send { message, .. } => format!("send    {message:?}"),
        Action::SendForwarder { message, .. } => format!("send    {message:?}"),
        Action::DiscardUnsent { class } => format!("discard {class:?}"),
        Action::Complete { tag, result } => format!("answer  {tag:?} {result:?}"),
        Action::ReleaseReplica { tag } => format!("release {tag:?}"),
        Action::Persist { record } => format!("store   {record:?}"),
        Action::ReleasePulled { slot } => format!("release {slot:?}"),
        Action::NoteHere { extent } => format!("here    {extent:?}"),
        Action::StoreMissing => "store   what is missing".to_owned(),
        Action::Notify(event) => format!("event   {event:?}"),
    }
}
