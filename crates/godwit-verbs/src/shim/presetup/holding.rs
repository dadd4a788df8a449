//! The holder: a process at the destination that makes the device's objects for a moving process before the process
//! arrives.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::commands::{Answer, keep};
use super::plan::{Details, Plan, Planned, PlannedPair};
use crate::abi::*;
use crate::control::MOST_FILES;
use crate::shim::Connection;
use crate::shim::moving::{open_by_name, walk};
use crate::shim::real::real;
use crate::shim::verbs::completions::SPARE_ENTRIES;
use crate::tables::{Call, Gid, ObjectId, make_allowed};

/// At least the size of any provider's structure for an object. libibverbs gets such a place for an object that only
/// the kernel has, and reads zeros behind its own part.
const PLACE: usize = 4096;

/// A queue pair of the holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPair {
    /// The application's number.
    pub number: u32,
    /// The device's number here.
    pub physical: u32,
    /// The address of the port to use; none if the application has not connected the queue pair.
    pub local: Option<Gid>,
}

/// Everything that a restored process needs to take over the holder's objects.
#[derive(Debug, Serialize, Deserialize)]
pub struct HandedOver {
    /// The name of the plan.
    pub plan: u64,
    /// The kernel's answers, by object.
    pub(crate) answers: Vec<(ObjectId, Vec<Answer>)>,
    /// Two files for each context of the plan, then the files of the channels, all carried by the message.
    #[serde(skip)]
    pub descriptors: Vec<OwnedFd>,
}

/// An object of the holder.
#[derive(Clone, Copy)]
enum Held {
    Context(*mut ibv_context),
    Domain(*mut ibv_pd),
    Channel(*mut ibv_comp_channel),
    Queue(*mut ibv_cq),
    Shared(*mut ibv_srq),
    Pair(*mut ibv_qp),
}

struct Holding {
    plan: Plan,
    objects: BTreeMap<ObjectId, Held>,
    answers: Vec<(ObjectId, Vec<Answer>)>,
    /// Connected queue pairs, by the application's number.
    connected: Vec<u32>,
}

// SAFETY: the pointers are to objects that nobody else knows and that live to the process's end.
unsafe impl Send for Holding {}

static HOLDING: Mutex<Option<Holding>> = Mutex::new(None);
static IS_HOLDER: AtomicBool = AtomicBool::new(false);

fn holding() -> MutexGuard<'static, Option<Holding>> {
    HOLDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes this process a holder, which answers requests until its objects are handed over.
pub fn serve_as_holder() {
    IS_HOLDER.store(true, Ordering::Release);
    crate::control::start();
}

/// Returns true if this process is a holder.
pub fn is_holder() -> bool {
    IS_HOLDER.load(Ordering::Acquire)
}

/// Makes the objects of `plan`.
///
/// # Errors
/// One sentence that names the call that the device refused. Objects made so far go with the process.
pub fn hold(plan: Plan) -> Result<Vec<HeldPair>, String> {
    if !is_holder() {
        return Err("this process is an application and holds nothing for others".to_owned());
    }
    let mut holding = holding();
    if holding.is_some() {
        return Err("this holder has its objects already".to_owned());
    }
    if descriptors_of(&plan) > MOST_FILES {
        return Err(
            "the process has too many devices and completion channels to hand over".to_owned(),
        );
    }
    let mut made = Holding {
        plan,
        objects: BTreeMap::new(),
        answers: Vec::new(),
        connected: Vec::new(),
    };
    let known: Vec<u32> = made.pairs().map(|(_, pair)| pair.number).collect();
    let mut pairs = Vec::new();
    for planned in made.plan.objects.clone() {
        // SAFETY: the objects that are named were made here.
        unsafe {
            let object = made.make(&planned, &known)?;
            if let (Held::Pair(pair), Details::Pair(details)) = (object, &planned.details) {
                pairs.push(HeldPair {
                    number: details.number,
                    physical: (*pair).qp_num,
                    local: local_address(pair, details),
                });
                if !details.is_connection() {
                    walk(pair, &details.steps, None, || Ok(()))?;
                    made.connected.push(details.number);
                }
            }
            made.objects.insert(planned.id, object);
        }
    }
    *holding = Some(made);
    Ok(pairs)
}

