//! What can be asked.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::client::take_over;
use crate::preflight::Need;
use crate::shim::{
    self, Attached, Connection, HandedOver, HeldPair, Obstacle, Plan, PreparedPair, QueuePairState,
    Recreated, Redirect,
};
use crate::tables::RemoteKey;

/// Nobody keeps an application's requests back for longer, whatever a request says.
const LONGEST_DRAIN: Duration = Duration::from_secs(60);

/// A request to a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "do", deny_unknown_fields)]
pub enum Request {
    /// What it has, and what keeps it from moving.
    Status,
    /// Keep back new requests.
    Suspend {
        /// Of these queue pairs (numbers the application knows); of all and everything if absent.
        only: Option<Vec<u32>>,
    },
    /// Wait until nothing is in flight.
    Drain {
        /// Two-sided requests that the peer posted, by the queue pair's number.
        peer_sent: Vec<(u32, u32)>,
        /// At most this long, and never longer than a minute.
        bound_ms: u64,
    },
    /// Give the device's objects back.
    Release,
    /// Track memory that the device writes, until the process goes on after its move: before the first image of its memory.
    TrackWritten,
    /// Once they are given back: mark all memory that the device could write as changed. Whoever makes an image of what has
    /// changed since an earlier one sees what threads write, and not what devices do.
    MarkWritten,
    /// Make them again.
    Recreate {
        /// The device's name here, if it is another one.
        device: Option<String>,
    },
    /// Connect queue pairs to where their peers are.
    Connect {
        /// Which, and where to.
        connections: Vec<Connection>,
    },
    /// Let the application work.
    Resume {
        /// These queue pairs; all and everything if absent.
        only: Option<Vec<u32>>,
    },
    /// What can be made ahead of this process at its destination.
    Plan,
    /// To a holder (`godwit-verbs hold`): make that.
    Hold {
        /// Of the process that will come.
        plan: Plan,
    },
    /// To a holder: connect queue pairs to those that partners have prepared.
    ConnectHeld {
        /// Which, and where to.
        connections: Vec<Connection>,
    },
    /// To a holder, from a process: give up everything, and end.
    HandOver,
    /// Take what a holder on this host has, in place of [`Request::Recreate`] and [`Request::Connect`].
    Attach {
        /// The holder.
        holder: u32,
    },
    /// To a partner: make queue pairs that will take the place of those that are named, and connect them.
    Prepare {
        /// Which, and where to. Keys are left to [`Request::Switch`].
        connections: Vec<Connection>,
    },
    /// To a partner whose queue pairs are suspended and empty: put the prepared ones in their place.
    Switch {
        /// Which.
        numbers: Vec<u32>,
        /// The peer's remote keys: what applications know, and what its device knows.
        remote_keys: Vec<RemoteKey>,
    },
    /// To a partner: destroy what was prepared and not switched to.
    Abandon {
        /// For these queue pairs; for all if absent.
        only: Option<Vec<u32>>,
    },
    /// To whoever sends datagrams to a process that has moved: where its queue pairs are now.
    Redirect {
        /// Each of them.
        redirects: Vec<Redirect>,
    },
    /// Where its queue pairs for datagrams are, for whoever knows them where they were.
    Redirects,
    /// To a partner that goes on: destroy the queue pairs that it had before.
    Tidy,
}

/// What a process has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Its queue pairs.
    pub queue_pairs: Vec<QueuePairState>,
    /// Why it cannot move; empty if it can.
    pub obstacles: Vec<Obstacle>,
    /// What it uses of each device, which its destination has to have.
    #[serde(default)]
    pub needs: Vec<Need>,
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It was not done, and why.
    Error(String),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Suspend`].
    Suspended(Vec<QueuePairState>),
    /// To [`Request::Drain`].
    Drained {
        /// How long it took.
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
    /// To the others.
    Done,
}

fn bounded(bound_ms: u64) -> Duration {
    Duration::from_millis(bound_ms).min(LONGEST_DRAIN)
}

impl Request {
    /// How long the answer may take.
    pub(super) fn patience(&self) -> Duration {
        match self {
            Request::Status
            | Request::TrackWritten
            | Request::Suspend { .. }
            | Request::Plan
            | Request::Redirects
            | Request::Redirect { .. } => Duration::from_secs(20),
            // The process that asks stands still.
            Request::HandOver => Duration::from_secs(10),
            Request::Drain { bound_ms, .. } => bounded(*bound_ms) + Duration::from_secs(20),
            // Each object is a call of the device, and there may be thousands.
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

    /// Does it in this process.
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
