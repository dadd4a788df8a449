//! A protected machine: the bodies of its primary and its backup, their witness, and the checks of both.

use godwit_core::event::Event;
use godwit_core::request::RequestError;
use godwit_protect::{Backup, Grant, Member, Order, Primary, PrimaryRecord, PrimaryState};

mod activity;
mod backup;
mod checkpoints;
mod kept;
mod primary;
mod witness;

use self::checkpoints::Checkpointing;
use super::node::Holder;
use super::{World, name};
use crate::plan::ProtectionPlan;
use crate::random::Random;
use crate::run::coverage::Reached;

/// A node's part in a protection.
#[derive(Debug)]
enum Role {
    Primary(Primary),
    Backup(Backup),
}

/// The protection of a run's machine.
#[derive(Debug)]
pub(super) struct Protection {
    /// The witness's durable grant.
    witness: Grant,
    roles: [Option<Role>; 2],
    /// The durable record of a primary.
    records: [Option<PrimaryRecord>; 2],
    /// The newest grant that a backup has stored.
    known: [Grant; 2],
    /// True for a primary that lost power, and with it unflushed writes, before it was decided who goes on.
    lost_power: [bool; 2],
    /// The node of the running machine.
    machine: usize,
    /// Time since which the backup answers nothing of the primary, while severed.
    severed: Option<u64>,
    checkpoints: Option<Checkpointing>,
    random: Random,
}

impl Protection {
    pub(super) fn new(seed: u64, plan: &ProtectionPlan) -> Self {
        let first = PrimaryRecord {
            me: Member::First,
            known: Grant::FIRST,
            alone: true,
        };
        Self {
            witness: Grant::FIRST,
            roles: [None, None],
            records: [Some(first), None],
            known: [Grant::FIRST; 2],
            lost_power: [false; 2],
            machine: 0,
            severed: None,
            checkpoints: plan
                .checkpoints
                .map(|plan| Checkpointing::new(plan, Random::stream(seed, 14))),
            random: Random::stream(seed, 13),
        }
    }

    /// Returns true if the node runs the machine alone, and knows that.
    fn is_alone(&self, node: usize) -> bool {
        let state = match &self.roles[node] {
            Some(Role::Primary(primary)) => primary.state(),
            _ => return false,
        };
        state == PrimaryState::Alone
    }
}

const fn member(node: usize) -> Member {
    match node {
        0 => Member::First,
        _ => Member::Second,
    }
}

impl World {
    /// Returns the node of the protected machine.
    pub(super) fn machine(&self) -> usize {
        self.protection.as_ref().map_or(0, |it| it.machine)
    }

    fn protection_plan(&self) -> Option<ProtectionPlan> {
        self.plan.protection.clone()
    }

    pub(super) fn start_protection(&mut self) {
        let Some(plan) = self.protection_plan() else {
            return;
        };
        for at in plan.suspicions {
            self.schedule(at, Self::suspect);
        }
        for node in 0..2 {
            self.schedule(plan.retry, move |world| world.ask_again(node));
        }
    }

    /// Returns true if a starting node holds all answers, because its backup may have taken the machine.
    pub(super) fn starts_held(&self, node: usize) -> bool {
        let protection = self.protection.as_ref();
        let record = protection.and_then(|protection| protection.records[node]);
        record.is_some_and(|record| !record.alone)
    }

    /// Starts a node's part from its stored state.
    pub(super) fn start_member(&mut self, node: usize) {
        self.forget_checkpoints(node);
        let Some(protection) = &mut self.protection else {
            return;
        };
        let (role, orders) = match protection.records[node] {
            Some(record) => {
                let (primary, orders) = Primary::restarted(record);
                (Role::Primary(primary), orders)
            }
            None => {
                let (backup, orders) = Backup::new(member(node), protection.known[node]);
                (Role::Backup(backup), orders)
            }
        };
        protection.roles[node] = Some(role);
        if protection.is_alone(node) {
            self.went_alone(node);
        }
        self.obey(node, orders);
    }

