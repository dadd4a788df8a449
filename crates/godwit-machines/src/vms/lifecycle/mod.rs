//! The life of a VM on this node: started or adopted, watched, stopped, recovered after a restart.

mod adopt;
pub mod recover;
pub mod room;
pub(super) mod run;
pub(super) mod stop;
pub(super) mod watch;

pub use adopt::adopt;
pub use room::resume;
pub use run::run;
pub use stop::{forget, stop};
