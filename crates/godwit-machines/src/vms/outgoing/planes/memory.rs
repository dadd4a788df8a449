//! The plane of a moving VM's memory, with the state of its devices: QEMU's own migration, through the nodes'
//! connection.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::broadcast;
use tokio::task::AbortHandle;

use crate::vms::memory::pooled;
use crate::vms::messages::{Answer, Order};
use crate::vms::outgoing::departure::{Departure, SourceLink};
use crate::vms::outgoing::planes::Plane;
use crate::vms::outgoing::planes::convergence::Convergence;
use crate::vms::outgoing::planes::rollback::{self, TakenBack};
use crate::vms::outgoing::preflight;
use crate::vms::tunnel;
use crate::vms::view::{memory_progress, pull, shared};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::failpoint;
use godwit_qemu::inspect::{self, Facts};
use godwit_qemu::machine::Machine;
use godwit_qemu::migration;
use godwit_qemu::monitor::qmp::QmpEvent;

/// Longest wait for the destination's QEMU to have all sent memory.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The plane of memory.
#[derive(Default)]
pub(in crate::vms::outgoing) struct Memory {
    /// The task that carries QEMU's migration to the other node.
    pub(in crate::vms::outgoing) tunnel: Option<AbortHandle>,
    /// The unread events of QEMU since the start of its migration.
    events: Option<broadcast::Receiver<QmpEvent>>,
    /// True if the guest runs, or would run without the move; `None` before the memory moves.
    ran: Option<bool>,
    /// The time of the guest's stop here.
    pub(in crate::vms::outgoing) stopped: Option<Instant>,
}

impl Memory {
    /// Returns true if the guest ran before the move stopped it.
    pub(in crate::vms::outgoing) fn ran(&self) -> bool {
        self.ran.unwrap_or(true)
    }

    async fn note_ran(&mut self, of: &Departure, ran: bool) -> Result<(), ErrorBody> {
        self.ran = Some(ran);
        of.store_ran(ran).await
    }

    /// Handles QEMU's report that the guest stopped or resumed: by the move, or by an operator's command.
    async fn stopped_or_resumed(
        &mut self,
        of: &Departure,
        event: &QmpEvent,
    ) -> Result<(), ErrorBody> {
        match event.name.as_str() {
            "STOP" => {
                self.stopped = Some(Instant::now());
                let state = inspect::run_state(&of.qemu.qmp).await;
                if state.is_ok_and(|state| state == "paused") {
                    self.note_ran(of, false).await?;
                }
            }
            "RESUME" => {
                self.stopped = None;
                self.note_ran(of, true).await?;
            }
            _ => {}
        }
        Ok(())
    }
}

impl Plane for Memory {
    fn preflight(_: &Departure, machine: &Machine, facts: &Facts) -> Vec<String> {
        preflight::memory_leaving(machine, facts)
    }

    /// Starts QEMU's migration through this node's connection to the other.
    async fn start(&mut self, of: &Departure) -> Result<(), ErrorBody> {
        let qmp = &of.qemu.qmp;
        self.events = Some(qmp.events());
        let state = inspect::run_state(qmp)
            .await
            .map_err(|error| of.error(ErrorCode::Conflict, &error))?;
        self.note_ran(of, inspect::is_live(&state)).await?;
        let (socket, carrying) = tunnel::lead(&of.vms, &of.vm, &of.peer, of.id).await?;
        let start = async {
            let mode = of.request.memory;
            migration::set_capabilities(qmp, pull(mode), shared(mode), true).await?;
            let bandwidth = of.vms.migrations.memory_bandwidth(of.id);
            migration::start(qmp, &socket, bandwidth).await
        };
        if let Err(error) = start.await {
            carrying.abort();
            return Err(of.error(ErrorCode::Internal, &error));
        }
        self.tunnel = Some(carrying);
        Ok(())
    }

