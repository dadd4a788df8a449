//! Orders to disks that migrate, above all to disks that stay at their node and are followed at another one.

use std::sync::Arc;

use godwit_block::engine::EngineHandle;
use godwit_core::event::AbortReason;
use godwit_core::units::Epoch;
use godwit_vhost::memory::written::WrittenPages;
use tokio::sync::oneshot;

use crate::disks::disk::Disk;
use crate::disks::group::SwitchGroup;

/// Source: no request is answered until [`go_alone`] or [`yield_to`], also by an engine that starts later.
pub fn hold(disk: &Disk) {
    let mut inner = disk.lock();
    inner.held = true;
    if let Some(engine) = &inner.engine {
        engine.handle.hold();
    }
}

/// Source: ends the migration, if any, and answers all requests.
pub fn go_alone(disk: &Disk) {
    let mut inner = disk.lock();
    inner.held = false;
    if let Some(engine) = &inner.engine {
        engine.handle.go_alone();
    }
}

/// Source: another node owns the disk in this epoch. Returns true if this node stores that.
pub async fn yield_to(disk: &Disk, epoch: Epoch) -> bool {
    let yields = asked(disk, |engine, reply| engine.yield_to(epoch, reply)).await;
    if yields {
        disk.lock().held = false;
    }
    yields
}

/// Source: ends the epoch of a checkpoint of the machine. Returns true if the writes of the epoch are on their way to the
/// node that follows, which has all checkpoints up to `whole`.
pub async fn mark_checkpoint(disk: &Disk, number: u64, whole: u64) -> bool {
    asked(disk, |engine, reply| {
        engine.mark_checkpoint(number, whole, reply);
    })
    .await
}

/// Destination: applies the writes of a whole checkpoint, and of all before. Returns false unless the disk follows, with
/// these writes here.
pub async fn apply_checkpoints(disk: &Disk, number: u64) -> bool {
    asked(disk, |engine, reply| {
        engine.apply_checkpoints(number, reply);
    })
    .await
}

/// Destination: takes nothing more of the source. Returns true if the disk follows here.
pub async fn sever(disk: &Disk) -> bool {
    asked(disk, EngineHandle::sever).await
}

/// Destination, after [`sever`]: owns the disk, together with the other disks of the group. With checkpoints the disk is as
/// of the last one that was to be [applied](apply_checkpoints). Returns false if no disk follows here, or none was.
pub async fn take(disk: &Disk, group: &Arc<SwitchGroup>) -> bool {
    {
        let mut inner = disk.lock();
        inner.group = Some(Arc::clone(group));
        inner.held = false;
    }
    asked(disk, EngineHandle::take).await
}

/// Cancels the migration in the disk's engine. Returns false if the disk is already given away, or the engine has
/// ended.
pub async fn give_up(disk: &Disk) -> bool {
    asked(disk, |engine, reply| {
        engine.cancel(AbortReason::Cancelled, reply);
    })
    .await
}

/// Returns the answer of the disk's engine; false without an engine.
async fn asked(
    disk: &Disk,
    order: impl FnOnce(&EngineHandle, Box<dyn FnOnce(bool) + Send>),
) -> bool {
    let Some(engine) = disk.engine() else {
        return false;
    };
    let (reply, answer) = oneshot::channel();
    let reply = move |said| {
        // The caller may be gone.
        let _ = reply.send(said);
    };
    order(&engine, Box::new(reply));
    answer.await.unwrap_or(false)
}

/// Source: logs the pages of the guest's memory that the disk's engine writes from now on, or ends the log. Returns false if
/// the disk has no engine, or the engine has ended.
pub async fn log_writes(disk: &Disk, pages: Option<Arc<WrittenPages>>) -> bool {
    let (reply, answer) = oneshot::channel();
    {
        let inner = disk.lock();
        let Some(engine) = &inner.engine else {
            return false;
        };
        let reply = Box::new(move |()| {
            let _ = reply.send(());
        });
        engine.handle.log_writes(pages, reply);
    }
    answer.await.is_ok()
}
