//! What a guest asks of its disk while it does not move.

/// How many requests a guest makes, and what decides that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestLoad {
    /// Requests per second; 0 where too few were seen to tell.
    pub per_second: u64,
    /// What decides how many there are.
    pub arrivals: Arrivals,
}

impl GuestLoad {
    /// The load of a guest of which too little was seen. It is owed no throughput.
    pub const NOT_SEEN: Self = Self {
        per_second: 0,
        arrivals: Arrivals::Unknown,
    };

    /// A closed loop is owed one of so many parts of what it did, so one of its requests may take so
    /// many times as long. Where all share one machine and it is owed four times as much, the move takes
    /// 1.4 times as long, and it loses more in all.
    pub const CLOSED_LOOP_PARTS: u32 = 16;
}

/// What decides when a guest makes its next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// The guest itself: it makes as many however long it waits for the answers.
    OpenLoop,
    /// The answers: it asks for more as soon as it has one, and so takes all that it can get.
    ClosedLoop,
    /// Nobody knows.
    Unknown,
}
