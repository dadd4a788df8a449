//! Mirror: a single pass; all writes go to both nodes from the start.

use crate::controller::PolicyOptions;
use crate::controller::policy::{Policy, PolicyDescription};
use crate::controller::transfer::pass::Pass;
use crate::wire::Features;

/// Mirror.
pub const MIRROR: &PolicyDescription = &PolicyDescription {
    name: "mirror",
    summary: "A single pass; all writes go to both nodes from the start",
    code: 3,
    needs: Features::POLICIES,
    usual: PolicyOptions::Mirror,
    reviewed: false,
};

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
