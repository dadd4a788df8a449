//! Unmodified RDMA programs of Debian move between virtual machines while they run.

mod cases;

use std::io;
use std::time::Instant;

use clap::Args;
use godwit_testkit::process::target_dir;
use godwit_testkit::rdma::{
    ALIAS, AtWork, Bed, Moved, Program, Side, clean_up, move_process, payload,
    write_bw_through_a_move,
};
use godwit_testkit::report::{Report, Table, add_fields};
use serde_json::{Value, json};

use self::cases::{checking, compared, container, deaths, holder, plain, programs, refusals};

/// Moves RDMA programs between virtual machines with soft-RoCE
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Only programs whose name contains this; more than once for several
    #[arg(long)]
    only: Vec<String>,
    /// Number of moves of each pair of checking processes
    #[arg(long, default_value_t = 2)]
    moves: usize,
    /// Packets that are lost while a checking process moves, in percent
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// Make the device's objects ahead of each moving process
    #[arg(long)]
    pre_setup: bool,
    /// Move a program with each of these numbers of queue pairs, without pre-setup and with it, and nothing else
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    qps: Vec<u32>,
    /// Keep the virtual machines' logs
    #[arg(long)]
    keep_logs: bool,
}

impl Arguments {
    /// Returns true if the program `name` is to run.
    fn wants(&self, name: &str) -> bool {
        self.qps.is_empty()
            && (self.only.is_empty() || self.only.iter().any(|part| name.contains(part)))
    }
}

/// The virtual machines, and the report of what happened to the programs in them.
struct Demo {
    bed: Bed,
    report: Report,
}

pub(crate) fn play(arguments: &Arguments) -> io::Result<()> {
    let began = Instant::now();
    let mut report = Report::new("demo-rdma", &[])?;
    report.tables = tables();
    println!("booting three virtual machines with soft-RoCE");
    let bed = Bed::start(3, &payload(&target_dir().join("demo-rdma"))?)?;
    bed.start_nodes(3)?;
    println!(
        "  they and their nodes run after {:.0} s",
        began.elapsed().as_secs_f64()
    );
    let mut demo = Demo { bed, report };
    demo.play(arguments)?;
    if arguments.keep_logs {
        for entry in std::fs::read_dir(demo.bed.logs())?.flatten() {
            if entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "log")
            {
                std::fs::copy(entry.path(), demo.report.dir().join(entry.file_name()))?;
            }
        }
    }
    let ran = demo
        .report
        .tables
        .iter()
        .any(|table| !table.runs.is_empty());
    demo.report.check(ran, "no program has this name");
    demo.report.conclude()
}

fn tables() -> Vec<Table> {
    let parts = "blackout_ms ms, wait_ms ms, dump_rdma ms, dump_others ms, transfer ms, full_restore ms, restore_rdma ms, \
        resume ms, pre_setup_ms ms";
    vec![
        Table::new(
            "holder",
            "refused_without_plugin, restored_with_plugin",
            "",
            "",
        ),
        Table::new("refusals", "as_expected, case", "", ""),
        Table::new("moves", "program, side, qps", parts, ""),
        Table::new("checked", "variant", "moves, blackout_ms ms", ""),
        Table::new("deaths", "case, as_expected, works, runs_at, said", "", ""),
        Table::new("compared", "program", "without, with", ""),
    ]
}

