//! A machine whose disk has a second copy at the other end of the link, which has each write before its
//! acknowledgement.

use std::io;
use std::time::Instant;

use godwit_testkit::report::add_fields;
use godwit_testkit::vm::{GuestLoad, format_image};
use serde_json::{Value, json};

use super::measure::{BEFORE, WARM_UP, Watch, verified};
use super::mover::{Machine, Mover};
use crate::common::cpu::Sweep;
use crate::common::interrupt;
use crate::suite::site::Site;

/// Boots a machine, and measures its guest without a second copy and with one.
pub(crate) fn measure_in_step(
    mover: &dyn Mover,
    site: &Site,
    load: &GuestLoad,
) -> io::Result<Value> {
    format_image(&site.image())?;
    let disk_at_rest = site.settle()?;
    let _sweep = Sweep(vec![site.link.left(), site.link.right()]);
    let mut machine = mover.start(site, load)?;
    interrupt::sleep(WARM_UP)?;
    let alone = watch(machine.as_ref())?;
    machine.keep_in_step()?;
    let in_step = watch(machine.as_ref())?;
    machine.go_alone()?;
    let mut run =
        json!({"disk_at_rest": disk_at_rest, "verified_writes": verified(machine.as_mut())?});
    add_fields(&mut run, &alone, "_before");
    add_fields(&mut run, &in_step, "_during");
    Ok(run)
}

fn watch(machine: &dyn Machine) -> io::Result<Value> {
    let watch = Watch::begin(machine.console())?;
    interrupt::sleep(BEFORE)?;
    watch.end(machine.console(), Instant::now())
}
