//! Destination: a guest that runs here while the rest of its memory is at the source.
//!
//! Nothing decides any more where the guest runs: it is here, and the source's QEMU is nothing but
//! the rest of its memory. Both QEMUs keep what they have when their connection breaks, and the guest
//! stands still where it needs a page that is missing. So a connection is as good as the next: the
//! source makes new ones until this QEMU has everything (see `post_copy_source.rs`), and this node, also after a
//! restart, lets it in whenever QEMU has noticed that the last one is broken. Only the source's word
//! that the rest is gone ends the guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::units::MigrationId;
use tokio::task::AbortHandle;

use crate::disks::vhost::Held;
use crate::node::Node;
use crate::vms::incoming::arrival::{DestinationLink, hear};
use crate::vms::incoming::pour;
use crate::vms::messages::{Answer, Order};
use crate::vms::tunnel::OpenDoor;
use crate::vms::vm::{Vm, VmActivity};
use godwit_qemu::migration::{self, PULL_BROKEN, PULLING};
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::process::{Process, cut_log};

/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(100);
/// How long QEMU may take to notice by itself that its connection is broken.
const NOTICE: Duration = Duration::from_secs(1);
/// How long it may take at all to be ready for another.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(8);
/// How long what was sent may take to arrive once the source's QEMU has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A guest that pulls its memory.
pub(crate) struct Pulling<'a> {
    node: &'a Arc<Node>,
    vm: &'a Arc<Vm>,
    process: Arc<Process>,
    door: OpenDoor<'a>,
    link: Option<DestinationLink>,
    /// The task that carries the memory.
    carrying: Option<AbortHandle>,
    /// QEMU waits for a connection in place of the broken one.
    listens: bool,
    /// Its disks, if they must wait.
    held: Option<Held>,
}

impl<'a> Pulling<'a> {
    /// A guest that has just been let run.
    pub(crate) fn new(
        (node, vm): (&'a Arc<Node>, &'a Arc<Vm>),
        process: Arc<Process>,
        door: OpenDoor<'a>,
        link: Option<DestinationLink>,
        carrying: Option<AbortHandle>,
        held: Option<Held>,
    ) -> Self {
        Self {
            node,
            vm,
            process,
            door,
            link,
            carrying,
            listens: false,
            held,
        }
    }

    /// A guest that ran here while the node was away.
    pub(crate) fn found(
        (node, vm): (&'a Arc<Node>, &'a Arc<Vm>),
        process: Arc<Process>,
        (migration, from): (MigrationId, &str),
        held: Option<Held>,
    ) -> Self {
        let door = node.memory_doors.open(migration, from);
        Self::new((node, vm), process, door, None, None, held)
    }

    /// Sees to it that the rest arrives. Returns early when the node ends: QEMU waits for the next.
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
                // QEMU goes on asking the node that died for page faults, and complains each time.
                cut_log(&self.vm.places.log());
            }
            if self.link.is_none() {
                // The source makes both anew.
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
                () = self.node.closed() => return,
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
        // Those of earlier attempts lead nowhere.
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
                // That there is nothing to break is what the next attempt shows.
                let _ = migration::break_off(&monitor).await;
            }
            tokio::time::sleep(POLL).await;
        }
        // The source tries again.
        self.link = None;
    }

    /// The source's QEMU has ended: whether all had been sent before.
    async fn arrived_all_the_same(&self) -> bool {
        let began = Instant::now();
        loop {
            match self.status().await.as_deref() {
                Some("completed") => return true,
                Some(PULLING) if began.elapsed() < LAST_WORDS => {
                    tokio::time::sleep(POLL).await;
                }
                Some(PULL_BROKEN | PULLING) => return false,
                // A hanging monitor is a guest that waits for what does not come.
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

    /// The rest will not come: the guest cannot go on.
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

    /// Nothing is under way any more.
    async fn end(self, problem: Option<String>, answer: Answer) {
        let entry = {
            let mut inner = self.vm.lock();
            inner.entry.mark = None;
            if problem.is_some() {
                inner.problem = problem;
            }
            // Whoever stops it forgets it.
            (inner.activity != VmActivity::Stopping).then(|| inner.entry.clone())
        };
        let kept = self.node.vms.find(&self.vm.name);
        if let Some(entry) = entry
            && kept.is_some_and(|kept| Arc::ptr_eq(&kept, self.vm))
            && let Err(error) = self.node.store.put_vm(&self.vm.name, &entry).await
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
