//! Machines that stand still for lack of data, with a QEMU whose monitor is unreachable then, refuses, or dies.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_testkit::process::{machines_in, wait_for};
use godwit_testkit::scenario::{PATIENCE, says, verify};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use serde_json::{Value, json};

use crate::fixture::{DISK, Fixture};
use godwit_testkit::client::Model;

const MACHINE: &str = "m";
/// Time in which a machine that must stand still would go on, and in which the node tries.
const MOMENT: Duration = Duration::from_secs(3);

/// Starts node a and a machine without an operating system whose firmware reads unavailable data. Returns once the
/// machine stands still.
fn stands_still() -> (Fixture, Model) {
    let options = ["--read-wait", "1s", "--read-wait-then", "pause"];
    let fixture = Fixture::start(&["a"], &options);
    let model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    fixture.is_there(false);
    run(&fixture);
    comes_to(&fixture, "paused");
    (fixture, model)
}

/// Returns the socket of a second monitor of the machine.
fn second_monitor(fixture: &Fixture) -> PathBuf {
    fixture.cluster.dir().join("second")
}

fn run(fixture: &Fixture) {
    let path = second_monitor(fixture).display().to_string();
    let chardev = format!("socket,id=second,path={path},server=on,wait=off");
    let words = [
        &["vm", "run", MACHINE, "--accel", "tcg", "--memory", "64M"][..],
        &["--disk", DISK, "--", "-nic", "none", "-chardev", &chardev],
        &["-mon", "chardev=second,mode=control"],
    ];
    fixture.a().json(&words.concat());
}

fn shown(fixture: &Fixture) -> Value {
    let words = ["vm", "show", MACHINE];
    fixture.a().godwit(&words).json().unwrap_or_default()
}

fn comes_to(fixture: &Fixture, state: &str) {
    let there = || (shown(fixture)["state"] == state).then_some(());
    assert!(wait_for(PATIENCE, there).is_some(), "{}", shown(fixture));
}

/// Waits until the machine runs without any trace of the standstill.
fn goes_on(fixture: &Fixture) {
    let well = || {
        let vm = shown(fixture);
        (vm["state"] == "running" && vm["problem"].is_null()).then_some(())
    };
    assert!(wait_for(PATIENCE, well).is_some(), "{}", shown(fixture));
    let mut monitor = Monitor::connect(&second_monitor(fixture));
    let note = json!({ "path": "/objects/godwit-lacks-part", "property": "data" });
    let gone = || monitor.ask("qom-get", &note).is_err().then_some(());
    assert!(wait_for(PATIENCE, gone).is_some(), "QEMU keeps the note");
}

fn stop(fixture: &Fixture) {
    let words = ["vm", "stop", "--force", MACHINE];
    fixture.a().text(&words);
}

fn qemu(fixture: &Fixture) -> Pid {
    let machines = machines_in(&fixture.a().spec().dir);
    *machines.first().expect("a QEMU")
}

