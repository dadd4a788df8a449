//! The control calls that make a process's objects again (the RDMA live-migration paper, section 3.2), without the
//! calls for objects that are gone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The name of an object for the life of its process. Later objects have greater numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId(pub u64);

/// A control call that made an object, and the call's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Call {
    /// `ibv_open_device`
    Context,
    /// `ibv_alloc_pd`
    ProtectionDomain {
        /// The context.
        context: ObjectId,
    },
    /// `ibv_reg_mr`
    MemoryRegion {
        /// The protection domain.
        pd: ObjectId,
        /// Begin of the memory in the process.
        address: u64,
        /// Bytes.
        length: u64,
        /// The address that requests use.
        iova: u64,
        /// `IBV_ACCESS_*`
        access: i32,
    },
    /// `ibv_alloc_mw`
    MemoryWindow {
        /// The protection domain.
        pd: ObjectId,
        /// `IBV_MW_TYPE_*`
        window_type: i32,
    },
    /// `ibv_create_comp_channel`
    CompletionChannel {
        /// The context.
        context: ObjectId,
    },
    /// `ibv_create_cq`
    CompletionQueue {
        /// The context.
        context: ObjectId,
        /// The channel for events.
        channel: Option<ObjectId>,
        /// Requested entries.
        entries: i32,
        /// Completion vector.
        vector: i32,
    },
    /// `ibv_create_srq`
    SharedReceiveQueue {
        /// The protection domain.
        pd: ObjectId,
    },
    /// `ibv_create_qp`
    QueuePair {
        /// The protection domain.
        pd: ObjectId,
        /// The completion queue for sends.
        send_cq: ObjectId,
        /// The completion queue for receives.
        recv_cq: ObjectId,
        /// The shared receive queue, if any.
        srq: Option<ObjectId>,
        /// `IBV_QPT_*`
        transport: i32,
    },
    /// `ibv_create_ah`
    AddressHandle {
        /// The protection domain.
        pd: ObjectId,
    },
    /// A call whose object cannot be made again. Such a process does not move.
    Stays {
        /// The parents.
        parents: [Option<ObjectId>; 5],
    },
}

impl Call {
    /// Returns the objects that must exist before.
    pub fn parents(&self) -> impl Iterator<Item = ObjectId> {
        let all = match *self {
            Call::Context => [None; 5],
            Call::ProtectionDomain { context } | Call::CompletionChannel { context } => {
                [Some(context), None, None, None, None]
            }
            Call::MemoryRegion { pd, .. }
            | Call::MemoryWindow { pd, .. }
            | Call::AddressHandle { pd }
            | Call::SharedReceiveQueue { pd } => [Some(pd), None, None, None, None],
            Call::CompletionQueue {
                context, channel, ..
            } => [Some(context), channel, None, None, None],
            Call::QueuePair {
                pd,
                send_cq,
                recv_cq,
                srq,
                ..
            } => [Some(pd), Some(send_cq), Some(recv_cq), srq, None],
            Call::Stays { parents } => parents,
        };
        all.into_iter().flatten()
    }
}

/// A call with a missing object, or the removal of an object in use.
#[derive(Debug, PartialEq, Eq)]
pub enum Broken {
    /// This object is missing.
    Missing(ObjectId),
    /// An object is in use.
    Used {
        /// The object to remove.
        object: ObjectId,
        /// The user of the object.
        by: ObjectId,
    },
}

/// The calls, in an order in which the objects can be made again.
#[derive(Debug, Default)]
pub struct Roadmap {
    calls: BTreeMap<ObjectId, Call>,
    last: u64,
}

impl Roadmap {
    /// Returns a roadmap without calls.
    pub const fn new() -> Self {
        Self {
            calls: BTreeMap::new(),
            last: 0,
        }
    }

    /// Records a call that succeeded and names its object.
    ///
    /// # Errors
    /// [`Broken::Missing`] if a parent is missing.
    pub fn add(&mut self, call: Call) -> Result<ObjectId, Broken> {
        if let Some(missing) = call
            .parents()
            .find(|parent| !self.calls.contains_key(parent))
        {
            return Err(Broken::Missing(missing));
        }
        self.last += 1;
        self.calls.insert(ObjectId(self.last), call);
        Ok(ObjectId(self.last))
    }

    /// Forgets an object that is gone.
    ///
    /// # Errors
    /// [`Broken`] if the object is missing or has users.
    pub fn remove(&mut self, object: ObjectId) -> Result<(), Broken> {
        if let Some(by) = self.user_of(object) {
            return Err(Broken::Used { object, by });
        }
        self.calls
            .remove(&object)
            .map(drop)
            .ok_or(Broken::Missing(object))
    }

