//! The virtual machine of other tests, on a disk of another server. The load runs without an error, moves with the
//! machine, and notices wrong content.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use godwit_testkit::process::{Process, scratch_dir, wait_for};
use godwit_testkit::scenario::{PATIENCE, Scenario};
use godwit_testkit::vm::{
    ConsoleSocket, Finished, GuestConsole, GuestImage, GuestMachine, MachineDisk, Monitor,
    check_disk, format_disk,
};

const SIZE: u64 = 96 << 20;
/// Time for which a machine is stopped: far longer than scheduling noise.
const STOPPED: Duration = Duration::from_secs(2);

/// Serves an image over vhost-user-blk with QEMU's storage daemon.
fn serve(image: &Path, socket: &Path) -> Process {
    let mut file =
        OsString::from("driver=file,node-name=disk,cache.direct=on,locking=off,filename=");
    file.push(image);
    let mut export = OsString::from(
        "vhost-user-blk,id=disk,node-name=disk,writable=on,addr.type=unix,addr.path=",
    );
    export.push(socket);
    let mut daemon = Command::new("qemu-storage-daemon");
    daemon
        .arg("--blockdev")
        .arg(file)
        .arg("--export")
        .arg(export);
    let daemon = Process::spawn(&mut daemon).unwrap();
    wait_for(PATIENCE, || socket.exists().then_some(())).unwrap();
    daemon
}

fn socket(dir: &Path, name: &str) -> PathBuf {
    dir.join(name)
}

fn clean(finished: Finished, console: &GuestConsole) {
    let log = console.log();
    assert_eq!((finished.errors, finished.mismatches), (0, 0), "{log:#?}");
    assert!(finished.writes > 100, "{finished:?} {log:#?}");
    assert!(!log.iter().any(|line| line.contains("EXT4")), "{log:#?}");
}

/// Ends by the power button, as an operator stops a machine.
#[test]
fn two_disks_without_an_error() {
    let turn = Scenario::alone();
    let dir = scratch_dir().unwrap();
    let guest = GuestImage::build_or_cached().unwrap();
    let (mut daemons, mut disks, mut images) = (Vec::new(), Vec::new(), Vec::new());
    for name in ["one", "two"] {
        let (image, socket) = (
            dir.path().join(name),
            socket(dir.path(), &format!("{name}.sock")),
        );
        format_disk(&image, SIZE).unwrap();
        daemons.push(serve(&image, &socket));
        disks.push(MachineDisk::VhostUser(socket));
        images.push(image);
    }
    let console = GuestConsole::new();
    let line = socket(dir.path(), "console");
    console.listen(&line).unwrap();
    let mut machine = GuestMachine::new(guest, disks, ConsoleSocket::Connect(line));
    machine.load.seed = turn.seed;
    let monitor = socket(dir.path(), "monitor");
    let mut qemu = machine.spawn(&Monitor::arguments(&monitor)).unwrap();
    let begin = Instant::now();
    console.started(PATIENCE).unwrap();
    println!("started after {:?}", begin.elapsed());
    console.mark(PATIENCE).unwrap();
    let report = console.progress(800, PATIENCE).unwrap();
    println!("{report:?}, gap on the host {:?}", console.host_gap());
    assert!(
        report.reads > 0 && report.syncs > 0 && report.file_operations > 0,
        "{report:?}"
    );
    assert!(report.memory_passes > 0, "{report:?}");

    // The guest does not see the standstill; the host does.
    let mut monitor = Monitor::connect(&monitor).unwrap();
    console.mark(PATIENCE).unwrap();
    console.fresh_report(PATIENCE).unwrap();
    monitor.say("stop").unwrap();
    std::thread::sleep(STOPPED);
    monitor.say("cont").unwrap();
    let report = console.progress(200, PATIENCE).unwrap();
    let inside = Duration::from_secs_f64(report.gap_since_mark_ms / 1000.0);
    println!("{report:?}, gap on the host {:?}", console.host_gap());
    assert!(console.host_gap() >= STOPPED, "{:?}", console.host_gap());
    assert!(inside < STOPPED / 2, "{inside:?}");

    monitor.say("system_powerdown").unwrap();
    let finished = console.finished(PATIENCE).unwrap();
    clean(finished, &console);
    assert!(qemu.wait(PATIENCE).unwrap().success());
    for image in images {
        check_disk(&image).unwrap();
    }
}

