//! A process of this node's that has the device's objects made ahead of the process that comes (`godwit-verbs hold`).

use std::process::Stdio;
use std::time::{Duration, Instant};

use godwit_verbs::control::{Answer, Request};
use godwit_verbs::shim::{Connection, Plan};
use tokio::process::{Child, Command};

use crate::processes::{ask, status};

/// How long it may take to begin.
const BEGIN: Duration = Duration::from_secs(20);
/// How often it is looked whether it has begun.
const LOOK: Duration = Duration::from_millis(20);

/// A holder. It ends with this, and when the node ends: its standard input ends then.
#[derive(Debug)]
pub(crate) struct Holder {
    _child: Child,
    /// Its number.
    pub(crate) pid: u32,
}

impl Holder {
    /// Starts one that does not have the number of the process that comes.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) async fn start(coming: u32) -> Result<Self, String> {
        let first = Self::spawn()?;
        let holder = if first.pid == coming {
            // While the first lives, the second has another number.
            Self::spawn()?
        } else {
            first
        };
        let began = Instant::now();
        loop {
            match status(holder.pid).await {
                Ok(_) => return Ok(holder),
                Err(error) if began.elapsed() > BEGIN => return Err(error),
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    fn spawn() -> Result<Self, String> {
        let cannot = |error: &str| format!("`godwit-verbs hold` cannot be run: {error}");
        let child = Command::new("godwit-verbs")
            .arg("hold")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| cannot(&error.to_string()))?;
        let pid = child.id().ok_or_else(|| cannot("it ended"))?;
        Ok(Self { _child: child, pid })
    }

    /// Has it make what the plan says.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) async fn hold(&self, plan: Plan) -> Result<Answer, String> {
        ask(self.pid, Request::Hold { plan }).await
    }

    /// Has it connect queue pairs to those that partners have made for them.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) async fn connect(&self, connections: Vec<Connection>) -> Result<Answer, String> {
        ask(self.pid, Request::ConnectHeld { connections }).await
    }

    /// Gives everything to the process that came; this holder is of no more use then. Gives the process's remote keys.
    ///
    /// # Errors
    /// One sentence. The process may make its objects again without a holder.
    pub(crate) async fn give_to(self, pid: u32) -> Result<Vec<(u32, u32)>, String> {
        match ask(pid, Request::Attach { holder: self.pid }).await? {
            Answer::Attached(attached) => Ok(attached.remote_keys),
            _ => Err(format!("process {pid} gave an answer to another question")),
        }
    }
}
