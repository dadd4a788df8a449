//! Carries out the actions of a controller.

use godwit_core::Controller;
use godwit_core::action::{Action, DiskOperation};
use godwit_core::authority::Ownership;
use godwit_core::event::{Event, PauseReason, Phase};
use godwit_core::request::{RequestError, RequestTag};
use godwit_core::units::{Sectors, Time};
use godwit_core::wire::{Message, TrafficClass};

use super::node::Holder;
use super::{MICROSECOND, MILLISECOND, World, name};
use crate::disk::Data;
use crate::plan::Moment;
use crate::run::coverage::Reached;

impl World {
    /// Starts a node's process from its stored state.
    pub(super) fn start_controller(&mut self, node: usize) {
        let held = self.starts_held(node);
        let it = &mut self.nodes[node];
        it.clear();
        let limits = self.plan.limits;
        let mut controller = Controller::new(limits, Sectors(self.plan.sectors), it.store.record);
        if let Some(bug) = self.bug {
            bug.plant(&mut controller);
        }
        self.forward_sessions += 1;
        controller.resume_forwarding(it.store.shared, self.forward_sessions);
        if held {
            controller.hold(it.clock.local(self.now));
        }
        it.controller = Some(controller);
        self.restore_missing(node);
        self.restore_written(node);
        self.restore_activity(node);
        self.after_call(node);
        self.start_member(node);
    }

