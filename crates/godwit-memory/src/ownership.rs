//! The right to run the guest whose memory is in a segment.
//!
//! A segment's header holds a [`Title`]: the owner and the epoch. Only the owner changes the title. Each change begins
//! the next epoch, so a title changes at most once per epoch. A move from node `a` to node `b` takes these steps; a
//! crash between any two of them is allowed:
//!
//! 1. `a` offers its title of epoch `e`. The guest keeps running.
//! 2. Either `a` stores durably that the VM belongs to `b`, in one transaction with the VM's disks. From then on `a`
//!    never runs the guest again, and writes the title `(e + 1, b)`, after a crash as well. Or `a` cancels the move and
//!    writes `(e + 1, a)`; then the guest continues at `a`.
//! 3. `b` reads the title. Epoch `e` means that the move is undecided, `(e + 1, b)` lets `b` run the guest, and any
//!    other title means that the VM does not come.
//!
//! Exactly one of both nodes thus runs the guest, whatever crashes, and `b` learns the decision without asking `a`.

/// The ownership of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Title {
    /// Number of title changes, from 1.
    pub epoch: u64,
    /// Name of the owning node.
    pub owner: String,
}

/// The reason why a title does not change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Another node owns the segment.
    #[error("it belongs to node '{0}'")]
    NotOwner(String),
    /// The title has changed since the offer.
    #[error("its epoch is {now}, and epoch {offered} was offered")]
    Changed {
        /// Epoch of the title.
        now: u64,
        /// Epoch of the offer.
        offered: u64,
    },
}

impl Title {
    /// Returns the title of a new segment.
    pub fn new(owner: &str) -> Self {
        Self {
            epoch: 1,
            owner: owner.to_owned(),
        }
    }

    /// Returns true if `node` may run the guest. `given_away` is true if `node` has stored durably that the VM belongs
    /// to another node.
    pub fn may_run(&self, node: &str, given_away: bool) -> bool {
        self.owner == node && !given_away
    }

    /// Returns the title that ends an offer of epoch `offered` by `from`: in favour of `to`, or of `from` itself if the
    /// move is cancelled.
    ///
    /// # Errors
    /// [`Refused`] if `from` is not the owner, or the offer has ended already.
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

    /// Returns the meaning of the title for `node`, the destination of an offer of epoch `offered`.
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

/// The arrival of a VM that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arrival {
    /// The previous owner has not decided.
    Undecided,
    /// The VM has come: the guest may run here.
    Given,
    /// The VM does not come by this offer.
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
