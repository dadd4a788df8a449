//! Destination: an operator's verdict on a VM whose source gives no word on the handover.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode};
use tokio::sync::{mpsc, oneshot};

use crate::vms::Vms;
use crate::vms::incoming::asking::Asking;
use crate::vms::memory::pooled;
use crate::vms::messages::Word;
use crate::vms::vm::{Inner, Vm, VmActivity};
use godwit_context::store::machine::{VmMark, VmOrigin};
use godwit_disks::disks::lifecycle::claim;

/// Longest execution of a verdict: longer than a QEMU may need to load the memory.
const CARRIED_OUT: Duration = Duration::from_secs(40);
/// Time between two checks of the execution.
const POLL: Duration = Duration::from_millis(20);

/// An operator's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The VM belongs to this node, regardless of the source.
    Ours,
    /// The VM is given up: the QEMU here ends.
    GivenUp,
}

/// A verdict, with the receiver of the outcome.
pub(crate) type Ordered = (Verdict, oneshot::Sender<Result<(), ErrorBody>>);

/// The sender of a verdict on a VM in doubt.
pub(crate) type Verdicts = mpsc::Sender<Ordered>;

/// The end of a doubt.
pub(super) enum Decided {
    /// The source's word on giving the VM away.
    BySource(bool),
    /// An operator's verdict, with the receiver of the outcome.
    ByOperator(Verdict, oneshot::Sender<Result<(), ErrorBody>>),
}

/// The wait for a decision while the source is gone.
#[derive(Default)]
pub(super) struct Doubt {
    vm: Option<Arc<Vm>>,
    asking: Option<Asking>,
    verdicts: Option<mpsc::Receiver<Ordered>>,
}

impl Doubt {
    /// Begins to wait for an operator's verdict. For a VM with neither disks nor memory in a pool, also asks for the
    /// source's word.
    pub(super) fn begin(&mut self, vms: &Arc<Vms>, vm: &Arc<Vm>) {
        if self.verdicts.is_some() {
            return;
        }
        let (sender, verdicts) = mpsc::channel(1);
        (self.verdicts, self.vm) = (Some(verdicts), Some(Arc::clone(vm)));
        let mut inner = vm.lock();
        inner.verdicts = Some(sender);
        let entry = &inner.entry;
        let (VmOrigin::Received { from }, Some(VmMark::Incoming { migration, .. })) =
            (&entry.origin, &entry.mark)
        else {
            return;
        };
        if entry.machine.disks.is_empty() && entry.memory.is_none() {
            let migration = migration.parse().unwrap_or_default();
            let machine = (vm.name.as_str(), entry.id.as_str());
            self.asking = Some(Asking::begin(vms, machine, from, migration));
        }
        inner.problem = Some(format!(
            "node '{from}' has to say whether it gave the VM away, and is not heard of"
        ));
    }

    /// Waits for the end of the doubt, if there ever is one.
    pub(super) async fn next(&mut self) -> Decided {
        loop {
            tokio::select! {
                heard = heard(&mut self.asking) => {
                    if let Some(decided) = self.take(heard) {
                        return decided;
                    }
                }
                (verdict, reply) = ordered(&mut self.verdicts) => {
                    return Decided::ByOperator(verdict, reply);
                }
            }
        }
    }

    /// Returns the source's decision, or records the reason for the wait as the VM's problem.
    fn take(&self, heard: Result<Word, String>) -> Option<Decided> {
        let problem = match heard {
            Ok(Word::Given) => return Some(Decided::BySource(true)),
            Ok(Word::Kept) => return Some(Decided::BySource(false)),
            Ok(Word::Undecided) => {
                String::from("the source has not decided whether it gives the VM away")
            }
            Ok(Word::Nothing) => String::from(
                "the source knows nothing of this move any more: decide yourself, with 'godwit vm resume --force' or 'godwit \
                 vm stop --force'",
            ),
            Err(why) => format!("the source has to say whether it gave the VM away: {why}"),
        };
        if let Some(vm) = &self.vm {
            vm.lock().problem = Some(problem);
        }
        None
    }
}

async fn heard(asking: &mut Option<Asking>) -> Result<Word, String> {
    match asking {
        Some(asking) => asking.heard().await,
        None => std::future::pending().await,
    }
}

async fn ordered(verdicts: &mut Option<mpsc::Receiver<Ordered>>) -> Ordered {
    let ordered = match verdicts {
        Some(verdicts) => verdicts.recv().await,
        None => None,
    };
    match ordered {
        Some(ordered) => ordered,
        None => std::future::pending().await,
    }
}

/// Passes a verdict to the VM's receiving task, and waits for the outcome.
///
/// # Errors
/// The verdict could not be carried out.
pub(in crate::vms) async fn decide(
    vm: &Arc<Vm>,
    verdicts: &Verdicts,
    verdict: Verdict,
) -> Result<(), ErrorBody> {
    tracing::warn!(
        vm = vm.name,
        ?verdict,
        "an operator decides about a VM that is in doubt"
    );
    let conflict = |text: String| {
        let hint = format!("see 'godwit vm show {}'", vm.name);
        Err(ErrorBody::new(ErrorCode::Conflict, text).hint(hint))
    };
    let (reply, answer) = oneshot::channel();
    if verdicts.try_send((verdict, reply)).is_err() {
        return conflict(format!("VM {} is being decided about already", vm.name));
    }
    match answer.await {
        Ok(done) => done?,
        Err(_) => return conflict(format!("VM {} has been decided about meanwhile", vm.name)),
    }
    if verdict == Verdict::GivenUp {
        return Ok(());
    }
    let begun = tokio::time::Instant::now();
    loop {
        let (under_way, problem) = {
            let inner = vm.lock();
            let under_way = matches!(inner.activity, VmActivity::Incoming(_));
            (under_way, inner.problem.clone())
        };
        if !under_way {
            return match problem {
                Some(problem) => conflict(format!("VM {} does not run: {problem}", vm.name)),
                None => Ok(()),
            };
        }
        if begun.elapsed() >= CARRIED_OUT {
            return conflict(format!("VM {} is still in doubt", vm.name));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Returns the refusal of a verdict without `force`, for a VM possibly running elsewhere.
pub(in crate::vms) fn warning(vm: &str, inner: &Inner) -> ErrorBody {
    let from = match &inner.entry.origin {
        VmOrigin::Received { from } => from.as_str(),
        VmOrigin::Run | VmOrigin::Adopted => "it came from",
    };
    let text = format!(
        "VM {vm} arrives from node '{from}', which does not say whether it gave the VM away: if the guest runs there, \
         letting it run here makes two of it; if it was given away, what its memory holds is here only"
    );
    ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
        "start node '{from}', and it is decided; or make sure that the guest does not run there, then 'godwit vm resume {vm} \
         --force'; 'godwit vm stop {vm} --force' ends it here"
    ))
}

/// Makes this node the owner of the VM's disks and memory.
///
/// # Errors
/// A disk is not in doubt, or cannot be claimed.
pub(super) async fn claim_all(vms: &Arc<Vms>, vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let (disks, memory) = {
        let entry = &vm.lock().entry;
        (entry.machine.disks.clone(), entry.memory.clone())
    };
    if let Some(memory) = memory {
        pooled::claim(vms, &vm.name, &memory)?;
    }
    for disk in disks {
        let is_owned = {
            let found = vms.disks.get(&disk)?;
            let inner = found.lock();
            inner.record.ownership == godwit_core::authority::Ownership::Serving
        };
        if !is_owned {
            claim::claim(&vms.disks, &disk, true).await?;
        }
    }
    Ok(())
}
