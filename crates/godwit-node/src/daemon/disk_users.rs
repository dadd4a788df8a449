//! Connects disks and NICs with their users, which disks and NICs do not know.

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::{Arc, Weak};

use godwit_core::event::Event;

use crate::node::Node;
use godwit_context::store::BaseImage;
use godwit_disks::disks::disk::Disk;
use godwit_disks::disks::{DiskUsers, Said, Standing};
use godwit_disks::images;
use godwit_disks::migrations;
use godwit_machines::nics::named::{MachineNics, NicUsers};
use godwit_machines::protect;
use godwit_machines::vms::Vms;
use godwit_machines::vms::lifecycle::room::{self, Still};
use godwit_machines::vms::vm::Vm;

/// Tells disks and NICs of their users. Must be called before the first disk starts.
pub(crate) fn connect(node: &Arc<Node>) {
    let users = Users(Arc::downgrade(node));
    node.disks.set_users(Box::new(users));
    let machines = Machines(Arc::downgrade(&node.vms));
    node.nics.set_users(Box::new(machines));
}

/// The node's moves, images and machines. The reference is weak because they refer to the disks.
#[derive(Debug)]
struct Users(Weak<Node>);

impl DiskUsers for Users {
    fn handle(&self, disk: Arc<Disk>, said: Said) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        match self.0.upgrade() {
            Some(node) => Box::pin(handle(node, disk, said)),
            None => Box::pin(ready(())),
        }
    }

    fn machine_with(&self, disk: &str) -> Option<String> {
        self.0.upgrade()?.vms.user_of(disk, None)
    }

    fn arrives_with_machine(&self, disk: &str) -> bool {
        let node = self.0.upgrade();
        node.is_some_and(|node| node.vms.receiving().contains(disk))
    }

    fn standing(&self, disk: &str, base: &BaseImage, fetching: bool) -> Standing {
        let told = self.0.upgrade();
        let told = told.and_then(|node| node.images.told(disk, base));
        Standing {
            unnoted: told.as_ref().is_some_and(|told| !told.is_noted()),
            warning: told.and_then(|told| told.warning(&base.image, fetching)),
        }
    }

    fn removed(&self) {
        if let Some(node) = self.0.upgrade() {
            node.images.release();
        }
    }
}

#[derive(Debug)]
struct Machines(Weak<Vms>);

impl NicUsers for Machines {
    fn nics(&self) -> Vec<MachineNics> {
        let vms = self.0.upgrade().map(|vms| vms.all()).unwrap_or_default();
        let nics = |vm: &Arc<Vm>| {
            let inner = vm.lock();
            MachineNics {
                vm: vm.name.clone(),
                is_here: inner.holds_disks(),
                nics: inner.entry.machine.nics.clone(),
                served: inner.nics.clone(),
            }
        };
        vms.iter().map(nics).collect()
    }

    fn machine_with(&self, nic: &str) -> Option<String> {
        self.0.upgrade()?.user_of_nic(nic)
    }
}

/// Passes an event of a disk's engine to migrations, images and VMs.
async fn handle(node: Arc<Node>, disk: Arc<Disk>, said: Said) {
    let event = match &said {
        Said::Core(event) => Some(event.clone()),
        _ => None,
    };
    pass(&node, &disk, said).await;
    // The protection finds the migration as the event leaves it.
    if let Some(event) = event {
        protect::disk_event(&node.vms, &disk.name, &event).await;
    }
}

async fn pass(node: &Arc<Node>, disk: &Arc<Disk>, said: Said) {
    match said {
        Said::Started => {
            images::comparison::begin_to_know(&node.images, disk, false);
            images::serving::start(&node.images, disk);
        }
        Said::Core(event @ Event::ReceiveCompleted { .. }) => {
            migrations::handle_event(&node.migrations, disk, event).await;
            images::comparison::begin_to_know(&node.images, disk, true);
            images::serving::start(&node.images, disk);
        }
        Said::Core(event @ (Event::Whole { .. } | Event::LeftImage { .. })) => {
            migrations::handle_event(&node.migrations, disk, event).await;
            node.images.release();
        }
        Said::Core(event) => migrations::handle_event(&node.migrations, disk, event).await,
        Said::Claimed(migration) => migrations::claimed(&node.migrations, disk, migration).await,
        Said::ForwardDown => migrations::afterwards::forward::start(&node.migrations, disk),
        Said::PullDown => migrations::afterwards::pulling::start_again(&node.migrations, disk),
        Said::OutOfSpace => room::ran_out(&node.vms, Still::Room(disk.name.clone())),
        Said::WaitsLong => room::ran_out(&node.vms, Still::Missing(disk.name.clone())),
        Said::EngineFailed { migration, problem } => {
            migrations::engine_failed(&node.migrations, disk, migration, &problem).await;
        }
    }
}
