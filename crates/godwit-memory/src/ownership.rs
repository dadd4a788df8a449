//! Who may run the guest whose memory is in a segment.
//!
//! A segment says in its header who owns it and in which epoch: its [`Title`]. Only the owner changes the title, and
//! every change is the next epoch, so a title is never changed twice from the same epoch. A move from node `a` to
//! node `b` takes these steps, and a crash between any two of them is allowed:
//!
//! 1. `a` offers its title of epoch `e`. Its guest goes on.
//! 2. Either `a` stores durably that the machine is `b`'s, in one transaction with the machine's disks; from then on
//!    it never runs the guest again and writes the title `(e + 1, b)`, after a crash as well. Or `a` gives the move
//!    up and writes `(e + 1, a)`; then its guest goes on.
//! 3. `b` reads the title. Epoch `e` says nothing yet, `(e + 1, b)` lets it run the guest, anything else tells it that
//!    the machine does not come.
//!
//! So exactly one of both runs the guest, whatever crashes, and `b` finds out without asking `a`.

/// Who owns a segment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Title {
    /// Counts the changes of the title, from 1.
    pub epoch: u64,
    /// The owning node's name.
    pub owner: String,
}

/// Why a title does not change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is somebody else's.
    #[error("it belongs to node '{0}'")]
    NotOwner(String),
    /// It has changed since it was offered.
    #[error("its epoch is {now}, and epoch {offered} was offered")]
    Changed {
        /// The epoch of the title.
        now: u64,
        /// The epoch that was offered.
        offered: u64,
    },
}

impl Title {
    /// The title of a new segment.
    pub fn new(owner: &str) -> Self {
        Self {
            epoch: 1,
            owner: owner.to_owned(),
        }
    }

    /// Whether `node` may run the guest. `given_away`: it has stored durably that the machine is another node's.
    pub fn may_run(&self, node: &str, given_away: bool) -> bool {
        self.owner == node && !given_away
    }

    /// The title with which `from` ends an offer of epoch `offered`: in favour of `to`, or in its own when it gives
    /// the move up.
    ///
    /// # Errors
    /// [`Refused`] when `from` is not the owner, or the offer has ended already.
    pub fn decided(&self, from: &str, offered: u64, to: &str) -> Result<Self, Refused> {
        if self.owner != from {
            return Err(Refused::NotOwner(self.owner.clone()));
        }
        if self.epoch != offered {
            return Err(Refused::Changed {
                now: self.epoch,
                offered,
            });
        }
        Ok(Self {
            epoch: offered + 1,
            owner: to.to_owned(),
        })
    }

    /// What the title says to `node`, to which epoch `offered` was offered.
    pub fn arrival(&self, node: &str, offered: u64) -> Arrival {
        if self.epoch <= offered {
            Arrival::Undecided
        } else if self.epoch == offered + 1 && self.owner == node {
            Arrival::Given
        } else {
            Arrival::Elsewhere
        }
    }
}

/// Whether a machine that was offered has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arrival {
    /// Its old owner has not decided.
    Undecided,
    /// It has: its guest may run here.
    Given,
    /// It does not come by this offer.
    Elsewhere,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_decided_once() {
        let title = Title::new("a");
        let given = title.decided("a", 1, "b").expect("decides");
        assert_eq!(given.arrival("b", 1), Arrival::Given);
        assert!(given.may_run("b", false) && !given.may_run("a", false));
        given.decided("a", 1, "a").expect_err("decided");
        given.decided("b", 1, "b").expect_err("another epoch");
        let kept = title.decided("a", 1, "a").expect("decides");
        assert_eq!(kept.arrival("b", 1), Arrival::Elsewhere);
        assert_eq!(title.arrival("b", 1), Arrival::Undecided);
    }

    #[test]
    fn a_later_epoch_is_another_offer_s() {
        let later = Title {
            epoch: 3,
            owner: String::from("b"),
        };
        assert_eq!(later.arrival("b", 1), Arrival::Elsewhere);
        assert_eq!(later.arrival("b", 2), Arrival::Given);
    }
}
