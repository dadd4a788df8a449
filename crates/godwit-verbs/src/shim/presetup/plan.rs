//! What a process has, as far as it can be made before the process is there.

use std::hash::{BuildHasher, RandomState};
use std::sync::PoisonError;

use serde::{Deserialize, Serialize};

use crate::abi::*;
use crate::shim::objects::{ShadowQp, Transition};
use crate::shim::world::{Object, World, world};
use crate::tables::{Call, ObjectId};

/// The objects that a process has, in the order in which they can be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Which of all plans it is: the process has told one of this name only once.
    pub name: u64,
    /// Contexts, domains, channels, queues and queue pairs. What was made from equal ones will do for others.
    pub objects: Vec<Planned>,
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Its name.
    pub id: ObjectId,
    /// The call that made it.
    pub call: Call,
    /// What its events carry: where its shadow lies in the process.
    pub cookie: u64,
    /// What else has to be known.
    pub details: Details,
}

/// What has to be known of an object besides its call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Details {
    /// Nothing.
    None,
    /// Of a context: its device's name.
    Device(String),
    /// Of a completion queue: the entries that the application was told.
    Entries(i32),
    /// Of a shared receive queue: what the application was told it has.
    Shared(ibv_srq_attr),
    /// Of a queue pair.
    Pair(PlannedPair),
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedPair {
    /// The number that the application knows.
    pub number: u32,
    /// What the application was told it has.
    pub cap: ibv_qp_cap,
    /// Whether every request completes visibly.
    pub signals_all: i32,
    /// The changes of its state.
    pub steps: Vec<(i32, ibv_qp_attr)>,
}

impl PlannedPair {
    /// Whether there is a peer that it is connected to, as for all but datagrams.
    pub(super) fn is_connection(&self) -> bool {
        self.steps
            .iter()
            .any(|(mask, _)| mask & IBV_QP_DEST_QPN != 0)
    }
}

/// What this process has. It remembers the plan, so that whoever has made something from it needs to say no more than its
/// name.
pub fn plan() -> Plan {
    let mut world = world();
    let plan = Plan {
        // Keys that are random in each process and other ones for each state.
        name: RandomState::new().hash_one(std::process::id()),
        objects: planned(&world),
    };
    world.told = Some(plan.clone());
    plan
}

/// What the plan of this name asks for, if the process has told it and has changed nothing since.
pub(in crate::shim) fn as_told(world: &World, name: u64) -> Option<&[Planned]> {
    let told = world.told.as_ref().filter(|told| told.name == name)?;
    (told.objects == planned(world)).then_some(&told.objects)
}

fn planned(world: &World) -> Vec<Planned> {
    let objects = world.roadmap.calls().filter_map(|(id, call)| {
        // SAFETY: objects live while the world is locked.
        let (cookie, details) = unsafe { details(*world.objects.get(&id)?)? };
        Some(Planned {
            id,
            call: *call,
            cookie: cookie as u64,
            details,
        })
    });
    objects.collect()
}

/// Nothing for what is made only where the process is: memory regions, their windows, and what is made quickly.
unsafe fn details(object: Object) -> Option<(usize, Details)> {
    Some(match object {
        Object::Context(context) => (
            context.addr(),
            Details::Device((*context).device_name.clone()),
        ),
        Object::Pd(domain) => (domain.addr(), Details::None),
        Object::Channel(channel) => (channel.addr(), Details::None),
        Object::Cq(queue) => (queue.addr(), Details::Entries((*queue).face.cqe)),
        Object::Srq(queue) => (queue.addr(), Details::Shared((*queue).init.attr)),
        Object::Qp(pair) => (pair.addr(), Details::Pair(pair_of(&*pair))),
        Object::Mr(_) | Object::Mw(_) | Object::Ah(_) => return None,
    })
}

fn pair_of(pair: &ShadowQp) -> PlannedPair {
    let steps = pair
        .transitions
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let step = |step: &Transition| (step.mask, step.attributes);
    PlannedPair {
        number: pair.face.qp_num,
        cap: pair.init.cap,
        signals_all: pair.init.sq_sig_all,
        steps: steps.iter().map(step).collect(),
    }
}
