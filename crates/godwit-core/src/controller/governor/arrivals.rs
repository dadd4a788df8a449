//! The guest's load on a disk that does not move.

/// The rate of a guest's requests and the cause of this rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestLoad {
    /// Requests per second; 0 if too few were seen.
    pub per_second: u64,
    /// Cause of the rate.
    pub arrivals: Arrivals,
}

impl GuestLoad {
    /// The load of a guest of which too little was seen. Such a guest is owed no throughput.
    pub const NOT_SEEN: Self = Self {
        per_second: 0,
        arrivals: Arrivals::Unknown,
    };

    /// A closed loop is owed its former rate divided by this number, so each request may take this many times as long.
    /// On a shared machine, four times the owed rate prolongs the move by a factor of 1.4, and the guest loses more in
    /// all.
    pub const CLOSED_LOOP_PARTS: u32 = 16;
}

/// Cause of a guest's next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// The guest itself: the rate does not depend on the wait for answers.
    OpenLoop,
    /// The answers: the guest sends a request for each answer, and so takes as much as the disk gives.
    ClosedLoop,
    /// Unknown.
    Unknown,
}
