//! The requests and answers of the control socket.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::client::take_over;
use crate::preflight::Need;
use crate::shim::{
    self, Attached, Connection, HandedOver, HeldPair, Obstacle, Plan, PreparedPair, QueuePairState,
    Recreated, Redirect,
};
use crate::tables::RemoteKey;

/// Longest time for which an application's requests are kept back, regardless of the request.
const LONGEST_DRAIN: Duration = Duration::from_secs(60);

/// A request to a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "do", deny_unknown_fields)]
pub enum Request {
    /// Asks for the state of the process and the obstacles to a move.
    Status,
    /// Keeps back new requests.
    Suspend {
        /// The queue pairs to suspend, by the numbers that the application knows; the whole process if absent.
        only: Option<Vec<u32>>,
    },
    /// Waits until nothing is in flight.
    Drain {
        /// Two-sided requests posted by the peer, by the queue pair's number.
        peer_sent: Vec<(u32, u32)>,
        /// Longest wait; one minute at most.
        bound_ms: u64,
    },
    /// Gives back the device's objects.
    Release,
    /// Tracks memory that the device writes, until the process resumes after the move. Sent before the first image of
    /// memory.
    TrackWritten,
    /// Sent after a release: marks all memory that the device could write as changed. An incremental image detects
    /// writes of threads but not of devices.
    MarkWritten,
    /// Makes the device's objects again.
    Recreate {
        /// The device's name here, if different.
        device: Option<String>,
    },
    /// Connects queue pairs to the present addresses of their peers.
    Connect {
        /// The queue pairs and the addresses.
        connections: Vec<Connection>,
    },
    /// Lets the application continue.
    Resume {
        /// The queue pairs to resume; the whole process if absent.
        only: Option<Vec<u32>>,
    },
    /// Asks for the objects that can be made ahead of this process at the destination.
    Plan,
    /// To a holder (`godwit-verbs hold`): makes the objects of a plan.
    Hold {
        /// The plan of the process to come.
        plan: Plan,
    },
    /// To a holder: connects queue pairs to the prepared queue pairs of partners.
    ConnectHeld {
        /// The queue pairs and the addresses.
        connections: Vec<Connection>,
    },
    /// From a process to a holder: hands over everything and ends.
    HandOver,
    /// Takes over the objects of a holder on this host, in place of [`Request::Recreate`] and [`Request::Connect`].
    Attach {
        /// The holder.
        holder: u32,
    },
    /// To a partner: makes and connects replacements for the named queue pairs.
    Prepare {
        /// The queue pairs and the addresses. [`Request::Switch`] sets the keys.
        connections: Vec<Connection>,
    },
    /// To a partner with suspended and empty queue pairs: puts the prepared queue pairs in their place.
    Switch {
        /// The queue pairs.
        numbers: Vec<u32>,
        /// The peer's remote keys: the application's and the device's.
        remote_keys: Vec<RemoteKey>,
    },
    /// To a partner: destroys prepared queue pairs that were not switched to.
    Abandon {
        /// The replaced queue pairs; all if absent.
        only: Option<Vec<u32>>,
    },
    /// To a sender of datagrams to a moved process: tells the present addresses of the process's queue pairs.
    Redirect {
        /// An entry for each queue pair.
        redirects: Vec<Redirect>,
    },
    /// Asks for the present addresses of queue pairs for datagrams, for senders that know the former addresses.
    Redirects,
    /// To a partner that has resumed: destroys the former queue pairs.
    Tidy,
}

