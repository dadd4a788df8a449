//! The context of an engine's parts.

use std::io;

use godwit_core::Controller;
use godwit_core::request::Request;
use godwit_core::units::Time;

use crate::engine::config::{EngineConfig, EngineError, EngineEvent};
use crate::engine::priority::Priority;
use crate::engine::stats::Stats;

/// The state that the parts of an engine share: parameters, controller, counts, the time, and the way to the owner.
pub(super) struct Context {
    pub(super) config: EngineConfig,
    pub(super) core: Controller,
    pub(super) stats: Stats,
    pub(super) priority: Priority,
    /// Time of the current turn.
    pub(super) now: Time,
    /// Latest time of the engine's end.
    pub(super) shutdown: Option<Time>,
    pub(super) events: Box<dyn Fn(EngineEvent) + Send>,
}

impl Context {
    /// Passes the controller a request of a front end or of a forwarding node.
    pub(super) fn take_request(&mut self, request: Request) {
        self.core.handle_request(self.now, request);
        self.stats.under_way(self.core.requests_in_flight());
    }

    /// Adapts the thread's priority: higher while the disk leaves.
    pub(super) fn follow_priority(&mut self) {
        if let Err(error) = self.priority.follow(self.core.is_leaving()) {
            let disk = &self.config.disk;
            tracing::debug!(disk, "moves while it runs like other threads: {error}");
        }
    }

    /// Calls the owner's callback.
    pub(super) fn tell(&self, event: EngineEvent) {
        (self.events)(event);
    }

    /// Returns true once the engine is to end.
    pub(super) const fn is_ending(&self) -> bool {
        self.shutdown.is_some()
    }

    pub(super) fn failure(&self, action: &str, source: &io::Error) -> EngineError {
        let disk = self.config.disk.clone();
        EngineError::Failed {
            disk,
            cause: format!("cannot {action}: {source}"),
        }
    }
}