    /// Forgets an object and everything made from the object. Returns all removed objects.
    pub fn remove_with_users(&mut self, object: ObjectId) -> Vec<ObjectId> {
        let mut gone = vec![object];
        // A user has a greater number than the objects it uses, so one pass in order finds all.
        for (user, call) in &self.calls {
            if call.parents().any(|parent| gone.contains(&parent)) {
                gone.push(*user);
            }
        }
        gone.retain(|object| self.calls.remove(object).is_some());
        gone
    }

    /// Returns an object that was made from this one.
    pub fn user_of(&self, object: ObjectId) -> Option<ObjectId> {
        let mut users = self
            .calls
            .iter()
            .filter(|(_, call)| call.parents().any(|parent| parent == object));
        users.next().map(|(user, _)| *user)
    }

    /// Returns all calls, in an order in which the objects can be made again.
    pub fn calls(&self) -> impl DoubleEndedIterator<Item = (ObjectId, &Call)> {
        self.calls.iter().map(|(object, call)| (*object, call))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_object_that_died_is_not_made_again() {
        let mut map = Roadmap::default();
        let context = map.add(Call::Context).unwrap();
        let pd = map.add(Call::ProtectionDomain { context }).unwrap();
        assert_eq!(
            map.remove(context),
            Err(Broken::Used {
                object: context,
                by: pd
            })
        );
        map.remove(pd).unwrap();
        assert_eq!(map.calls().count(), 1);
        assert_eq!(map.remove(pd), Err(Broken::Missing(pd)));
        assert_eq!(
            map.add(Call::AddressHandle { pd }),
            Err(Broken::Missing(pd))
        );
    }

    #[test]
    fn a_context_takes_with_it_what_was_left_in_it() {
        let mut map = Roadmap::default();
        let (closed, open) = (
            map.add(Call::Context).unwrap(),
            map.add(Call::Context).unwrap(),
        );
        let kept = map.add(Call::ProtectionDomain { context: open }).unwrap();
        let pd = map.add(Call::ProtectionDomain { context: closed }).unwrap();
        let handle = map.add(Call::AddressHandle { pd }).unwrap();
        assert_eq!(map.remove_with_users(closed), [closed, pd, handle]);
        assert_eq!(
            map.calls().map(|(object, _)| object).collect::<Vec<_>>(),
            [open, kept]
        );
    }

    proptest! {
        /// After any sequence of calls and removals, every call's parents come before the call.
        #[test]
        fn calls_can_be_made_in_their_order(steps in prop::collection::vec((0u8..9, 0usize..32, 0usize..32), 0..200)) {
            let mut map = Roadmap::default();
            for (what, first, second) in steps {
                let pick = |number: usize, wanted: fn(&Call) -> bool| {
                    let all: Vec<_> = map.calls().filter(|(_, call)| wanted(call)).map(|(object, _)| object).collect();
                    (!all.is_empty()).then(|| all[number % all.len()])
                };
                let context = pick(first, |call| matches!(call, Call::Context));
                let pd = pick(first, |call| matches!(call, Call::ProtectionDomain { .. }));
                let cq = pick(second, |call| matches!(call, Call::CompletionQueue { .. }));
                let any = pick(first + second, |_| true);
                match (what, context, pd, cq, any) {
                    (0, ..) => drop(map.add(Call::Context)),
                    (1, Some(context), ..) => drop(map.add(Call::ProtectionDomain { context })),
                    (2, Some(context), ..) => drop(map.add(Call::CompletionQueue { context, channel: None, entries: 1, vector: 0 })),
                    (3, _, Some(pd), Some(cq), _) => drop(map.add(Call::QueuePair { pd, send_cq: cq, recv_cq: cq, srq: pick(second, |call| matches!(call, Call::SharedReceiveQueue { .. })), transport: 2 })),
                    (4, _, Some(pd), ..) => drop(map.add(Call::MemoryRegion { pd, address: 0, length: 1, iova: 0, access: 0 })),
                    (5, _, Some(pd), ..) => drop(map.add(Call::SharedReceiveQueue { pd })),
                    (6, _, Some(pd), ..) => drop(map.add(Call::MemoryWindow { pd, window_type: 1 })),
                    (_, _, _, _, Some(object)) => drop(map.remove(object)),
                    _ => {}
                }
                let mut made = Vec::new();
                for (object, call) in map.calls() {
                    prop_assert!(call.parents().all(|parent| made.contains(&parent)));
                    made.push(object);
                }
            }
        }
    }
}