impl Demo {
    fn play(&mut self, arguments: &Arguments) -> io::Result<()> {
        if arguments.wants("holder") {
            let found = holder::move_holder(&self.bed)?;
            let good =
                found["refused_without_plugin"] == true && found["restored_with_plugin"] == true;
            self.add("holder", found, good)?;
            clean_up(&self.bed)?;
        }
        if arguments.wants("refusals") {
            for found in refusals::refusals(&self.bed)? {
                self.add_refusal(found)?;
            }
            clean_up(&self.bed)?;
        }
        if arguments.wants(plain::NAME) {
            let moved = plain::moves(&self.bed);
            self.add_move(plain::NAME, Side::Server, moved)?;
            plain::clean_up(&self.bed)?;
        }
        if arguments.wants("container") {
            container::prepare(&self.bed)?;
            let refused = container::refused(&self.bed)?;
            self.add_refusal(refused)?;
            for (name, moves) in container::MOVES {
                let moved = moves(&self.bed);
                self.add_move(name, Side::Server, moved)?;
                container::clean_up(&self.bed)?;
            }
        }
        self.programs(arguments)?;
        for variant in checking::VARIANTS
            .iter()
            .filter(|variant| arguments.wants(variant.name))
        {
            let (moves, loss) = (arguments.moves, arguments.loss);
            let checked = checking::check(&self.bed, variant, moves, loss, arguments.pre_setup);
            let good = checked["error"].is_null();
            self.add("checked", checked, good)?;
            clean_up(&self.bed)?;
        }
        let named = |name: &str| !arguments.only.is_empty() && arguments.wants(name);
        for case in deaths::cases().filter(|case| named(&case.name())) {
            let death = deaths::death(&self.bed, &case);
            let good = death["as_expected"] == true;
            self.add("deaths", death, good)?;
        }
        let programs =
            |part: &String, name: &str| part.starts_with("programs") && name.contains(part);
        let compared = compared::compared(&self.bed, |name| {
            arguments.only.iter().any(|part| programs(part, name))
        })?;
        for found in compared {
            // A program may fail without the library, too.
            let is_worse = found["without"] == 0 && found["with"] != 0;
            self.add("compared", found, !is_worse)?;
        }
        Ok(())
    }

    /// Moves either side of the programs, or of one with the wanted numbers of queue pairs.
    fn programs(&mut self, arguments: &Arguments) -> io::Result<()> {
        for program in programs::PROGRAMS
            .iter()
            .filter(|program| arguments.wants(&program.name))
        {
            for side in [Side::Server, Side::Client] {
                self.move_one(program, side, arguments.pre_setup)?;
            }
        }
        for count in &arguments.qps {
            let program = write_bw_through_a_move(*count);
            for pre_setup in [false, true] {
                self.move_one(&program, Side::Client, pre_setup)?;
            }
        }
        Ok(())
    }

    /// Adds an outcome, which is a problem unless it is good.
    fn add(&mut self, table: &str, found: Value, good: bool) -> io::Result<()> {
        self.report.check(good, format!("{table}: {found}"));
        self.report.add(table, found)
    }

    /// Adds the reasons of the preflight against a move.
    fn add_refusal(&mut self, found: Value) -> io::Result<()> {
        for sentence in found["said"].as_array().into_iter().flatten() {
            println!("     {sentence}");
        }
        let good = found["as_expected"] == true;
        self.add("refusals", found, good)
    }

    /// Adds a move after which both sides ended with success, or failed.
    fn add_move(&mut self, name: &str, side: Side, moved: io::Result<Moved>) -> io::Result<()> {
        let mut run = json!({"program": name, "side": side.name(), "succeeded": moved.is_ok()});
        match &moved {
            Ok(moved) => {
                add_fields(&mut run, moved, "");
                add_fields(&mut run, &moved.breakdown_ms, "");
                run["qps"] = moved.qps.into();
                run["wbs_ms"] = moved.wbs_ms.into();
                if moved.pre_setup_ms.is_none() {
                    run.as_object_mut().map(|run| run.remove("pre_setup_ms"));
                }
            }
            Err(error) => run["error"] = error.to_string().into(),
        }
        self.add("moves", run, moved.is_ok())
    }

    /// Starts the program at guests 1 and 3, moves one side to guest 2, and waits for both to end.
    fn move_one(&mut self, program: &Program, side: Side, pre_setup: bool) -> io::Result<()> {
        let moved = AtWork::start(&self.bed, program, side).and_then(|at_work| {
            let there = self.bed.guest(2);
            let moved = move_process(at_work.mover, there, ALIAS, at_work.log, pre_setup)?;
            at_work.ended(there)?;
            Ok(moved)
        });
        self.add_move(&program.name, side, moved)?;
        clean_up(&self.bed)
    }
}
