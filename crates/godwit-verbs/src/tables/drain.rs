//! Wait-before-stop (the RDMA live-migration paper, section 3.4) of one queue pair: waiting until nothing is in flight.

use std::time::Duration;

/// The state of a queue pair that takes no new requests.
///
/// The shim posts a marker of its own behind the application's last request. The marker's completion shows that all
/// earlier requests are done, signalled or not. All requests of the peer have arrived once as many receives have
/// completed as the peer counted two-sided requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// True if the queue pair is connected. An unconnected queue pair has nothing in flight.
    pub connected: bool,
    /// True if the marker has completed.
    pub marker_done: bool,
    /// True if a request failed: the queue pair is in the error state and never becomes empty.
    pub failed: bool,
    /// Receives completed since the queue pair was made (n_recv), modulo 2^32.
    pub received: u32,
    /// Two-sided requests that the peer has posted (n_sent), modulo 2^32; unknown until the peer tells.
    pub peer_sent: Option<u32>,
    /// Time waited so far.
    pub waited: Duration,
    /// Longest wait.
    pub bound: Duration,
}

/// The decision about a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Requests may be in flight: wait.
    Wait,
    /// Nothing is in flight.
    Empty,
    /// The time is up, and requests may be in flight.
    TimedOut,
    /// The connection is broken already.
    Failed,
}

impl Drain {
    /// Decides.
    pub fn verdict(&self) -> Verdict {
        let all_received = self.peer_sent == Some(self.received);
        if !self.connected {
            Verdict::Empty
        } else if self.failed {
            Verdict::Failed
        } else if self.marker_done && all_received {
            Verdict::Empty
        } else if self.waited >= self.bound {
            Verdict::TimedOut
        } else {
            Verdict::Wait
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QUIET: Drain = Drain {
        connected: true,
        marker_done: true,
        failed: false,
        received: 7,
        peer_sent: Some(7),
        waited: Duration::ZERO,
        bound: Duration::from_secs(1),
    };

    #[test]
    fn each_condition_is_waited_for() {
        assert_eq!(QUIET.verdict(), Verdict::Empty);
        assert_eq!(
            Drain {
                marker_done: false,
                ..QUIET
            }
            .verdict(),
            Verdict::Wait
        );
        assert_eq!(
            Drain {
                received: 6,
                ..QUIET
            }
            .verdict(),
            Verdict::Wait
        );
        assert_eq!(
            Drain {
                peer_sent: None,
                ..QUIET
            }
            .verdict(),
            Verdict::Wait
        );
    }

    #[test]
    fn waiting_has_an_end_but_what_is_empty_is_never_late() {
        let late = Drain {
            waited: Duration::from_secs(1),
            ..QUIET
        };
        assert_eq!(late.verdict(), Verdict::Empty);
        assert_eq!(
            Drain {
                marker_done: false,
                ..late
            }
            .verdict(),
            Verdict::TimedOut
        );
    }

    proptest! {
        #[test]
        fn nothing_in_flight_is_never_claimed_while_something_may_be(
            connected: bool, marker_done: bool, failed: bool, received: u32,
            peer_sent in prop::option::of(any::<u32>()), waited in 0u64..3000,
        ) {
            let drain = Drain {
                connected, marker_done, failed, received, peer_sent,
                waited: Duration::from_millis(waited), bound: Duration::from_secs(1),
            };
            let quiet = !connected || (marker_done && !failed && peer_sent == Some(received));
            prop_assert_eq!(drain.verdict() == Verdict::Empty, quiet);
        }
    }
}
