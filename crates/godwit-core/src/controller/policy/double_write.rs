//! Double write: a single pass; writes behind the head go to both nodes (Alg. 1 of the SmartNIC storage-migration paper).

use crate::controller::policy::Policy;
use crate::controller::transfer::pass::Pass;

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
