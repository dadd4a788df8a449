//! A machine that is stopped and goes on, again and again, as for rapid checkpoints. A node serves its disk and its NIC;
//! `stop` and `cont` end when both devices have ended and begun their rings.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::network::{Lan, Talk};
use godwit_testkit::report::{Report, Target};
use godwit_testkit::vm::{
    ConsoleSocket, GuestConsole, GuestImage, GuestLoad, GuestMachine, GuestNetwork, MachineDisk,
    format_disk,
};
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::common::in_turns;
use crate::common::qmp::Qmp;

/// Stop and go on of a machine with a disk and a NIC, at the pace of rapid checkpoints
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Another godwit, measured in turns with this one
    #[arg(long)]
    baseline: Option<PathBuf>,
    /// Number of machines of each build
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Stops of each machine
    #[arg(long, default_value_t = 200)]
    stops: u32,
}

const DISK: &str = "stopped";
const NIC: &str = "stopped";
const DISK_BYTES: u64 = 128 << 20;
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const ECHO: u16 = 7000;
/// Rate of the conversation through the NIC.
const BYTES_PER_SECOND: u64 = 256 << 10;
/// Random writes of 4 KiB in flight.
const IN_FLIGHT: u64 = 32;
/// Time from one stop to the next.
const PERIOD: Duration = Duration::from_millis(25);
const PATIENCE: Duration = Duration::from_secs(120);
/// Longest stop and going on at the median, in milliseconds.
const GOAL_MS: f64 = 2.0;
const CURRENT: &str = "current";

pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("bench-stop", &["qemu-system-x86_64"])?;
    report.fact("stops", arguments.stops);
    report.fact("writes_in_flight", IN_FLIGHT);
    let figures = "stop_p50_ms ms, stop_p99_ms ms, cont_p50_ms ms, cont_p99_ms ms, both_p50_ms ms, both_p99_ms ms";
    report.table("stops", "build", figures, "");
    let mut builds = vec![(CURRENT, release_binary()?)];
    let baseline = arguments.baseline.clone();
    builds.extend(baseline.map(|godwit| ("baseline", godwit)));
    in_turns(arguments.rounds, builds.len(), |_, turn| {
        let (build, godwit) = &builds[turn];
        let mut run = measure(godwit, arguments.stops)?;
        run["build"] = (*build).into();
        let whole = run["errors"] == 0;
        report.check(whole, format!("{build}: the guest saw errors: {run}"));
        report.add("stops", run)
    })?;
    let runs = report.runs("stops").only("build", CURRENT);
    let median = runs.median("both_p50_ms");
    let goal = Target::at_most("stop and cont, median ms", GOAL_MS, median);
    report.targets.push(goal);
    report.conclude()
}

/// Starts a machine with devices of this build, and stops it again and again.
fn measure(godwit: &Path, stops: u32) -> io::Result<Value> {
    let lan = Lan::new(1)?;
    let hosts = [("a", lan.hosts().first())];
    let options = ClusterOptions {
        godwit: godwit.to_owned(),
        tls: true,
    };
    let mut cluster = Cluster::prepare_on(&hosts, options)?;
    cluster.start_all()?;
    let node = cluster.node("a");
    let image = cluster.dir().join("disk.img");
    format_disk(&image, DISK_BYTES)?;
    let image = image.to_string_lossy();
    node.godwit(&["disk", "create", DISK, "--path", &image])
        .json()?;
    node.godwit(&["nic", "create", NIC, &format!("tap={}", Lan::TAP)])
        .text()?;
    let nic = node.godwit(&["nic", "show", NIC]).json()?;
    let [mac, socket] = ["mac", "socket"].map(|name| nic[name].as_str().unwrap_or_default());

    let console_socket = cluster.dir().join("console.sock");
    let console = GuestConsole::new();
    console.listen(&console_socket)?;
    let disks = vec![MachineDisk::VhostUser(node.vhost_socket(DISK))];
    let console_socket = ConsoleSocket::Connect(console_socket);
    let machine = GuestMachine {
        load: load(),
        ..GuestMachine::new(GuestImage::build_or_cached()?, disks, console_socket)
    };
    let monitor = cluster.dir().join("monitor.sock");
    let further = [
        "-qmp".into(),
        format!("unix:{},server=on,wait=off", monitor.display()),
        "-chardev".into(),
        format!("socket,id=nic,path={socket}"),
        "-netdev".into(),
        "vhost-user,id=net,chardev=nic".into(),
        "-device".into(),
        format!("virtio-net-pci,netdev=net,mac={mac}"),
    ];
    let _qemu = machine.spawn(&further.map(Into::into))?;
    let mut qmp = Qmp::connect(&monitor)?;
    console.started(PATIENCE)?;
    let server = SocketAddr::from((GUEST, ECHO));
    let talk = Talk::start(lan.switch(), server, BYTES_PER_SECOND);
    console.progress(200, PATIENCE)?;
    let mut run = stop_and_go_on(&mut qmp, stops)?;
    let talked = talk.finish()?;
    let finished = console.finish(PATIENCE)?;
    let broken = u64::from(talked.reset || talked.bytes == 0);
    run["errors"] = (finished.errors + finished.mismatches + talked.wrong + broken).into();
    Ok(run)
}

fn load() -> GuestLoad {
    GuestLoad {
        // With the writers' requests.
        rate: 0,
        writers: IN_FLIGHT - 1,
        file_mb: 8,
        network: Some(GuestNetwork {
            address: format!("{GUEST}/24"),
            echo_port: ECHO,
            ..GuestNetwork::default()
        }),
        ..GuestLoad::default()
    }
}

fn stop_and_go_on(qmp: &mut Qmp, stops: u32) -> io::Result<Value> {
    let empty = Histogram::<u64>::new_with_max(60_000_000_000, 3).map_err(io::Error::other)?;
    let mut times = [empty.clone(), empty.clone(), empty];
    for _ in 0..stops {
        let begun = Instant::now();
        qmp.call("stop", &json!({}))?;
        let stopped = begun.elapsed();
        qmp.call("cont", &json!({}))?;
        let both = begun.elapsed();
        for (times, time) in times.iter_mut().zip([stopped, both - stopped, both]) {
            times.saturating_record(time.as_nanos() as u64);
        }
        std::thread::sleep(PERIOD.saturating_sub(both));
    }
    let mut run = json!({});
    for (times, name) in times.iter().zip(["stop", "cont", "both"]) {
        for (quantile, percent) in [(0.5, 50), (0.99, 99)] {
            let ms = times.value_at_quantile(quantile) as f64 / 1e6;
            run[format!("{name}_p{percent}_ms")] = ms.into();
        }
    }
    Ok(run)
}
