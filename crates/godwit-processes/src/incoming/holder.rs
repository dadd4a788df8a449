//! A helper process of this node that holds device objects made ahead of an arriving process (`godwit-verbs hold`).

use std::process::Stdio;
use std::time::{Duration, Instant};

use godwit_verbs::control::{Answer, Request};
use godwit_verbs::shim::{Connection, Plan};
use godwit_verbs::tables::RemoteKey;
use tokio::process::{Child, Command};

use crate::host::threads::threads_of;
use crate::{ask, status};

/// Longest start of a holder.
const BEGIN: Duration = Duration::from_secs(20);
/// Time between two checks of a starting holder.
const LOOK: Duration = Duration::from_millis(20);
/// Most holders started at once, each with other process numbers than the ones before.
const MOST_STARTED: usize = 8;

/// A holder. Its standard input closes on drop and at the node's end, and then the process ends. [`Holder::end`]
/// returns once the device has no object of the holder any more.
#[derive(Debug)]
pub(crate) struct Holder {
    child: Child,
    pid: u32,
}

impl Holder {
    /// Starts a holder without any number of the arriving threads.
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
                    // While this holder lives, the next holder gets other numbers.
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

    /// Starts a holder and waits until the holder answers: all of its threads run then.
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

    /// Returns true if the holder has one of these numbers.
    ///
    /// # Errors
    /// One sentence, if the holder has ended.
    pub(crate) fn meets(&self, coming: &[u32]) -> Result<bool, String> {
        let own = threads_of(self.pid)?;
        Ok(own.iter().any(|number| coming.contains(number)))
    }

    /// Ends the holder, with all device objects.
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

    /// Has the holder make the objects of the plan.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) async fn hold(&self, plan: Plan) -> Result<Answer, String> {
        ask(self.pid, Request::Hold { plan }).await
    }

    /// Has the holder connect queue pairs to the ones that partners have made ahead.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) async fn connect(&self, connections: Vec<Connection>) -> Result<Answer, String> {
        ask(self.pid, Request::ConnectHeld { connections }).await
    }

    /// Gives all objects to the arrived process, ends the holder, and returns the process's remote keys.
    ///
    /// # Errors
    /// One sentence. The process may recreate its objects without a holder.
    pub(crate) async fn give_to(self, pid: u32) -> Result<Vec<RemoteKey>, String> {
        let asked = Request::Attach { holder: self.pid };
        let given = match ask(pid, asked).await {
            Ok(Answer::Attached(attached)) => Ok(attached.remote_keys),
            Ok(_) => Err(format!("process {pid} gave an answer to another question")),
            Err(error) => Err(error),
        };
        // The objects left in the holder may fill the device.
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
