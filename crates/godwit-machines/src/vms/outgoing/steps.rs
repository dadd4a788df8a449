//! Source: carries out the steps of a VM's move. `godwit_move` gives the order of the steps and the way back.

use std::pin::pin;
use std::time::{Duration, Instant};

use godwit_core::event::AbortReason;
use godwit_move::{Kind, Outcome, Plane as Of, Refusal, Step};

use crate::vms::messages::{Answer, Order};
use crate::vms::outgoing::planes::Plane;
use crate::vms::outgoing::{Move, Working};
use godwit_api::{ErrorBody, VmMigrationPhase as Phase};
use godwit_context::failpoint;
use godwit_disks::disks::group::SwitchGroup;

/// Longest start of the destination's QEMU.
const START_TIMEOUT: Duration = Duration::from_secs(40);

/// The failures of a destination that answers out of turn, or not at all.
const DID_NOT_START: &str = "did not start its QEMU";
const GAVE_UP: &str = "gave the VM up";

impl Move {
    /// Takes the steps up to the move's end, or to the pull of the rest of the memory, or until the node closes while
    /// the disks are given away.
    pub(super) async fn take_steps(&mut self, working: &mut Working) {
        while !matches!(self.course.step(), Step::Pull(_) | Step::End) {
            let step = self.course.step();
            let done = tokio::select! {
                done = self.carry_out(step, working) => done,
                error = self.given_up(), if step.cancellable() => Err(error),
                () = self.of.vms.context.closed(), if step == Step::Settle => return,
            };
            self.report(done, &working.disks.group);
        }
    }

    /// Reports the outcome of the present step.
    fn report(&mut self, done: Result<(), ErrorBody>, group: &SwitchGroup) {
        let Err(error) = &done else {
            return self.course.happened(Outcome::Done);
        };
        let why = Refusal::new(Kind::Refused, &error.message);
        self.failure = done;
        // Once the disks' records are being stored, no failure and no cancel keeps the VM here.
        let is_kept = !self.course.step().cancellable() || group.fail(AbortReason::Cancelled);
        let outcome = if is_kept {
            Outcome::Failed
        } else {
            Outcome::Unknown
        };
        self.course.happened(outcome(why));
    }

    async fn carry_out(&self, step: Step, working: &mut Working) -> Result<(), ErrorBody> {
        let of = &self.of;
        match step {
            Step::Copy(Of::Disks) => return self.copy_disks(working).await,
            Step::Copy(_) => return self.copy_memory(working).await,
            Step::Stop => of.enter(Phase::SwitchingOver),
            // A state that the destination refuses shows in its next answer.
            Step::Send(Of::Nics) => return working.nics.freeze(of, &mut working.link).await,
            Step::Send(_) => return working.memory.freeze(of, &mut working.link).await,
            Step::Decide => return self.hand_over(working).await,
            Step::Settle => working.disks.given().await,
            Step::Resume => return self.start_there(working).await,
            Step::TakeBack(Of::Disks) => {
                let reason = String::from("the source gave it up");
                working.link.say(Order::Abort { reason }).await;
                working.disks.take_back(of).await;
            }
            Step::TakeBack(Of::Nics) => working.nics.take_back(of).await,
            Step::TakeBack(_) => working.memory.take_back(of).await,
            Step::ResumeHere => self.stay(working).await,
            _ => {}
        }
        Ok(())
    }

    /// Copies the disks while the destination starts its QEMU: a failed start shows before the disks are copied, and no
    /// start delays the move after the copy.
    async fn copy_disks(&self, working: &mut Working) -> Result<(), ErrorBody> {
        let of = &self.of;
        of.enter(Phase::CopyingDisks);
        working.disks.start(of).await?;
        working.link.say(Order::Start).await;
        let deadline = tokio::time::Instant::now() + START_TIMEOUT;
        failpoint::reach(String::from("vm::copying-disks")).await;
        let mut copying = pin!(working.disks.converged(of));
        let (mut copied, mut started) = (false, false);
        while !(copied && started) {
            tokio::select! {
                converged = &mut copying, if !copied => {
                    converged?;
                    copied = true;
                    if !started {
                        of.enter(Phase::Starting);
                    }
                }
                error = working.memory.broken(of) => return Err(error),
                answer = working.link.hear() => match answer {
                    Some(Answer::Started) if !started => started = true,
                    other if started => return Err(of.unwilling(other, GAVE_UP)),
                    other => return Err(of.unwilling(other, DID_NOT_START)),
                },
                () = tokio::time::sleep_until(deadline), if !started => {
                    return Err(of.unwilling(None, DID_NOT_START));
                }
            }
        }
        Ok(())
    }

    async fn copy_memory(&self, working: &mut Working) -> Result<(), ErrorBody> {
        let of = &self.of;
        of.enter(Phase::CopyingMemory);
        working.memory.start(of).await?;
        failpoint::reach(String::from("vm::copying-memory")).await;
        tokio::select! {
            converged = working.memory.converged(of) => converged,
            error = working.disks.broken(of) => Err(error),
            answer = working.link.hear() => Err(of.unwilling(answer, GAVE_UP)),
        }
    }

    /// Gives the VM away.
    async fn hand_over(&self, working: &mut Working) -> Result<(), ErrorBody> {
        failpoint::reach(String::from("vm::loaded")).await;
        working.told = Some(Instant::now());
        // Without a pull the destination has all memory by now.
        let (of, pulls) = (&self.of, self.of.request.memory.pulls());
        tokio::select! {
            decided = working.disks.hand_over(of) => decided?,
            error = working.memory.broken(of), if pulls => return Err(error),
            answer = working.link.hear() => return Err(of.unwilling(answer, GAVE_UP)),
        }
        // From here on the destination may report that the guest runs.
        working.disks.given().await;
        Ok(())
    }
}
