//! Double write: a single pass; writes behind the head go to both nodes (Alg. 1 of the SmartNIC storage-migration paper).

use crate::controller::PolicyOptions;
use crate::controller::policy::{Policy, PolicyDescription};
use crate::controller::transfer::pass::Pass;
use crate::wire::Features;

/// Double write, the policy that every node knows.
pub const DOUBLE_WRITE: &PolicyDescription = &PolicyDescription {
    name: "double-write",
    summary: "A single pass; writes to copied parts go to both nodes",
    code: 1,
    needs: Features(0),
    usual: PolicyOptions::DoubleWrite,
    reviewed: true,
};

/// Double write, which has no state of its own.
#[derive(Debug)]
pub(in crate::controller) struct DoubleWrite;

impl Policy for DoubleWrite {
    #[inline]
    fn reaches(&self, pass: Pass, behind: bool) -> bool {
        behind || !matches!(pass, Pass::Copy)
    }

    #[inline]
    fn doubles(&self) -> bool {
        true
    }
}