/// Returns the number of descriptors: two for each device and one for each channel.
fn descriptors_of(plan: &Plan) -> usize {
    let each = plan.objects.iter().map(|planned| match planned.call {
        Call::Context => 2,
        Call::CompletionChannel { .. } => 1,
        _ => 0,
    });
    each.sum()
}

/// Returns the address of the application's port on this host.
unsafe fn local_address(pair: *mut ibv_qp, details: &PlannedPair) -> Option<Gid> {
    let (_, route) = details
        .steps
        .iter()
        .rev()
        .find(|(mask, _)| mask & IBV_QP_AV != 0)?;
    let mut gid = ibv_gid::default();
    let (port, place) = (route.ah_attr.port_num, route.ah_attr.grh.sgid_index);
    let asked = (real().query_gid)((*pair).context, port, c_int::from(place), &raw mut gid);
    (asked == 0).then_some(Gid(gid.raw))
}

/// Connects held queue pairs to the queue pairs that partners have prepared.
///
/// # Errors
/// One sentence that names the queue pair and the call that the device refused.
pub fn connect_held(connections: &[Connection]) -> Result<(), String> {
    let mut holding = holding();
    let holding = holding.as_mut().ok_or("this holder holds nothing")?;
    for connection in connections {
        let number = connection.number;
        let found = holding.pairs().find(|(_, pair)| pair.number == number);
        let (pair, steps) = match found {
            Some((Held::Pair(pair), details)) => (pair, details.steps.clone()),
            _ => return Err(format!("there is no queue pair {number}")),
        };
        // SAFETY: the pair was made here and has no other owner.
        unsafe { walk(pair, &steps, Some(connection), || Ok(())) }
            .map_err(|error| format!("queue pair {number}: {error}"))?;
        holding.connected.push(number);
    }
    Ok(())
}

/// Hands over everything. Afterwards this process has no use for its files and ends.
///
/// # Errors
/// One sentence if a queue pair is not connected.
pub fn hand_over() -> Result<HandedOver, String> {
    let mut holding = holding();
    let held = holding.as_ref().ok_or("this holder holds nothing")?;
    if let Some((_, pair)) = held
        .pairs()
        .find(|(_, pair)| !held.connected.contains(&pair.number))
    {
        return Err(format!("queue pair {} is not connected", pair.number));
    }
    let held = holding.take().ok_or("this holder holds nothing")?;
    let mut numbers = Vec::new();
    // SAFETY: the contexts and channels were made here and live to the process's end.
    unsafe {
        for object in held.objects.values() {
            if let Held::Context(context) = object {
                numbers.extend([(**context).cmd_fd, (**context).async_fd]);
            }
        }
        for object in held.objects.values() {
            if let Held::Channel(channel) = object {
                numbers.push((**channel).fd);
            }
        }
    }
    Ok(HandedOver {
        plan: held.plan.name,
        answers: held.answers,
        // SAFETY: the objects that owned these files are never used or closed again; this process ends.
        descriptors: numbers
            .into_iter()
            .map(|number| unsafe { OwnedFd::from_raw_fd(number) })
            .collect(),
    })
}

impl Holding {
    fn pairs(&self) -> impl Iterator<Item = (Held, &PlannedPair)> {
        self.plan.objects.iter().filter_map(|planned| {
            let Details::Pair(pair) = &planned.details else {
                return None;
            };
            let held = self.objects.get(&planned.id).copied();
            Some((held.unwrap_or(Held::Pair(ptr::null_mut())), pair))
        })
    }

