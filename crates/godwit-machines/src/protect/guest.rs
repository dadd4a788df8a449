//! The guest of a protected machine at its primary: stands still when its lease is over, ends when the backup has it.

use std::sync::Arc;

use godwit_qemu::monitor::qmp::QmpError;
use serde_json::json;
use tokio::sync::watch::{Receiver, Sender, channel};

use crate::vms::Vms;
use crate::vms::lifecycle::{taken, watch};
use crate::vms::vm::{Inner, Vm, VmActivity};
use godwit_api::{ErrorBody, ErrorCode, VmState};
use godwit_context::store::machine::VmMark;

/// Makes a guest stand still and go on, in the order of the calls. A monitor may take as long as the disks hold.
#[derive(Debug)]
pub(super) struct Lease {
    still: Sender<bool>,
}

impl Lease {
    /// Watches over the guest of this VM.
    pub(super) fn new(vms: Arc<Vms>, name: String) -> Self {
        let (still, wanted) = channel(false);
        tokio::spawn(obey(vms, name, wanted));
        Self { still }
    }

    /// Makes the guest stand still, or go on. Returns true if that is a change.
    pub(super) fn stand_still(&self, still: bool) -> bool {
        self.still
            .send_if_modified(|now| std::mem::replace(now, still) != still)
    }
}

async fn obey(vms: Arc<Vms>, name: String, mut wanted: Receiver<bool>) {
    let mut stopped = false;
    while wanted.changed().await.is_ok() {
        let still = *wanted.borrow_and_update();
        let Some(vm) = vms.find(&name) else { continue };
        let Ok(qemu) = vm.qemu() else { continue };
        let runs = vm.lock().run_state.as_deref() == Some("running");
        let command = match (still, stopped, runs) {
            (true, false, true) => "stop",
            (false, true, _) => "cont",
            _ => continue,
        };
        let disks = vm.lock().entry.machine.disks.clone();
        let engines = || {
            let disks = disks.iter().filter_map(|disk| vms.disks.find(disk));
            disks.filter_map(|disk| disk.engine())
        };
        if still {
            // A ring would wait for the end of requests whose answers are held.
            engines().for_each(|engine| engine.machine_stands_still());
        }
        match qemu.qmp.execute(command, json!({})).await {
            Ok(_) => stopped = still,
            // QEMU obeys once its disks have answered, which they may not do before the other node is heard.
            Err(QmpError::Timeout { .. }) => {
                tracing::warn!(vm = name, command, "QEMU has not answered yet");
                stopped = still;
            }
            Err(error) => tracing::error!(vm = name, command, %error, "QEMU refuses"),
        }
        if !stopped {
            engines().for_each(|engine| engine.machine_goes_on());
        }
    }
}

/// Ends the QEMU of a machine that another node has, if any runs.
pub(super) async fn end(vm: &Vm, by: &str) {
    let (qemu, silent) = {
        let mut inner = vm.lock();
        if inner.qemu.is_some() {
            inner.ended_for = Some(format!("node '{by}' has taken it over"));
        }
        let qemu = inner.qemu.as_ref().map(|qemu| Arc::clone(&qemu.process));
        (qemu, inner.silent.clone())
    };
    for process in qemu.into_iter().chain(silent) {
        process.kill().await;
    }
}

/// Returns true if the machine runs, or its guest or QEMU has ended by itself.
pub(super) fn needs_no_start(vm: &Vm) -> bool {
    let inner = vm.lock();
    match &inner.entry.ended {
        Some(why) => why == watch::SHUT_DOWN || why.starts_with(watch::QEMU_ENDED),
        None => inner.qemu.is_some(),
    }
}

/// Starts a machine that was ended, or whose QEMU died with the host. Returns false if the VM is not stopped yet.
pub(super) fn start_again(vms: &Arc<Vms>, vm: &Arc<Vm>) -> bool {
    let stopped = |inner: &Inner| match inner.state() {
        VmState::Stopped => Ok(()),
        state => Err(ErrorBody::new(ErrorCode::Conflict, state.name())),
    };
    let Ok(guard) = vm.begin(VmActivity::Starting, stopped) else {
        return false;
    };
    {
        let mut inner = vm.lock();
        inner.entry.mark = Some(VmMark::Taken);
        inner.entry.ended = None;
    }
    tokio::spawn(taken::start(Arc::clone(vms), Arc::clone(vm), guard));
    true
}
