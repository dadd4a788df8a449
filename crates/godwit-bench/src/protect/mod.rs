//! The cost of rapid checkpoints (the replicable NIC paper, section 5.4, Fig. 18 to 21): a web server under load, unprotected
//! and protected with 5 to 40 checkpoints a second, over the NIC of a node and over the cards that QEMU itself serves.
//! The checkpoints are the same in all cases. docs/lab/protection.md describes the method.

mod colo;
mod disks;
mod web;

use std::io;
use std::time::Duration;

use clap::Args;
use godwit_testkit::process::wait_for;
use godwit_testkit::report::{Report, Runs, Target, step};
use serde_json::{Value, json};

use crate::common::chart::{Chart, Line};
use crate::common::cpu::{Meter, guest_processor_seconds};
use crate::common::{in_turns, interrupt, named};
use crate::net::{self, HOSTS, Machine, Peer, Site, VM};

/// A web server under load, with rapid checkpoints and without, beside QEMU's own network cards
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// One short round: shows that everything runs, and little more
    #[arg(long)]
    quick: bool,
    /// Number of rounds, each with a turn of every card [default: 3, and 1 with --quick]
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds of each measurement [default: 8, and 2 with --quick]
    #[arg(long)]
    seconds: Option<u64>,
    /// Checkpoints a second, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [5, 10, 20, 30, 40])]
    frequencies: Vec<u32>,
    /// Connections of the clients
    #[arg(long, default_value_t = 64)]
    connections: u32,
}

/// The compared cards.
const CARDS: [Peer; 3] = [Peer::E1000, Peer::VirtioNet, Peer::Godwit];
/// Ratio of the requests a second over the paper's card to those over e1000, each at its best frequency: 688 to 592.
const GOAL: f64 = 1.16;
/// Share of the frequency below which a measurement's checkpoints are not those that were asked for.
const KEPT: f64 = 0.9;
/// The machine's disk, which the guest does not use.
const DISK: &str = "idle";
const DISK_SIZE: &str = "16MiB";
/// Longest wait for the copy of the memory.
const PATIENCE: Duration = Duration::from_secs(60);
/// Load before a measurement, so that the figures of the checkpoints are of the same load.
const SETTLES: u64 = 1;

const FIGURES: &str = "requests_per_second, latency_p50_ms ms, latency_p99_ms ms, checkpoint_hz Hz, dirty_pages_per_second, \
    pages_per_request, megabytes_per_second MB/s, pause_p50_ms ms, stop_p50_ms ms, copy_p50_ms ms, state_p50_ms ms, \
    resume_p50_ms ms, lag_p50_ms ms, guest_percent %, devices_percent %, node_percent %, backup_percent %";
const ABOUT: &str = "A frequency of 0 is an unprotected machine. Shares are of one processor: the guest's emulated processor, \
    the rest of QEMU, the machine's node, and everything at the backup.";

pub(crate) fn bench(options: &Options) -> io::Result<()> {
    net::check()?;
    let mut report = Report::new("bench-protect", &["qemu-system-x86_64"])?;
    let seconds = options.seconds.unwrap_or(if options.quick { 2 } else { 8 });
    report.fact("quick", options.quick);
    report.fact("seconds", seconds);
    report.fact("connections", options.connections);
    report.table("requests", "card, frequency", FIGURES, ABOUT);
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let site = Site::new()?;
    let disk = ["disk", "create", DISK, "--size", DISK_SIZE];
    site.cluster.node(HOSTS[0]).godwit(&disk).json()?;
    in_turns(rounds, CARDS.len(), |_, turn| {
        let card = CARDS[turn];
        take_turn(&site, card, options, seconds, &mut report).map_err(named(card.name()))
    })?;
    step("trying COLO with the QEMU at hand");
    report.fact("colo", colo::trial(&site).map_err(named("colo"))?);
    drop(site);
    disks::measure(rounds, &mut report)?;
    judge(&mut report);
    draw(&mut report)?;
    report.conclude()
}

