//! Source: the steps of a VM's move up to the handover of its disks.

use std::time::{Duration, Instant};

use crate::vms::messages::{Answer, Order};
use crate::vms::outgoing::departure::{Departure, SourceLink};
use crate::vms::outgoing::planes::Plane;
use crate::vms::outgoing::{Move, Working};
use godwit_api::{ErrorBody, VmMigrationPhase as Phase};
use godwit_context::failpoint;

/// Longest start of the destination's QEMU.
const START_TIMEOUT: Duration = Duration::from_secs(40);

/// The state of the destination's QEMU, which has to wait for its memory.
#[derive(Clone, Copy)]
enum StartingQemu {
    /// The QEMU is being started, with this deadline.
    Until(tokio::time::Instant),
    Done,
}

impl StartingQemu {
    /// Waits until the start is overdue.
    async fn overdue(self) {
        match self {
            Self::Until(deadline) => tokio::time::sleep_until(deadline).await,
            Self::Done => std::future::pending().await,
        }
    }

    /// Takes the destination's answer about its QEMU.
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

    /// Listens during another step. Returns the reason if the destination gives the move up.
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
    /// Takes all steps up to the handover of the disks.
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
        // A failed start of the destination's QEMU then shows before the disks are copied, and no start delays the move
        // after the copy.
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
        // A state that the destination refuses shows in its next answer.
        nics.freeze(of, link).await?;
        memory.freeze(of, link).await?;
        failpoint::reach(String::from("vm::loaded")).await;
        self.told = Some(Instant::now());
        memory.hand_over(of).await?;
        nics.hand_over(of).await?;
        // Without a pull the destination has all memory by now.
        let pulls = of.request.memory.pulls();
        tokio::select! {
            given = disks.hand_over(of) => given,
            error = memory.broken(of), if pulls => Err(error),
            // An answer too late to keep the disks is no end of the move: see `carry_out`.
            error = starting.listen(of, link) => Err(error),
        }
    }
}
