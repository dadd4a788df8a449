//! The demo: each program, each side.

use std::io;
use std::time::Instant;

use godwit_testkit::process::target_dir;
use godwit_testkit::rdma::{
    ALIAS, AtWork, Bed, Moved, Program, Side, clean_up, move_process, payload,
    write_bw_through_a_move,
};
use godwit_testkit::report::write_report;

use crate::rdma::Arguments;
use crate::rdma::cases::checking::{VARIANTS, check};
use crate::rdma::cases::compared::compared;
use crate::rdma::cases::container::containers;
use crate::rdma::cases::deaths::deaths;
use crate::rdma::cases::holder::move_holder;
use crate::rdma::cases::plain;
use crate::rdma::cases::programs::PROGRAMS;
use crate::rdma::cases::refusals::refusals;
use crate::rdma::report::{Compared, Move, Report};

pub(crate) fn run(arguments: &Arguments) -> io::Result<bool> {
    let began = Instant::now();
    println!("booting three virtual machines with soft-RoCE");
    let bed = Bed::start(3, &payload(&target_dir().join("demo-rdma"))?)?;
    bed.start_nodes(3)?;
    println!(
        "  they and their nodes run after {:.0} s",
        began.elapsed().as_secs_f64()
    );
    let mut report = Report {
        passed: true,
        holder: None,
        refusals: Vec::new(),
        moves: Vec::new(),
        checked: Vec::new(),
        deaths: Vec::new(),
        compared: Vec::new(),
    };
    if arguments.wants("holder") && arguments.qps.is_empty() {
        let holder = move_holder(&bed)?;
        println!(
            "  a process that only holds a device: CRIU alone refused it: {}; with the plugin it runs on guest 2: {}",
            holder.refused_without_plugin, holder.restored_with_plugin
        );
        report.passed &= holder.refused_without_plugin && holder.restored_with_plugin;
        report.holder = Some(holder);
        clean_up(&bed)?;
    }
    if arguments.wants("refusals") && arguments.qps.is_empty() {
        report.refusals = refusals(&bed)?;
        for refusal in &report.refusals {
            println!("  refused: {}", refusal.case);
            for sentence in &refusal.said {
                println!("    {sentence}");
            }
            report.passed &= refusal.as_expected;
        }
        clean_up(&bed)?;
    }
    if arguments.wants(plain::NAME) && arguments.qps.is_empty() {
        plain::plain(&bed, &mut report)?;
    }
    if arguments.wants("container") && arguments.qps.is_empty() {
        containers(&bed, &mut report)?;
    }
    for program in PROGRAMS
        .iter()
        .filter(|program| arguments.wants(&program.name) && arguments.qps.is_empty())
    {
        for side in [Side::Server, Side::Client] {
            record(&bed, program, side, arguments.pre_setup, &mut report)?;
        }
    }
    for count in &arguments.qps {
        let program = write_bw_through_a_move(*count);
        for pre_setup in [false, true] {
            record(&bed, &program, Side::Client, pre_setup, &mut report)?;
        }
    }
    for variant in VARIANTS
        .iter()
        .filter(|variant| arguments.wants(variant.name) && arguments.qps.is_empty())
    {
        let checked = check(
            &bed,
            variant,
            arguments.moves,
            arguments.loss,
            arguments.pre_setup,
        )?;
        match &checked.error {
            None => println!(
                "  {:30} {} moves, blackout {:5.0} ms: {}",
                variant.name,
                checked.moves,
                checked.blackout_ms_median,
                checked.said.join("; ")
            ),
            Some(error) => println!("  {:30} FAILED: {error}", variant.name),
        }
        report.passed &= checked.error.is_none();
        report.checked.push(checked);
        clean_up(&bed)?;
    }
    report.deaths = deaths(&bed, |name| {
        !arguments.only.is_empty() && arguments.wants(name)
    });
    report.passed &= report.deaths.iter().all(|death| death.as_expected);
    let named = |part: &String, name: &str| part.starts_with("programs") && name.contains(part);
    report.compared = compared(&bed, |name| {
        arguments.only.iter().any(|part| named(part, name))
    })?;
    report.passed &= !report.compared.iter().any(Compared::is_worse);
    let path = write_report("demo-rdma", &report)?;
    println!("report: {}", path.display());
    if arguments.keep_logs {
        for entry in std::fs::read_dir(bed.logs())?.flatten() {
            if entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "log")
            {
                std::fs::copy(
                    entry.path(),
                    target_dir().join("demo-rdma").join(entry.file_name()),
                )?;
            }
        }
    }
    Ok(report.passed
        && (report.holder.is_some()
            || !report.refusals.is_empty()
            || !report.moves.is_empty()
            || !report.checked.is_empty()
            || !report.deaths.is_empty()
            || !report.compared.is_empty()))
}

/// Makes one move, prints the outcome and adds the move to the report.
fn record(
    bed: &Bed,
    program: &Program,
    side: Side,
    pre_setup: bool,
    report: &mut Report,
) -> io::Result<()> {
    let mut moved = Moved::default();
    let error = one_move(bed, program, side, pre_setup, &mut moved)
        .err()
        .map(|error| error.to_string());
    match &error {
        None => println!(
            "  {:20} {:6} {} QPs{}  blackout {:5.0} ms, wait-before-stop {:4.0} ms, restore_rdma {:6.1} ms: both sides ended with success",
            program.name,
            side.name(),
            moved.qps,
            if pre_setup { " with pre-setup" } else { "" },
            moved.blackout_ms,
            moved.wbs_ms,
            moved.breakdown_ms.restore_rdma
        ),
        Some(error) => println!("  {:20} {:6} FAILED: {error}", program.name, side.name()),
    }
    report.passed &= error.is_none();
    report
        .moves
        .push(Move::new(&program.name, side.name(), moved, error));
    clean_up(bed)
}

/// Starts the program at guests 1 and 3, moves one side to guest 2, and waits for both to end.
fn one_move(
    bed: &Bed,
    program: &Program,
    side: Side,
    pre_setup: bool,
    moved: &mut Moved,
) -> io::Result<()> {
    let there = bed.guest(2);
    let at_work = AtWork::start(bed, program, side)?;
    *moved = move_process(at_work.mover, there, ALIAS, at_work.log, pre_setup)?;
    at_work.ended(there)
}
