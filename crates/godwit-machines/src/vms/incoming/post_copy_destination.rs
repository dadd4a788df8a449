//! Destination: a guest running here while the rest of the memory is at the source.
//!
//! The guest's place is final: the guest is here, and the source's QEMU only holds the rest of the memory. Both QEMUs
//! keep their memory when their connection breaks, and the guest stands still where it needs a missing page. So one
//! connection is as good as the next: the source makes new ones until this QEMU has everything (see
//! `post_copy_source.rs`). This node, also after a restart, accepts a connection whenever QEMU has noticed the end of
//! the last one. The guest ends only on the source's word about the loss of the rest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::units::MigrationId;
use tokio::task::AbortHandle;

use crate::vms::Vms;
use crate::vms::incoming::arrival::{DestinationLink, hear};
use crate::vms::incoming::pour;
use crate::vms::messages::{Answer, Order};
use crate::vms::tunnel::OpenDoor;
use crate::vms::vm::{Vm, VmActivity};
use godwit_disks::disks::vhost::Held;
use godwit_qemu::migration::{self, PULL_BROKEN, PULLING};
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::process::{Process, cut_log};

/// Time between two queries of QEMU's progress.
const POLL: Duration = Duration::from_millis(100);
/// Time for QEMU to notice the broken connection by itself.
const NOTICE: Duration = Duration::from_secs(1);
/// Longest wait for QEMU to be ready for another connection.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(8);
/// Time for sent memory to arrive once the source's QEMU has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A guest pulling memory from the source.
pub(crate) struct Pulling<'a> {
    vms: &'a Arc<Vms>,
    vm: &'a Arc<Vm>,
    process: Arc<Process>,
    door: OpenDoor<'a>,
    link: Option<DestinationLink>,
    /// The task carrying the memory.
    carrying: Option<AbortHandle>,
    /// True while QEMU waits for a connection in place of the broken one.
    listens: bool,
    /// The hold on the VM's disks, if they must wait.
    held: Option<Held>,
}

impl<'a> Pulling<'a> {
    /// Returns a guest resumed just now.
    pub(crate) fn new(
        (vms, vm): (&'a Arc<Vms>, &'a Arc<Vm>),
        process: Arc<Process>,
        door: OpenDoor<'a>,
        link: Option<DestinationLink>,
        carrying: Option<AbortHandle>,
        held: Option<Held>,
    ) -> Self {
        Self {
            vms,
            vm,
            process,
            door,
            link,
            carrying,
            listens: false,
            held,
        }
    }

    /// Returns a guest found running after a restart of the node.
    pub(crate) fn found(
        (vms, vm): (&'a Arc<Vms>, &'a Arc<Vm>),
        process: Arc<Process>,
        (migration, from): (MigrationId, &str),
        held: Option<Held>,
    ) -> Self {
        let door = vms.memory_doors.open(migration, from);
        Self::new((vms, vm), process, door, None, None, held)
    }

