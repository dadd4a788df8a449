//! The life of a VM on this node: started or adopted, watched, stopped, recovered after a restart.

mod adopt;
pub mod recover;
pub mod room;
pub(crate) mod run;
pub(super) mod stop;
pub(crate) mod taken;
pub(crate) mod watch;

pub use adopt::adopt;
pub use room::resume;
pub use run::run;
pub use stop::{forget, stop};