    /// Makes one object from earlier ones and keeps the kernel's answers.
    unsafe fn make(&mut self, planned: &Planned, known: &[u32]) -> Result<Held, String> {
        let cookie = planned.cookie;
        let (made, answers) = match (&planned.call, &planned.details) {
            (Call::Context, Details::Device(name)) => {
                return open_by_name(name).map(Held::Context);
            }
            (Call::ProtectionDomain { context }, _) => {
                let context = self.context(*context)?;
                let (domain, answers) = keep(cookie, || (real().alloc_pd)(context))?;
                ((!domain.is_null()).then_some(Held::Domain(domain)), answers)
            }
            (Call::CompletionChannel { context }, _) => {
                let context = self.context(*context)?;
                let (channel, answers) = keep(cookie, || (real().create_comp_channel)(context))?;
                (
                    (!channel.is_null()).then_some(Held::Channel(channel)),
                    answers,
                )
            }
            (
                Call::CompletionQueue {
                    context,
                    channel,
                    vector,
                    ..
                },
                Details::Entries(entries),
            ) => {
                let context = self.context(*context)?;
                let channel =
                    channel.map_or(Ok(ptr::null_mut()), |channel| self.channel(channel))?;
                let create = (real()).create_cq;
                let answers = with_room_for_markers(*entries, |entries| {
                    let make = || create(context, entries, ptr::null_mut(), channel, *vector);
                    keep(cookie, make).map(|(_, answers)| answers)
                })?;
                let made = answers.first().and_then(Answer::handle).map(|handle| {
                    let queue = place::<ibv_cq>();
                    ((*queue).context, (*queue).handle) = (context, handle);
                    Held::Queue(queue)
                });
                (made, answers)
            }
            (Call::SharedReceiveQueue { pd }, Details::Shared(attr)) => {
                let domain = self.domain(*pd)?;
                let mut wanted = ibv_srq_init_attr {
                    srq_context: ptr::null_mut(),
                    attr: *attr,
                };
                let (_, answers) = keep(cookie, || (real().create_srq)(domain, &raw mut wanted))?;
                let made = answers.first().and_then(Answer::handle).map(|handle| {
                    let queue = place::<ibv_srq>();
                    ((*queue).context, (*queue).handle) = ((*domain).context, handle);
                    Held::Shared(queue)
                });
                (made, answers)
            }
            (Call::QueuePair { .. }, Details::Pair(pair)) => {
                return self.make_pair(planned, pair, known);
            }
            _ => {
                return Err(format!(
                    "the plan says two things of object {}",
                    planned.id.0
                ));
            }
        };
        let made = made.ok_or_else(|| refused(&planned.call))?;
        self.answers.push((planned.id, answers));
        Ok(made)
    }

    /// As [`Holding::make`]; the number is not the number of another queue pair that partners know.
    unsafe fn make_pair(
        &mut self,
        planned: &Planned,
        pair: &PlannedPair,
        known: &[u32],
    ) -> Result<Held, String> {
        let Call::QueuePair {
            pd,
            send_cq,
            recv_cq,
            srq,
            transport,
        } = planned.call
        else {
            return Err(refused(&planned.call));
        };
        let domain = self.domain(pd)?;
        let mut wanted: ibv_qp_init_attr = std::mem::zeroed();
        (wanted.send_cq, wanted.recv_cq) = (self.queue(send_cq)?, self.queue(recv_cq)?);
        wanted.srq = srq.map_or(Ok(ptr::null_mut()), |srq| self.shared(srq))?;
        (wanted.cap, wanted.qp_type, wanted.sq_sig_all) = (pair.cap, transport, pair.signals_all);
        // For a marker, as everywhere.
        wanted.cap.max_send_wr = wanted.cap.max_send_wr.saturating_add(1);
        let mut failed = None;
        let made = make_allowed(
            known.len(),
            || {
                let mut attributes = wanted;
                let kept = keep(planned.cookie, || {
                    (real().create_qp)(domain, &raw mut attributes)
                });
                let (_, answers) = kept.map_err(|error| failed = Some(error)).ok()?;
                let answer = answers.first()?;
                let (handle, number) = (answer.handle()?, answer.queue_pair_number()?);
                let made = place::<ibv_qp>();
                ((*made).context, (*made).pd) = ((*domain).context, domain);
                ((*made).handle, (*made).qp_num, (*made).qp_type) = (handle, number, transport);
                Some((made, answers))
            },
            |(made, _)| {
                let number = (**made).qp_num;
                number == pair.number || !known.contains(&number)
            },
            |(made, _)| {
                (real().destroy_qp)(made);
            },
        );
        match (made, failed) {
            (Some((made, answers)), _) => {
                self.answers.push((planned.id, answers));
                Ok(Held::Pair(made))
            }
            (None, Some(error)) => Err(error),
            (None, None) => Err(refused(&planned.call)),
        }
    }

