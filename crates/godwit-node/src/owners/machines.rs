//! Finds this node's machines with a later owner, and machines with their memory elsewhere.

use std::sync::Arc;

use godwit_core::authority::AuthorityRecord;
use serde_json::json;

use super::{Kind, Part, Shown, record};
use crate::node::Node;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::store::machine::{VmEntry, VmMark};
use godwit_context::store::surpassed::Surpassed;
use godwit_machines::vms::memory::pooled;
use godwit_machines::vms::vm::{Inner, Vm, VmActivity};

/// Returns the ownership record of a stored machine. Nothing for a machine stored by an earlier version.
fn shown(entry: &VmEntry) -> Option<Shown> {
    let id = Some(entry.id.clone()).filter(|id| !id.is_empty())?;
    Some(Shown::new(Kind::Machine, id, &authority(entry)))
}

fn authority(entry: &VmEntry) -> AuthorityRecord {
    let part = match (&entry.moved_to, &entry.mark) {
        (Some(_), _) => Part::Departed,
        (None, Some(VmMark::Incoming { .. })) => Part::Accepted,
        (None, _) => Part::Serving,
    };
    record(entry.epoch, part)
}

/// Returns this node's machines, as far as known here.
pub(super) fn owned(node: &Node) -> Vec<Shown> {
    let all = node.vms.all();
    let shown = all.iter().filter_map(|vm| shown(&vm.lock().entry));
    shown.filter(|it| it.part == Part::Serving).collect()
}

/// Returns this node's records of another node's machines.
pub(super) fn known(node: &Node, theirs: &[Shown]) -> Vec<Shown> {
    let asked = |id: &str| {
        let mut machines = theirs.iter().filter(|it| it.kind == Kind::Machine);
        machines.any(|it| it.id == id)
    };
    let all = node.vms.all();
    let known = all.iter().filter_map(|vm| shown(&vm.lock().entry));
    known.filter(|it| asked(&it.id)).collect()
}

/// Stops the machine of this id if the record surpasses this node's.
pub(super) async fn judge(node: &Arc<Node>, peer: &str, theirs: &Shown) {
    let is_it = |vm: &Arc<Vm>| vm.lock().entry.id == theirs.id;
    if theirs.id.is_empty() {
        return;
    }
    if let Some(vm) = node.vms.all().into_iter().find(is_it) {
        let record = theirs.record();
        let surpassed = |entry: &VmEntry| {
            let by = authority(entry).is_surpassed_by(&record);
            by.then(|| Surpassed {
                by: peer.to_owned(),
                epoch: theirs.epoch,
            })
        };
        hold(node, &vm, surpassed).await;
    }
}

/// Stops machines with memory in a memory pool that belongs to another node, and machines that run although surpassed.
pub(crate) async fn look_at_memory(node: &Arc<Node>) {
    for vm in node.vms.all() {
        let owner = {
            let (node, vm) = (Arc::clone(node), Arc::clone(&vm));
            blocking(move || pooled::owner(&node.vms, &vm)).await
        };
        let title = owner.ok().flatten();
        let surpassed = |entry: &VmEntry| match (&title, &entry.surpassed) {
            (_, Some(earlier)) => Some(earlier.clone()),
            (Some(title), None) if title.owner != node.context.config.name => Some(Surpassed {
                by: title.owner.clone(),
                epoch: title.epoch,
            }),
            _ => None,
        };
        hold(node, &vm, surpassed).await;
    }
}

/// Returns true unless a change under way decides the machine's owner.
fn is_settled(inner: &Inner) -> bool {
    let entry = &inner.entry;
    let changes = matches!(
        entry.mark,
        Some(VmMark::Incoming { .. } | VmMark::Outgoing { .. } | VmMark::Starting)
    );
    entry.moved_to.is_none() && !changes
}

/// Stops the machine and stores the reason, if `surpassed` returns one.
async fn hold(node: &Arc<Node>, vm: &Arc<Vm>, surpassed: impl Fn(&VmEntry) -> Option<Surpassed>) {
    let mut found = None;
    let due = |inner: &Inner| {
        let runs = inner.run_state.as_deref() == Some("running");
        found = surpassed(&inner.entry).filter(|_| is_settled(inner));
        let is_new = found.is_some() && inner.entry.surpassed.is_none();
        (is_new || found.is_some() && runs)
            .then_some(())
            .ok_or_else(|| ErrorBody::new(ErrorCode::Conflict, String::new()))
    };
    // A machine with another activity is looked at again later.
    let Ok(_guard) = vm.begin(VmActivity::Pausing, due) else {
        return;
    };
    let Some(surpassed) = found else { return };
    let (entry, is_new) = {
        let mut inner = vm.lock();
        let is_new = inner.entry.surpassed.is_none();
        inner.entry.surpassed = Some(surpassed.clone());
        (inner.entry.clone(), is_new)
    };
    if is_new {
        let why = surpassed.why("the VM", entry.epoch);
        tracing::error!(vm = vm.name, why, "the VM is to stand still");
        if let Err(error) = node.context.store.put_vm(&vm.name, &entry).await {
            tracing::error!(vm = vm.name, %error, "a restart would not know at once that the VM is to stand still");
        }
    }
    let Ok(qemu) = vm.qemu() else { return };
    match qemu.qmp.execute("stop", json!({})).await {
        Ok(_) => vm.lock().run_state = Some(String::from("paused")),
        Err(error) => {
            tracing::error!(vm = vm.name, %error, "the VM does not stand still; trying again")
        }
    }
}
