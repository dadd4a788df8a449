//! The share of each connection in the common tags and memory, limited so that no connection holds the part that others
//! need.

/// The unit of accounting: a connection, or all rings together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Account(u32);

impl Account {
    /// Account of the guest's rings.
    pub(in crate::engine) const RINGS: Self = Self(0);
}

/// The holdings of one account.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    requests: usize,
    bytes: usize,
    /// True while a request of the account is in a lane.
    lane: bool,
    /// True once the account's connection is gone.
    closed: bool,
}

/// The holdings of each account in its class's common tags and memory.
///
/// A connection with a stalled client keeps its holdings. A connection gets no more than it leaves to all others, so a
/// few connections cannot hold everything. If many stall, each connection still has a lane of its own.
#[derive(Debug)]
pub(in crate::engine) struct Shares {
    held: Vec<Held>,
    free: Vec<u32>,
}

impl Shares {
    pub(in crate::engine) fn new() -> Self {
        Self {
            held: vec![Held::default()],
            free: Vec::new(),
        }
    }

    /// Opens an account.
    pub(in crate::engine) fn open(&mut self) -> Account {
        match self.free.pop() {
            Some(index) => {
                self.held[index as usize] = Held::default();
                Account(index)
            }
            None => {
                self.held.push(Held::default());
                Account(self.held.len() as u32 - 1)
            }
        }
    }

    /// Closes the account of a connection that is gone. Its holdings stay counted until given back.
    pub(in crate::engine) fn close(&mut self, account: Account) {
        self.of(account).closed = true;
        self.forget_if_empty(account);
    }

    /// Returns true if the account holds nothing of the common part.
    pub(in crate::engine) fn is_empty(&self, account: Account) -> bool {
        self.held[account.0 as usize].requests == 0
    }

    /// Returns true if the account may take a request of `bytes` bytes, with the rest given by the third argument left
    /// for others.
    pub(in crate::engine) fn allows(
        &self,
        account: Account,
        bytes: usize,
        (requests_left, bytes_left): (usize, usize),
    ) -> bool {
        let held = self.held[account.0 as usize];
        held.requests == 0 || (held.requests < requests_left && held.bytes + bytes <= bytes_left)
    }

    /// Counts a request with `bytes` bytes.
    pub(in crate::engine) fn take(&mut self, account: Account, bytes: usize) {
        let held = self.of(account);
        held.requests += 1;
        held.bytes += bytes;
    }

    /// Ends a request with `bytes` bytes.
    pub(in crate::engine) fn give_back(&mut self, account: Account, bytes: usize) {
        let held = self.of(account);
        held.requests -= 1;
        held.bytes -= bytes;
        self.forget_if_empty(account);
    }

    /// Returns true if the account's lane is free.
    pub(in crate::engine) fn lane_is_free(&self, account: Account) -> bool {
        !self.held[account.0 as usize].lane
    }

    /// Marks the account's lane as used or free.
    pub(in crate::engine) fn use_lane(&mut self, account: Account, used: bool) {
        self.of(account).lane = used;
        if !used {
            self.forget_if_empty(account);
        }
    }

    fn of(&mut self, account: Account) -> &mut Held {
        &mut self.held[account.0 as usize]
    }

    fn forget_if_empty(&mut self, account: Account) {
        let held = self.held[account.0 as usize];
        if held.closed && held.requests == 0 && !held.lane {
            self.free.push(account.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets the account take requests of a byte each up to its limit. Returns the number taken.
    fn fill(shares: &mut Shares, account: Account, left: &mut usize) -> usize {
        let mut taken = 0;
        while *left > 0 && shares.allows(account, 1, (*left - 1, *left - 1)) {
            shares.take(account, 1);
            *left -= 1;
            taken += 1;
        }
        taken
    }

    #[test]
    fn none_gets_more_than_it_leaves_to_others() {
        let mut shares = Shares::new();
        let mut left = 1024;
        for leaves in [512, 256, 128] {
            let account = shares.open();
            fill(&mut shares, account, &mut left);
            assert!((leaves..leaves + 2).contains(&left), "{left} are left");
        }
    }

    #[test]
    fn an_account_is_used_again_when_all_of_it_was_given_back() {
        let mut shares = Shares::new();
        let first = shares.open();
        shares.take(first, 7);
        shares.use_lane(first, true);
        shares.close(first);
        assert_ne!(shares.open(), first);
        shares.give_back(first, 7);
        assert_ne!(shares.open(), first);
        shares.use_lane(first, false);
        assert_eq!(shares.open(), first);
        assert!(shares.is_empty(first) && shares.lane_is_free(first));
    }
}
