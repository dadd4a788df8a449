//! Source: the steps of a VM's move up to the moment at which its disks are given away.

use std::time::{Duration, Instant};

use crate::failpoint;
use crate::vms::messages::{Answer, Order};
use crate::vms::outgoing::departure::{Departure, SourceLink};
use crate::vms::outgoing::planes::Plane;
use crate::vms::outgoing::{Move, Working};
use godwit_api::{ErrorBody, VmMigrationPhase as Phase};

/// Longest time that the destination's QEMU may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(40);

/// Whether the destination's QEMU waits for its memory.
#[derive(Clone, Copy)]
enum StartingQemu {
    /// It is being started, and should have been then.
    Until(tokio::time::Instant),
    Done,
}

impl StartingQemu {
    /// Ready once it should have been started and is not.
    async fn overdue(self) {
        match self {
            Self::Until(deadline) => tokio::time::sleep_until(deadline).await,
            Self::Done => std::future::pending().await,
        }
    }

    /// Takes what the destination says about its QEMU.
    fn heard(&mut self, of: &Departure, answer: Option<Answer>) -> Result<(), ErrorBody> {
        match (*self, answer) {
            (Self::Until(_), Some(Answer::Started)) => {
                *self = Self::Done;
                Ok(())
            }
            (Self::Until(_), other) => Err(of.unwilling(other, "did not start its QEMU")),
            (Self::Done, other) => Err(of.unwilling(other, "gave the VM up")),
        }
    }

    /// Listens while something else goes on. Ready, with the reason, when the destination gives the move up.
    async fn listen(&mut self, of: &Departure, destination: &mut SourceLink) -> ErrorBody {
        loop {
            let answer = tokio::select! {
                answer = destination.hear() => answer,
                () = self.overdue() => None,
            };
            if let Err(error) = self.heard(of, answer) {
                return error;
            }
        }
    }
}

impl Move {
    /// Everything up to the moment at which the disks are given away.
    pub(in crate::vms) async fn until_given(
        &mut self,
        working: &mut Working,
    ) -> Result<(), ErrorBody> {
        let of = &self.of;
        let Working {
            link,
            disks,
            memory,
            nics,
        } = working;
        of.enter(Phase::CopyingDisks);
        disks.start(of).await?;
        // What keeps its QEMU from starting shows before the disks are copied, and nothing waits for it
        // once they are.
        link.say(Order::Start).await;
        let mut starting = StartingQemu::Until(tokio::time::Instant::now() + START_TIMEOUT);
        failpoint::reach(String::from("vm::copying-disks")).await;
        tokio::select! {
            converged = disks.converged(of) => converged?,
            error = memory.broken(of) => return Err(error),
            error = starting.listen(of, link) => return Err(error),
        }
        if let StartingQemu::Until(deadline) = starting {
            of.enter(Phase::Starting);
            let answer = tokio::time::timeout_at(deadline, link.hear()).await;
            starting.heard(of, answer.unwrap_or_default())?;
        }

        of.enter(Phase::CopyingMemory);
        memory.start(of).await?;
        failpoint::reach(String::from("vm::copying-memory")).await;
        tokio::select! {
            converged = memory.converged(of) => converged?,
            error = disks.broken(of) => return Err(error),
            error = starting.listen(of, link) => return Err(error),
        }

        of.enter(Phase::SwitchingOver);
        disks.freeze(of, link).await?;
        // A state that the destination does not take shows in its answer to what is sent next.
        nics.freeze(of, link).await?;
        memory.freeze(of, link).await?;
        failpoint::reach(String::from("vm::loaded")).await;
        self.told = Some(Instant::now());
        memory.hand_over(of).await?;
        nics.hand_over(of).await?;
        // Otherwise the destination has all that it needs.
        let pulls = of.request.memory.pulls();
        tokio::select! {
            given = disks.hand_over(of) => given,
            error = memory.broken(of), if pulls => Err(error),
            // Whoever hears this too late to keep the disks goes on: see `carry_out`.
            error = starting.listen(of, link) => Err(error),
        }
    }
}
