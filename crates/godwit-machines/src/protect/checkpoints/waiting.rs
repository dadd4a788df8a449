//! The QEMU at the backup that waits with the memory of a protected machine, and lets the machine go on.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::store::machine::{VmMark, VmOrigin};
use godwit_context::{blocking, failpoint};
use godwit_qemu::inspect;
use godwit_qemu::machine::Places;
use godwit_qemu::migration::device_state;
use godwit_qemu::process::Process;
use godwit_qemu::version::Version;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::memory::GuestMemory;
use super::receiving::Image;
use crate::vms::Vms;
use crate::vms::incoming;
use crate::vms::lifecycle::{run, taken};
use crate::vms::messages::MachineOffer;
use crate::vms::outgoing::planes::nics::announce_cards;
use crate::vms::vm::{Qemu, Vm, VmGuard};

/// Longest time for QEMU to load the state of its devices.
const LOADS: Duration = Duration::from_secs(10);
/// Time between two looks at the loading QEMU.
const LOOK: Duration = Duration::from_millis(1);

/// A QEMU that waits for the state of processors and devices.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    /// The machine, which is not in the node's table.
    pub(in crate::protect) vm: Arc<Vm>,
    qemu: Qemu,
    pub(in crate::protect) memory: Arc<GuestMemory>,
    /// The machine type with its version.
    machine_type: String,
}

impl Waiting {
    /// Starts a QEMU with the machine's disks and NICs, whose rings stand still. Dropping the future ends the QEMU.
    ///
    /// # Errors
    /// QEMU does not start, or its memory cannot be written by this node.
    pub(in crate::protect) async fn start(
        vms: &Arc<Vms>,
        name: &str,
        (id, from): (&str, &str),
        offer: MachineOffer,
    ) -> Result<Self, ErrorBody> {
        let refused = |why: String| {
            let text = format!("VM {name} cannot be protected by checkpoints: {why}");
            ErrorBody::new(ErrorCode::Conflict, text)
        };
        let Some(machine_type) = offer.machine_type.clone() else {
            return Err(refused(String::from("its machine type is not known")));
        };
        let origin = VmOrigin::Received {
            from: from.to_owned(),
        };
        // As a machine that arrives by a move: its NICs drop the packets of their uplinks.
        let mark = VmMark::Incoming {
            migration: id.to_owned(),
            pulls: false,
            runs: true,
        };
        let machine = (offer.id.clone(), offer.epoch);
        let entry = run::entry(
            vms,
            name,
            offer.machine.clone(),
            machine,
            (origin, mark),
            None,
        )?;
        let vm = Vm::new(&vms.context.config, name.to_owned(), entry);
        end_left(vms, name).await;
        let bytes = offer.memory_bytes;
        let qemu = incoming::start(vms, &vm, offer).await?;
        let pid = qemu.process.pid;
        let found = blocking(move || GuestMemory::of(pid, bytes)).await?;
        match found {
            Ok(memory) => Ok(Self {
                vm,
                qemu,
                memory: Arc::new(memory),
                machine_type,
            }),
            Err(why) => {
                qemu.process.kill().await;
                Err(refused(why))
            }
        }
    }

    /// Ends the QEMU.
    pub(in crate::protect) async fn end(self) {
        self.qemu.process.kill().await;
    }

    /// Waits until the QEMU has ended by itself.
    pub(in crate::protect) async fn ended(&self) {
        self.qemu.process.ended().await;
    }

    /// Lets the machine go on from a checkpoint, once its disks are this node's. A machine that cannot go on is started
    /// anew, as after a power failure at the time of the checkpoint.
    pub(in crate::protect) async fn go_on(self, vms: Arc<Vms>, image: Image, guard: VmGuard) {
        let vm = Arc::clone(&self.vm);
        let number = image.number;
        let goes_on = match self.load(&image).await {
            Ok(()) => self.run(&vms).await,
            Err(why) => Err(why),
        };
        match goes_on {
            Ok(()) => {
                tracing::warn!(vm = vm.name, %number, "the VM goes on here from its last checkpoint");
                drop(guard);
            }
            Err(why) => {
                tracing::error!(vm = vm.name, %number, why, "the VM cannot go on from its checkpoint, and is started anew");
                self.end().await;
                while vm.lock().qemu.is_some() {
                    tokio::time::sleep(LOOK).await;
                }
                taken::start(vms, vm, guard).await;
            }
        }
    }

