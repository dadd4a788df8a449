//! The life of a VM on this node: started or adopted, watched, stopped, recovered after a restart.

mod adopt;
pub(crate) mod recover;
pub(crate) mod room;
pub(super) mod run;
pub(super) mod stop;
pub(super) mod watch;

pub(crate) use adopt::adopt;
pub(crate) use room::resume;
pub(crate) use run::run;
pub(crate) use stop::{forget, stop};
