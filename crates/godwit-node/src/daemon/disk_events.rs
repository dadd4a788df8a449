//! Delivers the events of a disk's engine to the users of the disk.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use godwit_core::event::Event;

use crate::disks::Said;
use crate::disks::disk::Disk;
use crate::images;
use crate::migrations;
use crate::node::Node;
use crate::vms::lifecycle::room::{self, Still};

/// Passes an event of a disk's engine to migrations, images and VMs.
pub(crate) fn hear(
    node: Arc<Node>,
    disk: Arc<Disk>,
    said: Said,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        match said {
            Said::Started => {
                images::comparison::begin_to_know(&node, &disk, false);
                images::serving::start(&node, &disk);
            }
            Said::Core(event @ Event::ReceiveCompleted { .. }) => {
                migrations::handle_event(&node, &disk, event).await;
                images::comparison::begin_to_know(&node, &disk, true);
                images::serving::start(&node, &disk);
            }
            Said::Core(event @ (Event::Whole { .. } | Event::LeftImage { .. })) => {
                migrations::handle_event(&node, &disk, event).await;
                node.images.release();
            }
            Said::Core(event) => migrations::handle_event(&node, &disk, event).await,
            Said::Claimed(migration) => migrations::claimed(&node, &disk, migration).await,
            Said::ForwardDown => migrations::afterwards::forward::start(&node, &disk),
            Said::PullDown => migrations::afterwards::pulling::start_again(&node, &disk),
            Said::OutOfSpace => room::ran_out(&node, Still::Room(disk.name.clone())),
            Said::WaitsLong => room::ran_out(&node, Still::Missing(disk.name.clone())),
            Said::EngineFailed { migration, problem } => {
                migrations::engine_failed(&node, &disk, migration, &problem).await;
            }
        }
    })
}
