//! The writes that a backup keeps apart from its disk until their checkpoint is whole.

use godwit_core::action::{Content, DiskOperation, DiskTag};
use godwit_core::request::RequestError;

use crate::world::World;
use crate::world::node::KeptWrite;

impl World {
    /// Keeps a write apart.
    pub(crate) fn keep(&mut self, node: usize, tag: DiskTag, operation: DiskOperation) {
        let it = &mut self.nodes[node];
        let (operation, epoch, data) = match operation {
            DiskOperation::Keep { extent, epoch } => {
                let write = DiskOperation::Write { extent, fua: false };
                (write, epoch, it.buffers.to_write(tag))
            }
            DiskOperation::KeepZeroes {
                extent,
                unmap,
                epoch,
            } => {
                let fua = false;
                (
                    DiskOperation::WriteZeroes { extent, fua, unmap },
                    epoch,
                    None,
                )
            }
            _ => return,
        };
        let result = match it.disk.fails(&operation, self.now) {
            Some(error) => Err(error),
            None => {
                it.kept.push(KeptWrite {
                    epoch,
                    operation,
                    data,
                });
                Ok(Content::Data)
            }
        };
        let now = it.clock.local(self.now);
        if let Some(controller) = &mut it.controller {
            controller.handle_disk_done(now, tag, result);
        }
    }

    /// Applies the kept writes up to this epoch, one at a time.
    pub(crate) fn apply_kept(&mut self, node: usize, through: u64) {
        self.nodes[node].kept.begin(through);
        self.schedule_own(node, 1, move |world| world.apply_next(node));
    }

    fn apply_next(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let Some(write) = it.kept.next() else {
            return self.kept_applied(node, Ok(()));
        };
        let error = it.disk.fails(&write.operation, self.now);
        let disk = &mut self.random.disk;
        let latency = it.disk.latency(&write.operation, self.now, disk);
        self.schedule_own(node, latency, move |world| {
            let KeptWrite {
                operation, data, ..
            } = &write;
            let disk = &mut world.nodes[node].disk;
            match error {
                Some(error) => {
                    disk.tear(operation, data, &mut world.random.disk);
                    world.kept_applied(node, Err(error));
                }
                None => {
                    disk.store(operation, data);
                    world.apply_next(node);
                }
            }
        });
    }

    fn kept_applied(&mut self, node: usize, result: Result<(), RequestError>) {
        self.nodes[node].kept.end();
        self.with(node, |c, now| c.handle_kept_applied(now, result));
    }
}