/// Without this test, "no mismatch" would prove nothing.
#[test]
fn a_changed_disk_is_noticed() {
    let turn = Scenario::alone();
    let dir = scratch_dir().unwrap();
    let guest = GuestImage::build_or_cached().unwrap();
    let image = dir.path().join("image");
    format_disk(&image, SIZE).unwrap();
    let disk = socket(dir.path(), "disk.sock");
    let _daemon = serve(&image, &disk);
    let (console, line) = (GuestConsole::new(), socket(dir.path(), "console"));
    let mut machine = GuestMachine::new(
        guest,
        vec![MachineDisk::VhostUser(disk)],
        ConsoleSocket::Listen(line.clone()),
    );
    machine.load.seed = turn.seed;
    let _qemu = machine.spawn(&[]).unwrap();
    console.attach(&line, PATIENCE).unwrap();
    console.started(PATIENCE).unwrap();
    console.progress(200, PATIENCE).unwrap();
    // The load's file fills more of the disk than anything else: most of the file is hit.
    let file = OpenOptions::new().write(true).open(&image).unwrap();
    let junk = vec![0x5a; 4096];
    for block in (SIZE / 8 / 4096)..(SIZE / 4096) {
        file.write_all_at(&junk, block * 4096).unwrap();
    }
    let report = console
        .report_when(PATIENCE, |report| report.mismatches > 0)
        .unwrap();
    println!("{report:?} {:#?}", console.log());
}

/// Memory, CPU and the load's state move to another QEMU; the disk is the same image behind another back end.
#[test]
fn the_load_goes_on_where_the_machine_moves() {
    let turn = Scenario::alone();
    let dir = scratch_dir().unwrap();
    let guest = GuestImage::build_or_cached().unwrap();
    let image = dir.path().join("image");
    format_disk(&image, SIZE).unwrap();
    let (here, there) = (socket(dir.path(), "here"), socket(dir.path(), "there"));
    let _daemons = [serve(&image, &here), serve(&image, &there)];
    let console = GuestConsole::new();
    let path = |name: &str| socket(dir.path(), name);
    let machine = |disk: &Path, line: &str| {
        let line = ConsoleSocket::Listen(path(line));
        let mut machine = GuestMachine::new(
            guest.clone(),
            vec![MachineDisk::VhostUser(disk.into())],
            line,
        );
        machine.load.seed = turn.seed;
        machine
    };
    let mut source = machine(&here, "line-a")
        .spawn(&Monitor::arguments(&path("monitor-a")))
        .unwrap();
    console.attach(&path("line-a"), PATIENCE).unwrap();
    console.started(PATIENCE).unwrap();

    let mut further = Monitor::arguments(&path("monitor-b")).to_vec();
    further.extend(Monitor::awaits(&path("stream")));
    let mut destination = machine(&there, "line-b").spawn(&further).unwrap();
    console.attach(&path("line-b"), PATIENCE).unwrap();

    console.progress(200, PATIENCE).unwrap();
    console.mark(PATIENCE).unwrap();
    let mut monitor = Monitor::connect(&path("monitor-a")).unwrap();
    monitor.migrate(&path("stream")).unwrap();
    source.kill();

    let report = console.progress(400, PATIENCE).unwrap();
    let host_gap = console.host_gap();
    println!("{report:?}, gap on the host {host_gap:?}");
    assert_eq!(report.mark, 1);
    assert!(
        host_gap > Duration::ZERO && host_gap < Duration::from_secs(10),
        "{host_gap:?}"
    );
    let finished = console.finish(PATIENCE).unwrap();
    clean(finished, &console);
    assert!(destination.wait(PATIENCE).unwrap().success());
    check_disk(&image).unwrap();
}