    /// Waits until the guest stands still: earlier writes are sent again until then.
    async fn converged(&mut self, of: &Departure) -> Result<(), ErrorBody> {
        let mode = of.request.memory;
        let mut stops = of.qemu.qmp.events();
        let (vms, id) = (Arc::clone(&of.vms), of.id);
        let mut convergence = Convergence::default();
        let tell = |seen: &migration::Seen| {
            // Pulled memory need not be sent before the guest's stop.
            let asked = (!mode.pulls()).then(|| convergence.look(seen, Instant::now()));
            vms.migrations.change(id, |view| {
                view.memory = memory_progress(seen.progress);
                view.warnings.extend(asked.flatten());
            });
        };
        let qmp = of.qemu.qmp.clone();
        let mut events = self.events.take().unwrap_or_else(|| qmp.events());
        let copied = {
            let mut copying = pin!(migration::until_paused(&qmp, &mut events, pull(mode), tell));
            loop {
                tokio::select! {
                    copied = &mut copying => {
                        // The guest stood still a moment before QEMU's report.
                        self.stopped.get_or_insert_with(Instant::now);
                        break copied;
                    }
                    event = stops.recv() => if let Ok(event) = event {
                        self.stopped_or_resumed(of, &event).await?;
                    },
                }
            }
        };
        self.events = Some(events);
        copied.map_err(|error| of.error(ErrorCode::Conflict, &error))
    }

    async fn broken(&self, of: &Departure) -> ErrorBody {
        of.qemu.process.ended().await;
        of.error(ErrorCode::Conflict, &"its QEMU has ended")
    }

    /// Sends the rest: all of the memory with pre-copy, only the state of the devices if the rest is pulled.
    async fn freeze(
        &mut self,
        of: &Departure,
        destination: &mut SourceLink,
    ) -> Result<(), ErrorBody> {
        let failed = |error: &dyn std::fmt::Display| of.error(ErrorCode::Conflict, error);
        let qmp = &of.qemu.qmp;
        let seen = migration::look(qmp).await.map_err(|error| failed(&error))?;
        failpoint::reach(String::from("vm::pre-switchover")).await;
        if seen.status == "pre-switchover" {
            migration::go_on(qmp)
                .await
                .map_err(|error| failed(&error))?;
        }
        let (vms, id) = (Arc::clone(&of.vms), of.id);
        let tell = |seen: &migration::Seen| {
            if seen.progress.bytes_total > 0 {
                vms.migrations
                    .change(id, |view| view.memory = memory_progress(seen.progress));
            }
        };
        let did_not = "did not take the memory";
        let runs = self.ran();
        let events = self.events.get_or_insert_with(|| qmp.events());
        destination.say(Order::Load { runs }).await;
        let mut loaded = false;
        {
            // Until this report QEMU may still fail, and would then resume the guest by itself, even if the destination
            // has everything.
            let sent = if of.request.memory.pulls() {
                ["completed", migration::PULLING].as_slice()
            } else {
                &["completed"]
            };
            let mut sending = pin!(migration::wait_for(qmp, events, sent, tell));
            loop {
                tokio::select! {
                    sent = &mut sending => {
                        sent.map_err(|error| failed(&error))?;
                        break;
                    }
                    answer = destination.hear() => match answer {
                        Some(Answer::Loaded) if !loaded => loaded = true,
                        other => return Err(of.unwilling(other, did_not)),
                    },
                }
            }
        }
        if loaded {
            return Ok(());
        }
        let broken = async {
            match migration::wait_for(qmp, events, &["completed"], tell).await {
                Ok(()) => std::future::pending().await,
                Err(error) => error,
            }
        };
        tokio::select! {
            error = broken => Err(failed(&error)),
            answer = destination.hear_within(LOAD_TIMEOUT) => match answer {
                Some(Answer::Loaded) => Ok(()),
                other => Err(of.unwilling(other, did_not)),
            },
        }
    }

    async fn take_back(&mut self, of: &Departure) {
        let entry = of.vm.lock().entry.clone();
        pooled::keep(&of.vms, &of.vm.name, &entry);
        let Some(ran) = self.ran else { return };
        if let Err(error) = pooled::may_run(&of.vms, &of.vm) {
            tracing::error!(vm = of.vm.name, %error, "the guest does not go on");
            of.vm.lock().problem = Some(error.message);
            return;
        }
        match rollback::take_back(&of.vm, &of.qemu.qmp, ran).await {
            Ok(TakenBack::AsBefore) => {}
            Ok(TakenBack::Bound) => of.warn(format!("the guest goes on, but {}", rollback::BOUND)),
            Err(error) => {
                tracing::error!(vm = of.vm.name, %error, "the guest does not go on");
                of.vm.lock().problem = Some(format!("the guest does not go on: {error}"));
            }
        }
    }

    async fn clear(&mut self, _: &Departure) {
        if let Some(tunnel) = self.tunnel.take() {
            tunnel.abort();
        }
    }
}