    /// Calls into a node's part, stores its knowledge, and carries out its orders.
    fn with_member(&mut self, node: usize, call: impl FnOnce(&mut Role) -> Vec<Order>) {
        let Some(protection) = &mut self.protection else {
            return;
        };
        let Some(role) = &mut protection.roles[node] else {
            return;
        };
        let orders = call(role);
        match role {
            Role::Primary(primary) => protection.records[node] = Some(primary.record()),
            Role::Backup(backup) => protection.known[node] = backup.known(),
        }
        self.obey(node, orders);
    }

    fn with_primary(&mut self, node: usize, call: impl FnOnce(&mut Primary) -> Vec<Order>) {
        self.with_member(node, |role| match role {
            Role::Primary(primary) => call(primary),
            Role::Backup(_) => Vec::new(),
        });
    }

    fn with_backup(&mut self, node: usize, call: impl FnOnce(&mut Backup) -> Vec<Order>) {
        self.with_member(node, |role| match role {
            Role::Backup(backup) => call(backup),
            Role::Primary(_) => Vec::new(),
        });
    }

    fn obey(&mut self, node: usize, orders: Vec<Order>) {
        for order in orders {
            self.note(|| format!("{}  order   {order:?}", name(node)));
            match order {
                Order::Ask(ask) => self.ask_witness(node, ask),
                Order::Hold => {
                    self.with(node, |c, now| c.hold(now));
                }
                Order::GoAlone => {
                    self.reached(Reached::WentAlone);
                    self.went_alone(node);
                    self.end_checkpoints(node);
                    self.with(node, |c, now| c.go_alone(now));
                }
                Order::Protected => self.reached(Reached::Paired),
                Order::End => {
                    self.reached(Reached::Ended);
                    self.end_machine(node);
                    self.drop_packets(node);
                    self.with(node, |c, now| c.hold(now));
                }
                Order::Sever => self.sever(node),
                Order::Take(_) => self.take_when_due(node),
            }
        }
    }

    /// Notes that a node goes on with what its disk has.
    fn went_alone(&mut self, node: usize) {
        let now = self.now;
        let Some(protection) = &mut self.protection else {
            return;
        };
        protection.machine = node;
        if std::mem::take(&mut protection.lost_power[node]) {
            self.history.power_lost(now);
        }
    }

    /// Ends the machine at this node: nobody hears the answers to its requests.
    fn end_machine(&mut self, node: usize) {
        let abandoned = self.leave(node, 1);
        self.guest.left.extend(abandoned);
        self.nodes[node].buffers.desert();
        if std::mem::take(&mut self.guest.present[node]) {
            let tags = self.nodes[node].buffers.hang_ups();
            self.with(node, |c, now| c.handle_client_left(now, tags));
        }
    }

    /// Handles an event of a disk that stays.
    pub(super) fn follower_event(&mut self, node: usize, event: &Event) {
        match event {
            Event::Followed { .. } => self.disk_followed(node),
            Event::Severed { .. } => self.disk_severed(node),
            Event::Follows { .. } => self.disk_follows(node),
            Event::CheckpointMarked { number, .. } => self.disk_marked(node, *number),
            _ => {}
        }
    }

    /// Checks that only the machine's own node answers its requests.
    pub(super) fn check_machine(
        &mut self,
        node: usize,
        holder: Holder,
        result: Result<(), RequestError>,
    ) {
        let of_guest = matches!(holder, Holder::Client(_) | Holder::Gone { .. });
        // With checkpoints, nobody hears of an answer before its checkpoint is at the backup.
        let heard = self.protection.is_some() && !self.is_checkpointed();
        if heard && of_guest && result.is_ok() && self.machine() != node {
            self.fail(
                "a machine that was taken gets no answer at its old node",
                || name(node).to_string(),
            );
        }
    }
}