/// A conversation with QEMU.
struct Monitor {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Monitor {
    fn connect(path: &Path) -> Self {
        let writer = UnixStream::connect(path).unwrap();
        let reader = BufReader::new(writer.try_clone().unwrap());
        let mut monitor = Self { reader, writer };
        monitor.line();
        monitor.ask("qmp_capabilities", &json!({})).unwrap();
        monitor
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, Value> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        writeln!(self.writer, "{text}").unwrap();
        loop {
            let line = self.line();
            if let Some(error) = line.get("error") {
                return Err(error.clone());
            }
            if let Some(answer) = line.get("return") {
                return Ok(answer.clone());
            }
        }
    }
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn a_machine_that_may_not_go_on_is_told_of_and_goes_on_when_it_may() {
    let (fixture, _) = stands_still();
    // QEMU resumes no machine whose state is about to be handed over.
    let mut monitor = Monitor::connect(&second_monitor(&fixture));
    let pause = json!({ "capability": "pause-before-switchover", "state": true });
    let capabilities = json!({ "capabilities": [pause] });
    monitor
        .ask("migrate-set-capabilities", &capabilities)
        .unwrap();
    let sink = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("tcp:{}", sink.local_addr().unwrap());
    std::thread::spawn(move || {
        let (mut from, _) = sink.accept().unwrap();
        // The migration is cancelled.
        let _ = std::io::copy(&mut from, &mut std::io::sink());
    });
    monitor.ask("migrate", &json!({ "uri": uri })).unwrap();
    let waits = || {
        let state = monitor.ask("query-migrate", &json!({})).unwrap();
        (state["status"] == "pre-switchover").then_some(())
    };
    assert!(wait_for(PATIENCE, waits).is_some());

    fixture.is_there(true);
    let told = || {
        let problem = shown(&fixture)["problem"].as_str()?.to_owned();
        problem.contains("refused \"cont\"").then_some(problem)
    };
    let told = wait_for(PATIENCE, told).unwrap_or_else(|| panic!("{}", shown(&fixture)));
    println!("{told}");
    says(&told, &["that has passed, but"]);
    monitor.ask("migrate_cancel", &json!({})).unwrap();
    drop(monitor);
    goes_on(&fixture);
    stop(&fixture);
}

#[test]
fn a_machine_whose_monitor_is_cut_while_it_stands_still_goes_on_by_itself() {
    let (fixture, _) = stands_still();
    cut_monitor(qemu(&fixture), &monitor(&fixture));
    fixture.is_there(true);
    goes_on(&fixture);
    stop(&fixture);
}

/// Returns the node's socket for the machine's QEMU.
fn monitor(fixture: &Fixture) -> PathBuf {
    PathBuf::from(shown(fixture)["qmp"].as_str().unwrap())
}

/// Cuts a node's monitor connection to this QEMU; both ends see only that.
fn cut_monitor(pid: Pid, path: &Path) {
    let path = path.to_str().unwrap();
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let fds = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let qemu = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    // The listening socket has this path, too, and is left alone.
    let connected = sockets.lines().filter(|line| line.ends_with(path));
    let connected = connected.filter(|line| line.split_whitespace().nth(5) == Some("03"));
    let inodes: Vec<&str> = connected
        .filter_map(|line| line.split_whitespace().nth(6))
        .collect();
    let mut cut = 0;
    for entry in std::fs::read_dir(fds).unwrap() {
        let entry = entry.unwrap();
        let Ok(link) = std::fs::read_link(entry.path()) else {
            continue;
        };
        let link = link.display().to_string();
        let inode = link
            .strip_prefix("socket:[")
            .and_then(|it| it.strip_suffix(']'));
        if inode.is_some_and(|inode| inodes.contains(&inode)) {
            let number = entry.file_name().to_str().unwrap().parse().unwrap();
            let socket: OwnedFd = pidfd_getfd(&qemu, number, PidfdGetfdFlags::empty()).unwrap();
            UnixStream::from(socket)
                .shutdown(std::net::Shutdown::Both)
                .unwrap();
            cut += 1;
        }
    }
    assert_eq!(cut, 1, "no connection of the node's");
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn a_machine_that_stands_still_is_found_by_a_node_that_cannot_talk_to_it_at_first() {
    let (mut fixture, _) = stands_still();
    let path = monitor(&fixture);
    fixture.cluster.node_mut("a").kill();
    // Another client holds the monitor, which serves one at a time.
    let somebody = wait_for(PATIENCE, || UnixStream::connect(&path).ok()).unwrap();
    fixture.cluster.node_mut("a").start(&[]).unwrap();
    fixture.is_there(true);
    std::thread::sleep(MOMENT);
    assert_eq!(shown(&fixture)["state"], "paused", "{}", shown(&fixture));
    drop(somebody);
    goes_on(&fixture);
    stop(&fixture);
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY='--test image_disks'"]
fn a_machine_that_stands_still_is_known_as_such_though_its_monitor_is_lost_at_once() {
    let (mut fixture, _) = stands_still();
    let (path, pid) = (monitor(&fixture), qemu(&fixture));
    let log = fixture.a().log_path().to_owned();
    let a = fixture.cluster.node_mut("a");
    a.kill();
    std::thread::scope(|scope| {
        // The node has just connected, and not sent a query yet.
        let point = ("vm::take-up", "sleep(4000)");
        scope.spawn(move || a.start(&[point]).unwrap());
        let reached = || {
            let log = std::fs::read_to_string(&log).unwrap();
            log.contains(point.0).then_some(())
        };
        assert!(wait_for(PATIENCE, reached).is_some());
        cut_monitor(pid, &path);
    });
    fixture.is_there(true);
    goes_on(&fixture);
    stop(&fixture);
}

#[test]
fn a_machine_that_is_killed_while_it_stands_still_leaves_its_disk_as_it_was() {
    let (fixture, mut model) = stands_still();
    kill_process(qemu(&fixture), Signal::KILL).unwrap();
    comes_to(&fixture, "stopped");
    let problem = shown(&fixture)["problem"].to_string();
    says(&problem, &["QEMU ended"]);
    // The next machine waits as the first did, and goes on.
    run(&fixture);
    comes_to(&fixture, "paused");
    fixture.is_there(true);
    goes_on(&fixture);
    stop(&fixture);
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}
