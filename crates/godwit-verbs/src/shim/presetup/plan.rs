//! A process's objects, as far as they can be made before the process arrives.

use std::hash::{BuildHasher, RandomState};
use std::sync::PoisonError;

use serde::{Deserialize, Serialize};

use crate::abi::*;
use crate::shim::objects::{ShadowQp, Transition};
use crate::shim::world::{Object, World, world};
use crate::tables::{Call, ObjectId};

/// The objects of a process, in an order in which they can be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Identifies the plan: a process never tells two plans of the same name.
    pub name: u64,
    /// Contexts, domains, channels, queues and queue pairs. Objects made from an equal list fit too.
    pub objects: Vec<Planned>,
}

/// A planned object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// The object's name.
    pub id: ObjectId,
    /// The call that made the object.
    pub call: Call,
    /// The value that events carry: the shadow's address in the process.
    pub cookie: u64,
    /// Further data.
    pub details: Details,
}

/// Data of an object beyond the call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Details {
    /// No data.
    None,
    /// For a context: the device's name.
    Device(String),
    /// For a completion queue: the entries granted to the application.
    Entries(i32),
    /// For a shared receive queue: the capacities granted to the application.
    Shared(ibv_srq_attr),
    /// For a queue pair.
    Pair(PlannedPair),
}

/// A planned queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedPair {
    /// The application's number.
    pub number: u32,
    /// The capacities granted to the application.
    pub cap: ibv_qp_cap,
    /// Nonzero if every request produces a completion.
    pub signals_all: i32,
    /// The changes of state.
    pub steps: Vec<(i32, ibv_qp_attr)>,
}

impl PlannedPair {
    /// Returns true if the queue pair is connected to a peer, as all are except those for datagrams.
    pub(super) fn is_connection(&self) -> bool {
        self.steps
            .iter()
            .any(|(mask, _)| mask & IBV_QP_DEST_QPN != 0)
    }
}

/// Returns this process's plan and remembers it, so that the maker of the objects needs to send only the plan's name.
pub fn plan() -> Plan {
    let mut world = world();
    let plan = Plan {
        // The hash keys are random in each process and differ between states.
        name: RandomState::new().hash_one(std::process::id()),
        objects: planned(&world),
    };
    world.told = Some(plan.clone());
    plan
}

/// Returns the objects of the plan of this name, if the process has told the plan and has changed nothing since.
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

/// Returns none for objects that are made at the process only: memory regions, their windows, and objects that are made
/// quickly.
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
