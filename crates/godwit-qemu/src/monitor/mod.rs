//! QEMU's monitor.

pub mod qmp;
pub mod spare;

use serde_json::Value;

use self::qmp::{Qmp, QmpError};
use self::spare::Spare;

/// A monitor for commands that must work while QEMU's main loop waits for a page, when the page depends on the command.
#[derive(Clone, Debug)]
pub enum Monitor {
    /// The spare monitor, made for this purpose.
    Spare(Spare),
    /// The ordinary monitor.
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