    /// Hands the stored writes to a starting process.
    fn restore_written(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let written = it.store.take_written(Sectors(self.plan.sectors));
        if let (Some(written), Some(controller)) = (written, &mut it.controller)
            && controller.serves()
        {
            controller.restore_written(written);
            self.reached(Reached::WrittenRestored);
        }
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
            it.store.served_on = Some(it.store.record);
        }
        let delayed = controller.progress().map_or(0, |progress| {
            let promise = progress.promise;
            promise.delayed_bytes + promise.delayed_bytes_sent + promise.delayed_bytes_cancelled
        });
        let delays = std::mem::replace(&mut it.delayed, delayed) < delayed;
        let early = it.doubles.end_call();
        let held = it.buffers.held();
        if in_flight as usize != held {
            self.fail("the controller counts the requests that it has", || {
                format!("{} counts {in_flight}, has {held}", name(node))
            });
        }
        let answered = if delays {
            Reached::AnsweredAlone
        } else {
            Reached::Posted
        };
        self.count(answered, early);
        self.check_authority(node, serves);
    }

    fn carry_out(&mut self, node: usize, action: Action) {
        self.note(|| format!("{}  {}", name(node), describe(&action)));
        match action {
            Action::Disk {
                tag,
                operation:
                    operation @ (DiskOperation::Keep { .. } | DiskOperation::KeepZeroes { .. }),
            } => self.keep(node, tag, operation),
            Action::Disk { tag, operation } => self.start_disk(node, tag, operation),
            Action::ApplyKept { through } => self.apply_kept(node, through),
            Action::DropKept => self.nodes[node].kept.drop_waiting(),
            Action::Send { class, message } => self.send(node, class, message),
            Action::SendForwarder { message, .. } => self.send_forwarder(node, message),
            Action::DiscardUnsent { class } => self.discard(node, class),
            Action::Complete { tag, result } => self.complete(node, tag, result),
            Action::ReleaseReplica { tag } => {
                if self.free_tag(node, tag).0 != Holder::Replica {
                    self.fail("a tag is released once", || format!("{tag:?}"));
                }
            }
            Action::Persist { record } => self.store(node, record),
            Action::ReleasePulled { slot } => self.nodes[node].buffers.keep_pulled(slot, None),
            Action::NoteHere { extent } => self.note_here(node, extent),
            Action::StoreMissing => self.store_missing(node),
            Action::StoreActivity => self.store_activity(node),
            Action::Notify(event) => self.notified(node, &event),
        }
    }

    fn discard(&mut self, node: usize, class: TrafficClass) {
        if let Some(session) = self.nodes[node].sessions.migration {
            let dropped = self.network.discard_unsent(session, node, class);
            match class {
                TrafficClass::Copy => self.count(Reached::CopyDiscarded, dropped),
                TrafficClass::Sync => self.count(Reached::SyncDiscarded, dropped),
                TrafficClass::Control | TrafficClass::Pull | TrafficClass::Image => {
                    self.fail("control and pull frames are never discarded", || {
                        format!("{dropped} frames")
                    });
                }
            }
        }
    }

    fn complete(&mut self, node: usize, tag: RequestTag, result: Result<(), RequestError>) {
        self.nodes[node].doubles.answered(tag, result.is_ok());
        let (holder, data) = self.free_tag(node, tag);
        self.check_machine(node, holder, result);
        match holder {
            Holder::Client(place) => {
                self.answered(node, place, result, data);
                self.machine_worked(node);
            }
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

    fn free_tag(&mut self, node: usize, tag: RequestTag) -> (Holder, Data) {
        let buffers = &mut self.nodes[node].buffers;
        let freed = buffers.free(tag);
        for way in buffers.unblock() {
            self.schedule(1, move |world| world.receive(way));
        }
        freed
    }

    fn notified(&mut self, node: usize, event: &Event) {
        match *event {
            Event::PhaseEntered { phase, .. } => self.phase_entered(node, phase),
            Event::Paused { reason, .. } => self.paused(node, reason),
            Event::PolicySwitched { .. } => self.policy_switched(node),
            Event::Resumed { .. } => {
                self.course.paused = false;
                self.reached(Reached::Resumed);
                self.moment(Moment::Resumed);
            }
            Event::MigrationCompleted { .. } => self.migration_completed(node),
            Event::MigrationAborted {
                reason, mismatch, ..
            } => self.migration_aborted(node, reason, mismatch),
            Event::ReceiveAborted { .. } => self.receive_aborted(node),
            Event::ReceiveCompleted { .. } => {
                self.course.phase = Some(Phase::Completed);
                self.moment(Moment::Entered(Phase::Completed));
                self.disk_taken(node);
            }
            Event::Owes { .. } => {
                self.reached(Reached::MovedInPart);
                let delay = self.random.link.magnitude(MICROSECOND, 5 * MILLISECOND);
                self.schedule(delay, move |world| world.connect_pull(node));
            }
            Event::OwesNothing { .. } => {
                self.reached(Reached::OwesNothing);
                if let Some(session) = self.nodes[node].sessions.pull.take() {
                    self.close(session, node);
                }
            }
            Event::BecameBase { migration } => {
                self.reached(Reached::BecameBase);
                self.nodes[node].store.base = Some(migration);
            }
            Event::LeftImage { .. } => {
                self.reached(Reached::LeftImage);
                self.nodes[node].store.missing = None;
                self.leave_image(node);
            }
            Event::Whole { .. } => {
                self.reached(Reached::Whole);
                self.nodes[node].store.missing = None;
            }
            Event::OwnerMoved => {
                self.reached(Reached::OwnerMoved);
                self.nodes[node].sessions.forward = None;
                self.schedule_reconnect(node);
            }
            Event::NeedPeer { .. } => {
                let delay = self.random.link.between(20_000, 2_000_000);
                self.schedule(delay, move |world| world.dial(node));
            }
            Event::Followed { .. }
            | Event::Severed { .. }
            | Event::Follows { .. }
            | Event::CheckpointMarked { .. } => {
                self.follower_event(node, event);
            }
            // Judging the obstacle takes longer than a run.
            Event::Obstructed { .. } => {}
            Event::AuthorityChanged { record } => {
                let migration = self.nodes[node].sessions.migration;
                if let (Ownership::Accepted { .. }, Some(session)) = (record.ownership, migration) {
                    self.serve_session(node, session, true);
                }
            }
            Event::SharingChanged { shared } => self.store_sharing(node, shared),
        }
    }

    fn receive_aborted(&mut self, node: usize) {
        self.nodes[node].store.missing = None;
        if let Some(session) = self.nodes[node].sessions.migration.take() {
            self.stop_serving_session(node, session);
            self.close(session, node);
        }
        self.follower_ended(node);
    }

    fn phase_entered(&mut self, node: usize, phase: Phase) {
        self.course.phase = Some(phase);
        if !matches!(phase, Phase::Copying | Phase::Verifying | Phase::Converged) {
            self.course.promise = None;
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

    fn paused(&mut self, node: usize, reason: PauseReason) {
        self.course.paused = true;
        self.reached(match reason {
            PauseReason::GuestLatency => Reached::PausedGuestLatency,
            PauseReason::LinkQueue => Reached::PausedLinkQueue,
            PauseReason::InterfaceBudget => Reached::PausedInterfaceBudget,
        });
        self.give_double_writes_up(node);
        self.moment(Moment::Paused);
    }

    /// Ends the wait for the destination after a pause or an abort.
    pub(super) fn give_double_writes_up(&mut self, node: usize) {
        let given_up = self.nodes[node].doubles.give_up();
        self.count(Reached::GivenUp, given_up);
    }
}

/// Describes an action in one line, without unimportant parts.
fn describe(action: &Action) -> String {
    match action {
        Action::Disk { tag, operation } => format!("disk    {tag:?} {operation:?}"),
        Action::Send { message, .. } | Action::SendForwarder { message, .. } => {
            format!("send    {message:?}")
        }
        Action::DiscardUnsent { class } => format!("discard {class:?}"),
        Action::ApplyKept { through } => format!("apply   kept up to {through}"),
        Action::DropKept => "drop    what is kept".to_owned(),
        Action::Complete { tag, result } => format!("answer  {tag:?} {result:?}"),
        Action::ReleaseReplica { tag } => format!("release {tag:?}"),
        Action::Persist { record } => format!("store   {record:?}"),
        Action::ReleasePulled { slot } => format!("release {slot:?}"),
        Action::NoteHere { extent } => format!("here    {extent:?}"),
        Action::StoreMissing => "store   what is missing".to_owned(),
        Action::StoreActivity => "store   the activity log".to_owned(),
        Action::Notify(event) => format!("event   {event:?}"),
    }
}