/// Measures a machine with this card, unprotected and with each frequency.
fn take_turn(
    site: &Site,
    card: Peer,
    options: &Options,
    seconds: u64,
    report: &mut Report,
) -> io::Result<()> {
    let machine = Machine::start(site, card, Some(DISK))?;
    let frequencies = options.frequencies.iter().copied();
    for frequency in [0].into_iter().chain(frequencies) {
        interrupt::check()?;
        let protection = match frequency {
            0 => None,
            _ => Some(Protection::begin(site, frequency)?),
        };
        web::load(site, options.connections, SETTLES)?;
        let mut run = measure(site, options.connections, seconds)?;
        run["card"] = card.name().into();
        run["frequency"] = frequency.into();
        if let Some(protection) = protection {
            protection.add_figures(&mut run)?;
            protection.end()?;
        }
        report.add("requests", run)?;
    }
    machine.stop(site)
}

fn measure(site: &Site, connections: u32, seconds: u64) -> io::Result<Value> {
    let hosts = site.hosts();
    let (here, there) = (hosts[0], hosts[1]);
    let mut meters = [Meter::new(vec![here]), Meter::new(vec![there])];
    let mut look = || -> io::Result<[f64; 4]> {
        let [here_all, backup] = [meters[0].look()?, meters[1].look()?];
        let guest = guest_processor_seconds(&[here])?;
        let node = site.cluster.node(HOSTS[0]).cpu_seconds();
        Ok([guest, here_all - guest - node, node, backup])
    };
    let before = look()?;
    let answers = web::load(site, connections, seconds)?;
    let after = look()?;
    let percent = |part: usize| (after[part] - before[part]) / answers.seconds * 100.0;
    Ok(json!({
        "requests_per_second": answers.per_second, "latency_p50_ms": answers.p50_ms, "latency_p99_ms": answers.p99_ms,
        "guest_percent": percent(0), "devices_percent": percent(1), "node_percent": percent(2),
        "backup_percent": percent(3),
    }))
}

/// A protection of the machine by the second node.
struct Protection<'a>(&'a Site);

impl<'a> Protection<'a> {
    fn begin(site: &'a Site, frequency: u32) -> io::Result<Self> {
        step(&format!(
            "protecting the machine with {frequency} checkpoints a second"
        ));
        let frequency = frequency.to_string();
        let command = [
            "vm",
            "protect",
            VM,
            "--to",
            HOSTS[1],
            "--when-alone",
            "stop",
        ];
        let options = ["--frequency", &frequency];
        let node = site.cluster.node(HOSTS[0]);
        node.godwit(&[&command[..], &options].concat()).json()?;
        let protection = Self(site);
        let protected = wait_for(PATIENCE, || {
            (protection.shown()["state"] == "protected").then_some(())
        });
        protected
            .ok_or_else(|| io::Error::other(format!("not protected: {}", protection.shown())))?;
        Ok(protection)
    }

    fn shown(&self) -> Value {
        let node = self.0.cluster.node(HOSTS[0]);
        node.vm(VM)["protection"].take()
    }

    /// Adds the figures of the last checkpoints to a run.
    fn add_figures(&self, run: &mut Value) -> io::Result<()> {
        let shown = self.shown();
        if shown["state"] != "protected" {
            return Err(io::Error::other(format!(
                "the protection was lost: {shown}"
            )));
        }
        let figures = &shown["checkpoints"];
        let figure = |name: &str| figures[name].as_f64();
        for part in ["pause", "stop", "copy", "state", "resume", "lag"] {
            let us = figure(&format!("{part}_p50_us"));
            run[format!("{part}_p50_ms")] = us.map(|us| us / 1e3).into();
        }
        let pages = figure("pages_per_second");
        let requests = run["requests_per_second"].as_f64();
        run["checkpoint_hz"] = figure("per_second").into();
        run["dirty_pages_per_second"] = pages.into();
        run["pages_per_request"] = pages
            .zip(requests)
            .map(|(pages, requests)| pages / requests)
            .into();
        run["megabytes_per_second"] = figure("bytes_per_second").map(|bytes| bytes / 1e6).into();
        Ok(())
    }

