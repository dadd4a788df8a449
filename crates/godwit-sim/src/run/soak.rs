//! Runs of many seeds on all cores.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::bug::Bug;
use crate::plan::Plan;
use crate::run::report::Report;
use crate::world::{Outcome, Trace, Violation, World};

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs a plan; a panic is a violation like any other.
pub(crate) fn run(plan: Plan, trace: Option<Trace>, bug: Option<Bug>) -> Outcome {
    panics_as_violation(|| World::new(plan, trace, bug).run()).unwrap_or_else(|violation| Outcome {
        violation: Some(violation),
        ..Outcome::default()
    })
}

/// Calls `run`; a panic becomes a violation.
///
/// # Errors
/// The violation.
pub(crate) fn panics_as_violation<T>(run: impl FnOnce() -> T) -> Result<T, Violation> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::panicking() && PANIC.with_borrow(Option::is_some) {
                PANIC.with_borrow_mut(|message| *message = Some(panic.to_string()));
            } else {
                usual(panic);
            }
        }));
    });
    PANIC.set(Some(String::new()));
    let outcome = catch_unwind(AssertUnwindSafe(run));
    let message = PANIC.take();
    outcome.map_err(|_| Violation {
        claim: "nothing panics",
        detail: message.unwrap_or_default(),
    })
}

/// Runs a plan and returns the last events.
pub(crate) fn trace(plan: Plan, bug: Option<Bug>, lines: usize) -> (Outcome, Vec<String>) {
    let trace = Trace::new(lines);
    let outcome = run(plan, Some(trace.clone()), bug);
    (outcome, trace.take())
}

/// The seeds to run, and the settings of the runs.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// The first seed.
    pub first: u64,
    /// Number of seeds.
    pub seeds: u64,
    /// Number of threads.
    pub jobs: usize,
    /// Bug to plant into the controllers.
    pub bug: Option<Bug>,
}

/// Runs the seeds until one fails. Passes the number of completed runs to `progress` a few times a second.
pub fn soak(what: Soak, progress: impl Fn(u64) + Sync) -> Report {
    let next = AtomicU64::new(what.first);
    let end = what.first + what.seeds;
    let stop = AtomicBool::new(false);
    let total = Mutex::new(Report::default());
    let started = Instant::now();
    let work = || {
        let mut report = Report::default();
        let mut told = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                break;
            }
            report.add(seed, run(Plan::new(seed), None, what.bug));
            if report.failure.is_some() {
                stop.store(true, Ordering::Relaxed);
            }
            if told.elapsed() > Duration::from_millis(500) {
                told = Instant::now();
                progress(next.load(Ordering::Relaxed).min(end) - what.first);
            }
        }
        let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
        total.merge(report);
    };
    std::thread::scope(|scope| {
        for _ in 0..what.jobs.max(1) {
            scope.spawn(work);
        }
    });
    let mut report = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.elapsed = started.elapsed();
    report
}
