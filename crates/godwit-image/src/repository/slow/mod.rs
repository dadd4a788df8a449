//! Slow answers: a second request, and the time to wait.

pub(in crate::repository) mod hedge;
pub(in crate::repository) mod patience;