/// The state of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The queue pairs.
    pub queue_pairs: Vec<QueuePairState>,
    /// The obstacles to a move; empty if there are none.
    pub obstacles: Vec<Obstacle>,
    /// The process's needs of each device, to be met by the destination.
    #[serde(default)]
    pub needs: Vec<Need>,
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The request failed, with the reason.
    Error(String),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Suspend`].
    Suspended(Vec<QueuePairState>),
    /// To [`Request::Drain`].
    Drained {
        /// The time taken.
        microseconds: u64,
    },
    /// To [`Request::Recreate`].
    Recreated(Recreated),
    /// To [`Request::Plan`].
    Plan(Plan),
    /// To [`Request::Hold`].
    Held(Vec<HeldPair>),
    /// To [`Request::HandOver`].
    HandedOver(HandedOver),
    /// To [`Request::Attach`].
    Attached(Attached),
    /// To [`Request::Redirects`].
    Redirects(Vec<Redirect>),
    /// To [`Request::Prepare`].
    Prepared(Vec<PreparedPair>),
    /// To all other requests.
    Done,
}

fn bounded(bound_ms: u64) -> Duration {
    Duration::from_millis(bound_ms).min(LONGEST_DRAIN)
}

impl Request {
    /// Returns the time limit of the answer.
    pub(super) fn patience(&self) -> Duration {
        match self {
            Request::Status
            | Request::TrackWritten
            | Request::Suspend { .. }
            | Request::Plan
            | Request::Redirects
            | Request::Redirect { .. } => Duration::from_secs(20),
            // The asking process stands still meanwhile.
            Request::HandOver => Duration::from_secs(10),
            Request::Drain { bound_ms, .. } => bounded(*bound_ms) + Duration::from_secs(20),
            // Each object takes a call of the device, and there may be thousands of objects.
            Request::Release
            | Request::MarkWritten
            | Request::Recreate { .. }
            | Request::Connect { .. }
            | Request::Resume { .. }
            | Request::Hold { .. }
            | Request::ConnectHeld { .. }
            | Request::Attach { .. }
            | Request::Prepare { .. }
            | Request::Switch { .. }
            | Request::Abandon { .. }
            | Request::Tidy => Duration::from_secs(120),
        }
    }

    /// Carries out the request in this process.
    pub(super) fn carry_out(self) -> Answer {
        let done = match self {
            Request::Status => Ok(Answer::Status(Status {
                queue_pairs: shim::queue_pairs(),
                obstacles: shim::obstacles(),
                needs: shim::needs(),
            })),
            Request::Suspend { only } => shim::suspend(only.as_deref()).map(Answer::Suspended),
            Request::Drain {
                peer_sent,
                bound_ms,
            } => shim::drain(&peer_sent.into_iter().collect(), bounded(bound_ms)).map(|took| {
                Answer::Drained {
                    microseconds: took.as_micros() as u64,
                }
            }),
            Request::Release => shim::release().map(|()| Answer::Done),
            Request::TrackWritten => {
                shim::track_written();
                Ok(Answer::Done)
            }
            Request::MarkWritten => shim::mark_written().map(|()| Answer::Done),
            Request::Recreate { device } => {
                shim::recreate(device.as_deref()).map(Answer::Recreated)
            }
            Request::Connect { connections } => shim::connect(&connections).map(|()| Answer::Done),
            Request::Resume { only } => shim::resume(only.as_deref()).map(|()| Answer::Done),
            Request::Plan => Ok(Answer::Plan(shim::plan())),
            Request::Hold { plan } => shim::hold(plan).map(Answer::Held),
            Request::ConnectHeld { connections } => {
                shim::connect_held(&connections).map(|()| Answer::Done)
            }
            Request::HandOver => shim::hand_over().map(Answer::HandedOver),
            Request::Attach { holder } => take_over(holder)
                .map_err(|error| format!("nothing was taken over from process {holder}: {error}"))
                .and_then(shim::attach)
                .map(Answer::Attached),
            Request::Prepare { connections } => shim::prepare(&connections).map(Answer::Prepared),
            Request::Switch {
                numbers,
                remote_keys,
            } => shim::switch(&numbers, &remote_keys).map(|()| Answer::Done),
            Request::Abandon { only } => {
                shim::abandon(only.as_deref());
                Ok(Answer::Done)
            }
            Request::Redirect { redirects } => shim::redirect(&redirects).map(|()| Answer::Done),
            Request::Redirects => Ok(Answer::Redirects(shim::redirects())),
            Request::Tidy => shim::tidy().map(|()| Answer::Done),
        };
        done.unwrap_or_else(Answer::Error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_makes_an_application_wait_without_end() {
        assert_eq!(bounded(5), Duration::from_millis(5));
        assert_eq!(bounded(u64::MAX), Duration::from_secs(60));
    }

    #[test]
    fn keys_of_regions_and_of_windows_are_told_in_one_list() {
        let text =
            r#"{"do":"switch","numbers":[7],"remote_keys":[[1,2],{"window":3,"physical":4}]}"#;
        let Request::Switch { remote_keys, .. } = serde_json::from_str(text).unwrap() else {
            panic!("another request");
        };
        let window = RemoteKey::Window {
            window: 3,
            physical: 4,
        };
        assert_eq!(remote_keys, [RemoteKey::Region(1, 2), window]);
        for wrong in [r#"[[1]]"#, r#"[{"window":3}]"#, r#"[[1,4294967296]]"#] {
            let text = format!(r#"{{"do":"switch","numbers":[7],"remote_keys":{wrong}}}"#);
            assert!(serde_json::from_str::<Request>(&text).is_err(), "{wrong}");
        }
    }
}