    fn context(&self, id: ObjectId) -> Result<*mut ibv_context, String> {
        match self.objects.get(&id) {
            Some(Held::Context(context)) => Ok(*context),
            _ => Err(missing(id)),
        }
    }

    fn domain(&self, id: ObjectId) -> Result<*mut ibv_pd, String> {
        match self.objects.get(&id) {
            Some(Held::Domain(domain)) => Ok(*domain),
            _ => Err(missing(id)),
        }
    }

    fn channel(&self, id: ObjectId) -> Result<*mut ibv_comp_channel, String> {
        match self.objects.get(&id) {
            Some(Held::Channel(channel)) => Ok(*channel),
            _ => Err(missing(id)),
        }
    }

    fn queue(&self, id: ObjectId) -> Result<*mut ibv_cq, String> {
        match self.objects.get(&id) {
            Some(Held::Queue(queue)) => Ok(*queue),
            _ => Err(missing(id)),
        }
    }

    fn shared(&self, id: ObjectId) -> Result<*mut ibv_srq, String> {
        match self.objects.get(&id) {
            Some(Held::Shared(queue)) => Ok(*queue),
            _ => Err(missing(id)),
        }
    }
}

/// Makes a completion queue, with room for markers if the device allows, like
/// [`make_cq`](crate::shim::verbs::completions::make_cq). Only the answers show the success of `make`.
fn with_room_for_markers(
    entries: c_int,
    mut make: impl FnMut(c_int) -> Result<Vec<Answer>, String>,
) -> Result<Vec<Answer>, String> {
    let answers = make(entries.saturating_add(SPARE_ENTRIES))?;
    if answers.is_empty() {
        make(entries)
    } else {
        Ok(answers)
    }
}

fn missing(id: ObjectId) -> String {
    format!(
        "the plan uses object {} before it is made, or as something else",
        id.0
    )
}

fn refused(call: &Call) -> String {
    let what = match call {
        Call::ProtectionDomain { .. } => "protection domain",
        Call::CompletionChannel { .. } => "completion channel",
        Call::CompletionQueue { .. } => "completion queue",
        Call::SharedReceiveQueue { .. } => "shared receive queue",
        _ => "queue pair",
    };
    format!("the device here made no {what} ahead of the process that it is for")
}

/// Returns a zeroed place for an object of libibverbs, which libibverbs frees like its own.
unsafe fn place<T>() -> *mut T {
    let place = libc::calloc(1, PLACE).cast::<T>();
    if place.is_null() {
        std::process::abort();
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_queue_is_made_once() {
        let answer = json_answer();
        for (most, expected) in [(1000, vec![80]), (20, vec![80, 16])] {
            let mut asked = Vec::new();
            let answers = with_room_for_markers(16, |entries| {
                asked.push(entries);
                Ok((entries <= most)
                    .then(|| answer.clone())
                    .into_iter()
                    .collect())
            });
            assert_eq!(answers, Ok(vec![answer.clone()]));
            assert_eq!(asked, expected);
        }
        let mut asked = 0;
        let refused = with_room_for_markers(16, |_| {
            asked += 1;
            Ok(Vec::new())
        });
        assert_eq!((refused, asked), (Ok(Vec::new()), 2));
    }

    fn json_answer() -> Answer {
        serde_json::from_str(r#"{"object": 3, "method": 0, "attributes": []}"#).unwrap()
    }
}
