//! Mirror: a single pass; all writes go to both nodes from the start.

use crate::controller::policy::Policy;
use crate::controller::transfer::pass::Pass;

/// Mirror, which has no state of its own.
#[derive(Debug)]
pub(in crate::controller) struct Mirror;

impl Policy for Mirror {
    #[inline]
    fn reaches(&self, _: Pass, _: bool) -> bool {
        true
    }

    #[inline]
    fn doubles(&self) -> bool {
        true
    }

    #[inline]
    fn mirrors(&self) -> bool {
        true
    }
}
