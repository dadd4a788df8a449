//! QEMU's monitor.

pub mod qmp;
pub mod spare;

use serde_json::Value;

use self::qmp::{Qmp, QmpError};
use self::spare::Spare;

/// A monitor for what must work while QEMU's main loop waits for a page: a page that comes only once
/// this is done.
#[derive(Clone, Debug)]
pub enum Monitor {
    /// The one that is there for that.
    Spare(Spare),
    /// The one for everything.
    Main(Qmp),
}

impl Monitor {
    pub(crate) async fn execute_past_main_loop(
        &self,
        command: &'static str,
        arguments: Value,
    ) -> Result<(), QmpError> {
        match self {
            Self::Spare(spare) => spare.execute(command, arguments).await,
            Self::Main(qmp) => qmp.execute_out_of_band(command, arguments).await.map(drop),
        }
    }
}