    async fn load(&self, image: &Image) -> Result<(), String> {
        let stream = device_state::to_load(&image.state, &self.machine_type);
        let stream = stream.map_err(|error| error.to_string())?;
        let socket = UnixStream::connect(self.vm.places.incoming()).await;
        let mut socket = socket.map_err(|error| format!("QEMU does not wait: {error}"))?;
        let sent = async {
            socket.write_all(&stream).await?;
            socket.shutdown().await
        };
        match tokio::time::timeout(LOADS, sent).await {
            Ok(sent) => sent.map_err(|error| format!("QEMU takes no state: {error}"))?,
            Err(_) => return Err(String::from("QEMU takes no state")),
        }
        let until = Instant::now() + LOADS;
        loop {
            let state = inspect::run_state(&self.qemu.qmp).await;
            match state.map_err(|error| error.to_string())? {
                state if state != inspect::AWAITS_MEMORY => break,
                _ if Instant::now() >= until => {
                    return Err(String::from("QEMU does not load the state"));
                }
                _ => tokio::time::sleep(LOOK).await,
            }
        }
        failpoint::reach(String::from("checkpoint::loaded")).await;
        Ok(())
    }

    /// Lets the loaded guest run.
    async fn run(&self, vms: &Arc<Vms>) -> Result<(), String> {
        let vm = &self.vm;
        let entry = {
            let mut inner = vm.lock();
            inner.entry.mark = None;
            inner.entry.clone()
        };
        // Before the guest runs: a node that starts again would start the machine anew, and clients have seen what the
        // guest has done since.
        if let Err(error) = vms.context.store.put_vm(&vm.name, &entry).await {
            return Err(format!("it cannot be stored: {error}"));
        }
        failpoint::reach(String::from("checkpoint::stored")).await;
        // The network is told first: the guest's packets would tell the network, too.
        let nics = vm.lock().nics.clone();
        for (number, nic) in nics.iter().enumerate() {
            let announced = nic
                .ask(|device, reply| device.take_over(false, reply))
                .await;
            if announced.is_none() {
                tracing::error!(vm = vm.name, number, "a NIC has no network");
            }
        }
        let goes_on = self.qemu.qmp.execute("cont", json!({})).await;
        goes_on.map_err(|error| error.to_string())?;
        announce_cards(&vm.name, &entry.machine, &self.qemu);
        Ok(())
    }
}

/// Returns the blocker of an offered machine whose QEMU is not that of this node. The state would be loaded here by one
/// QEMU, and by the other one after the way back.
pub(in crate::protect) async fn other_qemu(vms: &Vms, offer: &MachineOffer) -> Option<String> {
    let user = vms.context.config.qemu_user.as_ref();
    let own = Version::of(&offer.machine.program, user).await;
    let here = &vms.context.config.name;
    let (own, theirs) = match own {
        Ok(own) => (own, Version(offer.qemu)),
        Err(why) => return Some(format!("node '{here}': {why}")),
    };
    // Later releases of one version load each other's states.
    let series = |Version([major, minor, _]): Version| [major, minor];
    (series(own) != series(theirs)).then(|| {
        format!("node '{here}' has QEMU {own}, and the VM runs in QEMU {theirs}: checkpoints need the same version")
    })
}

/// Ends a QEMU that an earlier process of this node let wait for a machine.
pub(in crate::protect) async fn end_left(vms: &Arc<Vms>, name: &str) {
    let places = Places {
        folder: vms.context.config.vms_dir().join(name),
    };
    let user = vms.context.config.qemu_user.clone();
    let left = blocking(move || Process::started_in(&places, user.as_ref())).await;
    if let Ok(Some(process)) = left {
        tracing::info!(
            vm = name,
            pid = process.pid,
            "ends a QEMU that waited for the VM"
        );
        process.kill().await;
    }
}
