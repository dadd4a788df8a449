//! Cuts a failing run down to the decisions needed to fail.

use crate::bug::Bug;
use crate::plan::{Moment, Plan, Trigger};
use crate::run::soak::{run, trace};
use crate::world::Violation;

/// Most runs spent on one failure.
const MOST_RUNS: u32 = 1_500;

/// The smallest failing run found, with its trace.
#[derive(Debug)]
pub struct Reproduction {
    /// The violated invariant.
    pub violation: Violation,
    /// The remaining decisions.
    pub plan: String,
    /// The last events of the run.
    pub trace: Vec<String>,
    /// True if two runs of the same plan were equal.
    pub repeatable: bool,
}

/// Runs a seed again. A failing run is cut down (unless `whole`) and returned with the last `lines` events.
pub fn reproduce(seed: u64, bug: Option<Bug>, whole: bool, lines: usize) -> Option<Reproduction> {
    let plan = Plan::new(seed);
    let first = run(plan.clone(), None, bug).violation?;
    let smallest = if whole {
        plan
    } else {
        shrink(plan, &first, bug)
    };
    let again = run(smallest.clone(), None, bug);
    let (outcome, trace) = trace(smallest.clone(), bug, lines);
    Some(Reproduction {
        violation: outcome.violation?,
        plan: describe(&smallest),
        trace,
        repeatable: again.fingerprint == outcome.fingerprint,
    })
}

struct Shrinker<'a> {
    best: Plan,
    claim: &'a str,
    bug: Option<Bug>,
    runs: u32,
}

fn shrink(plan: Plan, violation: &Violation, bug: Option<Bug>) -> Plan {
    let mut shrinker = Shrinker {
        best: plan,
        claim: violation.claim,
        bug,
        runs: 0,
    };
    while shrinker.round() {}
    shrinker.best
}

impl Shrinker<'_> {
    /// Keeps the changed plan as the best so far if the failure is still the same; returns true then.
    fn try_with(&mut self, change: impl FnOnce(&mut Plan)) -> bool {
        if self.runs >= MOST_RUNS {
            return false;
        }
        self.runs += 1;
        let mut plan = self.best.clone();
        change(&mut plan);
        let fails = run(plan.clone(), None, self.bug)
            .violation
            .is_some_and(|violation| violation.claim == self.claim);
        if fails {
            self.best = plan;
        }
        fails
    }

    /// Tries every way to make the plan smaller. Returns true if one worked.
    fn round(&mut self) -> bool {
        let mut smaller = false;
        for at in (0..self.best.faults.len()).rev() {
            smaller |= self.try_with(|plan| _ = plan.faults.remove(at));
        }
        for at in (0..self.best.migrations.len()).rev() {
            smaller |= self.try_with(|plan| _ = plan.migrations.remove(at));
        }
        smaller |= self.lower(|plan| &mut plan.load, 1_000_000);
        smaller |= self.lower(|plan| &mut plan.requests, 1);
        smaller |= self.simplify();
        smaller
    }

    /// Minimizes a number of the plan by bisection.
    fn lower(&mut self, field: impl Fn(&mut Plan) -> &mut u64, step: u64) -> bool {
        let (mut low, mut high) = (0, *field(&mut self.best.clone()));
        let before = high;
        while high - low > step {
            let middle = low + (high - low) / 2;
            if self.try_with(|plan| *field(plan) = middle) {
                high = middle;
            } else {
                low = middle;
            }
        }
        high < before
    }

    fn simplify(&mut self) -> bool {
        let mut smaller = false;
        if self.best.power_loss_at_end {
            smaller |= self.try_with(|plan| plan.power_loss_at_end = false);
        }
        if self.best.link.jitter > 1 {
            smaller |= self.try_with(|plan| plan.link.jitter = 1);
        }
        if self.best.link.copy_connections > 1 {
            smaller |= self.try_with(|plan| plan.link.copy_connections = 1);
        }
        for node in 0..2 {
            if self.best.disks[node].tail_permille > 0 {
                smaller |= self.try_with(|plan| plan.disks[node].tail_permille = 0);
            }
            if self.best.clocks[node].drift != 0 {
                smaller |= self.try_with(|plan| plan.clocks[node].drift = 0);
            }
        }
        for at in 0..self.best.migrations.len() {
            if self.best.migrations[at].options.verify {
                smaller |= self.try_with(|plan| plan.migrations[at].options.verify = false);
            }
            if self.best.migrations[at].change.is_some() {
                smaller |= self.try_with(|plan| plan.migrations[at].change = None);
            }
        }
        while self.best.guest.depth > 1 && self.try_with(|plan| plan.guest.depth -= 1) {
            smaller = true;
        }
        smaller
    }
}

/// Describes the decisions of a plan for the report.
fn describe(plan: &Plan) -> String {
    let mut text = format!(
        "disk of {} sectors, {} ms of load, at most {} requests{}\nguest: {:?}\nlink: {:?}\n",
        plan.sectors,
        plan.load / 1_000_000,
        plan.requests,
        if plan.power_loss_at_end {
            ", power loss at the end"
        } else {
            ""
        },
        plan.guest,
        plan.link,
    );
    for (node, disk) in ["a", "b"].iter().zip(&plan.disks) {
        text += &format!("disk of {node}: {disk:?}\n");
    }
    if let Some(protection) = &plan.protection {
        text += &format!("protection: {protection:?}\n");
    }
    for migration in &plan.migrations {
        text += &format!("migration: {migration:?}\n");
    }
    for fault in &plan.faults {
        let when = match fault.trigger {
            Trigger::At(at) => format!("at {} us", at / 1_000),
            Trigger::After {
                moment,
                skip,
                delay,
            } => {
                let moment = match moment {
                    Moment::Entered(phase) => phase.name(),
                    Moment::Paused => "paused",
                    Moment::Resumed => "resumed",
                    Moment::Severed => "severed",
                    Moment::Taken => "taken",
                };
                format!("{} us after '{moment}', time {}", delay / 1_000, skip + 1)
            }
        };
        text += &format!("fault: {:?} {when}\n", fault.kind);
    }
    text
}
