//! A process of this node's that has the device's objects made ahead of the process that comes (`godwit-verbs hold`).

use std::process::Stdio;
use std::time::{Duration, Instant};

use godwit_verbs::control::{Answer, Request};
use godwit_verbs::shim::{Connection, Plan};
use godwit_verbs::tables::RemoteKey;
use tokio::process::{Child, Command};

use crate::processes::host::threads::threads_of;
use crate::processes::{ask, status};

/// How long it may take to begin.
const BEGIN: Duration = Duration::from_secs(20);
/// How often it is looked whether it has begun.
const LOOK: Duration = Duration::from_millis(20);
/// How many are started, each with other numbers than those before it.
const MOST_STARTED: usize = 8;

/// A holder. It ends with this, and when the node ends: its standard input ends then. Who waits for [`Holder::end`] knows
/// that the device has nothing of it any more.
#[derive(Debug)]
pub(crate) struct Holder {
    child: Child,
    pid: u32,
}

impl Holder {
    /// Starts one that has none of the numbers of the threads that come.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) async fn start(coming: &[u32]) -> Result<Self, String> {
        let mut in_the_way = Vec::new();
        let found = loop {
            if in_the_way.len() == MOST_STARTED {
                let text =
                    "each holder had a number of the process that comes, or of a thread of it";
                break Err(text.to_owned());
            }
            match Self::begin().await {
                Ok(holder) => match holder.meets(coming) {
                    Ok(false) => break Ok(holder),
                    // While it lives, the next one has other numbers.
                    Ok(true) => in_the_way.push(holder),
                    Err(error) => break Err(error),
                },
                Err(error) => break Err(error),
            }
        };
        for holder in in_the_way {
            holder.end().await;
        }
        found
    }

    /// Starts one, and waits until it answers: then it has all of its threads.
    async fn begin() -> Result<Self, String> {
        let holder = Self::spawn()?;
        let began = Instant::now();
        loop {
            match status(holder.pid).await {
                Ok(_) => return Ok(holder),
                Err(error) if began.elapsed() > BEGIN => {
                    holder.end().await;
                    return Err(error);
                }
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// Whether it has one of these numbers.
    ///
    /// # Errors
    /// One sentence, if it has ended.
    pub(crate) fn meets(&self, coming: &[u32]) -> Result<bool, String> {
        let own = threads_of(self.pid)?;
        Ok(own.iter().any(|number| coming.contains(number)))
    }

    /// Ends it, with all that it has of the device.
    pub(crate) async fn end(mut self) {
        if let Err(error) = self.child.kill().await {
            tracing::warn!(pid = self.pid, %error, "a holder was not ended");
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
        Ok(Self { child, pid })
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

    /// Gives everything to the process that came, and has ended then. Gives the process's remote keys.
    ///
    /// # Errors
    /// One sentence. The process may make its objects again without a holder.
    pub(crate) async fn give_to(self, pid: u32) -> Result<Vec<RemoteKey>, String> {
        let asked = Request::Attach { holder: self.pid };
        let given = match ask(pid, asked).await {
            Ok(Answer::Attached(attached)) => Ok(attached.remote_keys),
            Ok(_) => Err(format!("process {pid} gave an answer to another question")),
            Err(error) => Err(error),
        };
        // What it still has may be all that the device has room for.
        self.end().await;
        given
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeping() -> Holder {
        let spawned = Command::new("sleep").arg("60").kill_on_drop(true).spawn();
        let child = spawned.expect("it starts");
        let pid = child.id().expect("it lives");
        Holder { child, pid }
    }

    #[tokio::test]
    async fn a_holder_that_was_ended_is_gone() {
        let holder = sleeping();
        let pid = holder.pid;
        let number = [pid.wrapping_add(1), pid];
        assert_eq!(holder.meets(&number), Ok(true));
        assert_eq!(holder.meets(&number[..1]), Ok(false));
        holder.end().await;
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