    /// Receives the rest of the memory. Returns early when the node closes: QEMU waits for the next run of the node.
    pub(crate) async fn run(mut self) {
        loop {
            match self.status().await.as_deref() {
                Some("completed") => {
                    tracing::info!(vm = self.vm.name, "all of the VM's memory is here");
                    return self.end(None, Answer::Pulled).await;
                }
                Some("failed") => return self.lose("QEMU cannot go on receiving it").await,
                _ => {}
            }
            if self.held.is_some() {
                // QEMU still sends page faults to the dead node, and logs each failure.
                cut_log(&self.vm.places.log());
            }
            if self.link.is_none() {
                // The source makes both connections anew.
                self.hang_up();
            }
            tokio::select! {
                order = hear(&mut self.link) => match order {
                    Some(Order::Lost { reason }) => {
                        if !self.arrived_all_the_same().await {
                            return self.lose(&reason).await;
                        }
                    }
                    Some(_) => {}
                    None => self.link = None,
                },
                Some((link, order)) = self.door.returned.recv() => {
                    self.link = Some(link);
                    match order {
                        Order::Lost { reason } if !self.arrived_all_the_same().await => {
                            return self.lose(&reason).await;
                        }
                        Order::Resume => self.listen_again().await,
                        _ => {}
                    }
                }
                Some(memory) = self.door.arrivals.recv() => {
                    if std::mem::take(&mut self.listens) {
                        self.carrying = Some(pour(self.vm, memory, self.vm.places.recovering()));
                    }
                }
                () = self.process.ended() => {
                    let why = String::from("its QEMU has ended");
                    return self.end(None, Answer::Failed(why)).await;
                }
                () = self.vms.context.closed() => return,
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    fn qmp(&self) -> Option<Qmp> {
        self.vm.lock().qemu.as_ref().map(|qemu| qemu.qmp.clone())
    }

    async fn status(&self) -> Option<String> {
        let seen = migration::look(&self.qmp()?).await;
        seen.ok().map(|seen| seen.status)
    }

    fn hang_up(&mut self) {
        if let Some(carrying) = self.carrying.take() {
            carrying.abort();
        }
    }

    /// Makes QEMU wait for a connection in place of the broken one, and tells the source.
    async fn listen_again(&mut self) {
        self.hang_up();
        self.listens = false;
        // Connections of earlier attempts lead nowhere.
        while self.door.arrivals.try_recv().is_ok() {}
        let socket = self.vm.places.recovering();
        let began = Instant::now();
        let mut told = false;
        while began.elapsed() < LISTEN_TIMEOUT {
            let Some(monitor) = self.vm.monitor() else {
                break;
            };
            let Err(error) = migration::listen_again(&monitor, &socket).await else {
                tracing::info!(vm = self.vm.name, "waits for the rest of its memory");
                self.listens = true;
                return self.say(Answer::Ready).await;
            };
            if self.status().await.as_deref() == Some("completed") {
                return;
            }
            tracing::debug!(vm = self.vm.name, %error, "QEMU does not wait for memory yet");
            if !told && began.elapsed() >= NOTICE {
                told = true;
                // The next attempt shows a failure to break off.
                let _ = migration::break_off(&monitor).await;
            }
            tokio::time::sleep(POLL).await;
        }
        // The source tries again.
        self.link = None;
    }

    /// Returns true if all memory was sent before the source's QEMU ended.
    async fn arrived_all_the_same(&self) -> bool {
        let began = Instant::now();
        loop {
            match self.status().await.as_deref() {
                Some("completed") => return true,
                Some(PULLING) if began.elapsed() < LAST_WORDS => {
                    tokio::time::sleep(POLL).await;
                }
                Some(PULL_BROKEN | PULLING) => return false,
                // Behind a silent monitor the guest waits for a missing page.
                _ if began.elapsed() >= LAST_WORDS => return false,
                _ => tokio::time::sleep(POLL).await,
            }
        }
    }

    async fn say(&self, answer: Answer) {
        if let Some(link) = &self.link {
            link.say(answer).await;
        }
    }

    /// Ends the guest, which cannot go on without the rest of the memory.
    async fn lose(self, reason: &str) {
        tracing::error!(
            vm = self.vm.name,
            reason,
            "the rest of the VM's memory did not arrive"
        );
        let why = format!(
            "the rest of its memory did not arrive ({reason}); its disks are here: start it anew"
        );
        self.vm.lock().ended_for = Some(why.clone());
        self.process.kill().await;
        self.end(Some(why.clone()), Answer::Failed(why)).await;
    }

    /// Ends the pull, and clears the mark.
    async fn end(self, problem: Option<String>, answer: Answer) {
        let entry = {
            let mut inner = self.vm.lock();
            inner.entry.mark = None;
            if problem.is_some() {
                inner.problem = problem;
            }
            // A stop forgets its VM by itself.
            (inner.activity != VmActivity::Stopping).then(|| inner.entry.clone())
        };
        let kept = self.vms.find(&self.vm.name);
        if let Some(entry) = entry
            && kept.is_some_and(|kept| Arc::ptr_eq(&kept, self.vm))
            && let Err(error) = self.vms.context.store.put_vm(&self.vm.name, &entry).await
        {
            // A restart would find the mark, and come to the same end.
            tracing::error!(vm = self.vm.name, %error, "cannot store the VM");
        }
        drop(self.held);
        if let Some(link) = &self.link {
            link.say(answer).await;
        }
    }
}