    fn end(self) -> io::Result<()> {
        let node = self.0.cluster.node(HOSTS[0]);
        node.godwit(&["vm", "unprotect", VM]).text()?;
        Ok(())
    }
}

/// Returns the requests a second at a card's best frequency, by the medians of the rounds.
fn best(runs: &Runs<'_>, card: Peer) -> Option<f64> {
    let protected = runs
        .only("card", card.name())
        .filter(|run| run["frequency"] != 0);
    let medians = protected.groups(&["frequency"]);
    let medians = medians
        .iter()
        .filter_map(|runs| runs.median("requests_per_second"));
    medians.max_by(f64::total_cmp)
}

fn judge(report: &mut Report) {
    let runs = report.runs("requests");
    let ours = best(&runs, Peer::Godwit);
    let over = |card: Peer| Some(ours? / best(&runs, card)?);
    let rates = runs.filter(|run| run["card"] == Peer::Godwit.name() && run["frequency"] != 0);
    let kept = rates
        .0
        .iter()
        .filter_map(|run| Some(run["checkpoint_hz"].as_f64()? / run["frequency"].as_f64()?));
    let kept = kept.min_by(f64::total_cmp);
    let mut beside_virtio = Target::at_least(
        "best requests a second / virtio-net",
        1.0,
        over(Peer::VirtioNet),
    );
    beside_virtio.reported_only = true;
    let targets = [
        Target::at_least("best requests a second / e1000", GOAL, over(Peer::E1000)),
        beside_virtio,
        Target::at_least("least share of the frequency", KEPT, kept),
    ];
    report.targets.extend(targets);
}

/// Draws charts like the paper's Fig. 18 to 21.
fn draw(report: &mut Report) -> io::Result<()> {
    let charts = [
        (
            "requests",
            "Requests with rapid checkpoints",
            "requests a second",
            "requests_per_second",
        ),
        (
            "pages",
            "Pages written with rapid checkpoints",
            "pages a second",
            "dirty_pages_per_second",
        ),
    ];
    let x_label = "checkpoints a second";
    for (file, title, unit, figure) in charts {
        let lines = Line::over(&report.runs("requests"), "card", "frequency", figure);
        Chart::new(title, x_label, unit, lines).add(report, &format!("{file}.svg"))?;
    }
    for card in CARDS.map(Peer::name) {
        let runs = report.runs("requests").only("card", card);
        let lines = ["stop", "copy", "state", "resume", "lag"].map(|part| {
            let mut lines = Line::over(&runs, "card", "frequency", &format!("{part}_p50_ms"));
            let points = lines.pop().map(|line| line.points).unwrap_or_default();
            Line {
                name: part.to_owned(),
                points,
            }
        });
        let title = format!("Parts of a checkpoint, {card}");
        Chart::new(&title, x_label, "ms", lines.into())
            .add(report, &format!("parts-{card}.svg"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use godwit_testkit::report::Header;

    use super::*;

    #[test]
    fn each_card_counts_at_its_best_frequency() {
        let mut report = Report::of(Header::default(), Path::new("report.json"));
        report.table("requests", "card, frequency", FIGURES, ABOUT);
        let mut add = |card: &str, frequency: u32, requests: f64, hz: f64| {
            let run = json!({
                "card": card, "frequency": frequency, "requests_per_second": requests, "checkpoint_hz": hz,
            });
            report.tables[0].runs.push(run);
        };
        add("e1000", 0, 900.0, 0.0);
        add("e1000", 10, 592.0, 10.0);
        add("e1000", 20, 500.0, 20.0);
        add("godwit", 0, 2000.0, 0.0);
        add("godwit", 10, 600.0, 10.0);
        add("godwit", 20, 688.0, 16.0);
        judge(&mut report);
        let [over, virtio, kept] = &report.targets[..] else {
            panic!("three targets");
        };
        assert!((over.measured.unwrap() - 688.0 / 592.0).abs() < 1e-9 && over.holds);
        assert!(virtio.measured.is_none() && virtio.reported_only);
        assert!((kept.measured.unwrap() - 0.8).abs() < 1e-9 && !kept.holds);
    }
}
