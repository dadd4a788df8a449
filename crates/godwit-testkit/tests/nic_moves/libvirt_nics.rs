//! A machine of libvirt's, with a NIC of a node: behind `make test-slow`, since libvirt has to be installed. Each
//! host has a separate libvirt, with separate folders in place of `/run` and `/etc/libvirt`.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::network::{Lan, Namespace, Pinger, Talk};
use godwit_testkit::process::{self, Process, wait_for};
use godwit_testkit::vm::{GuestImage, GuestLoad, GuestNetwork};
use serde_json::Value;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const ECHO: u16 = 7000;
const NIC: &str = "web";
const VM: &str = "guest";
const PATIENCE: Duration = Duration::from_secs(90);
const PING_EVERY: Duration = Duration::from_millis(20);

/// A libvirt daemon on a host.
struct Libvirt {
    _daemon: Process,
    uri: String,
}

impl Libvirt {
    /// Starts a daemon with the files in this folder. `number` distinguishes the hosts.
    fn start(host: &Namespace, folder: &Path, number: u8) -> io::Result<Self> {
        let places = [
            ("run", "/run"),
            ("etc", "/etc/libvirt"),
            ("lib", "/var/lib/libvirt"),
            ("log", "/var/log/libvirt"),
            ("cache", "/var/cache/libvirt"),
        ];
        let mut script = String::from("set -e\n");
        for (own, place) in places {
            let own = folder.join(own);
            std::fs::create_dir_all(&own)?;
            std::fs::create_dir_all(place)?;
            script += &format!("mount --bind '{}' {place}\n", own.display());
        }
        script += "exec libvirtd\n";
        let qemu = "user = 'root'\ngroup = 'root'\nsecurity_driver = 'none'\nnamespaces = []\n\
                    cgroup_controllers = []\nremember_owner = 0\nstdio_handler = 'file'\n";
        std::fs::write(folder.join("etc/qemu.conf"), qemu.replace('\'', "\""))?;
        let daemon = format!(
            "host_uuid = \"11111111-2222-3333-4444-5555555555{number:02}\"\nauth_unix_rw = \"none\"\n\
             log_outputs = \"3:file:{}\"\n",
            folder.join("log/daemon.log").display()
        );
        std::fs::write(folder.join("etc/libvirtd.conf"), daemon)?;
        let mut command = host.command();
        command.args([
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            &script,
        ]);
        let daemon = Process::spawn(&mut command)?;
        let socket = folder.join("run/libvirt/libvirt-sock");
        let started = Self {
            _daemon: daemon,
            uri: format!("qemu+unix:///system?socket={}", socket.display()),
        };
        let answers = || started.virsh(&["version"]).ok();
        match wait_for(PATIENCE, answers) {
            Some(_) => Ok(started),
            None => Err(io::Error::other("libvirt does not answer")),
        }
    }

    fn virsh(&self, words: &[&str]) -> io::Result<String> {
        let mut command = Command::new("virsh");
        command.args(["-c", &self.uri]).args(words);
        let output = process::run(&mut command)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // The daemon's QEMU would outlive the daemon. A missing QEMU is no failure.
        let _ = self.virsh(&["destroy", VM]);
    }
}

/// Creates the NIC at a node, and returns the node's XML for libvirt.
fn create(node: &Node, nic: &str) -> io::Result<String> {
    let told = node.godwit(&["nic", "create", NIC, nic]).text()?;
    let from = told.find("<interface").expect("an interface");
    Ok(told[from..].to_owned())
}

fn shown(node: &Node) -> io::Result<Value> {
    Ok(node.godwit(&["nic", "show", NIC]).json()?)
}

/// Returns a machine that boots the guest without disks.
fn domain(image: &GuestImage, folder: &Path, interface: &str) -> String {
    let load = GuestLoad {
        memory_mb: 8,
        network: Some(GuestNetwork {
            nic: String::new(),
            address: format!("{GUEST}/24"),
            echo_port: ECHO,
            ..GuestNetwork::default()
        }),
        ..GuestLoad::default()
    };
    format!(
        "<domain type='qemu'><name>{VM}</name><memory unit='MiB'>192</memory><vcpu>1</vcpu>\
         <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
         <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{}</kernel><initrd>{}</initrd>\
         <cmdline>{}</cmdline></os><features><acpi/></features>\
         <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{interface}\
         <serial type='file'><source path='{}'/></serial><memballoon model='none'/></devices></domain>",
        image.kernel().display(),
        image.initramfs().display(),
        load.kernel_arguments(0),
        folder.join("console.log").display(),
    )
}

fn file(path: PathBuf, text: &str) -> io::Result<String> {
    std::fs::write(&path, text)?;
    Ok(path.display().to_string())
}

#[test]
#[ignore = "needs libvirt: make test-slow ONLY=libvirt_nics"]
fn a_conversation_goes_on_while_libvirt_moves_its_machine_and_a_node_restarts() -> io::Result<()> {
    let image = GuestImage::build_or_cached()?;
    let lan = Lan::new(2)?;
    let hosts = [("a", Some(&lan.hosts()[0])), ("b", Some(&lan.hosts()[1]))];
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?;
    for name in ["a", "b"] {
        cluster.node_mut(name).start(&[])?;
    }
    let dir = cluster.dir().to_owned();
    let interface = create(cluster.node("a"), "tap=tap0")?;
    let mac = shown(cluster.node("a"))?["mac"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let there = create(cluster.node("b"), &format!("tap=tap0,mac={mac}"))?;

    let at_a = Libvirt::start(&lan.hosts()[0], &dir.join("libvirt-a"), 1)?;
    let at_b = Libvirt::start(&lan.hosts()[1], &dir.join("libvirt-b"), 2)?;
    let xml = file(dir.join("guest.xml"), &domain(&image, &dir, &interface))?;
    process::run(Command::new("virt-xml-validate").args([&xml, "domain"]))?;
    at_a.virsh(&["create", &xml])?;
    let attached = |node: &Node| (shown(node).ok()?["attached"] == true).then_some(());
    wait_for(PATIENCE, || attached(cluster.node("a"))).expect("QEMU uses the NIC");

    let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 256 << 10);
    let talks = || {
        let before = talk.bytes();
        let goes_on = wait_for(PATIENCE, || (talk.bytes() > before).then_some(()));
        goes_on.unwrap_or_else(|| {
            let said = std::fs::read_to_string(dir.join("console.log"));
            panic!("the conversation stands still at {before} bytes: {said:?}")
        });
    };
    talks();
    cluster.die_and_start("a");
    wait_for(PATIENCE, || attached(cluster.node("a"))).expect("QEMU uses the NIC again");
    talks();

    let pinger = Pinger::start(lan.switch(), GUEST, PING_EVERY)?;
    let migratable = at_a.virsh(&["dumpxml", "--migratable", VM])?;
    let socket = |text: &str| {
        let (_, rest) = text.split_once("path='").expect("a path");
        rest.split_once('\'').expect("its end").0.to_owned()
    };
    let moved = migratable.replace(&socket(&interface), &socket(&there));
    assert_ne!(moved, migratable);
    let moved = file(dir.join("moved.xml"), &moved)?;
    let to = format!("tcp://{}", lan.hosts()[1].address());
    at_a.virsh(&[
        "migrate",
        "--live",
        VM,
        &at_b.uri,
        "--migrateuri",
        &to,
        "--xml",
        &moved,
    ])?;
    assert!(attached(cluster.node("b")).is_some());
    talks();
    let gone = || (shown(cluster.node("a")).ok()?["attached"] == false).then_some(());
    wait_for(PATIENCE, gone).expect("QEMU at a has ended");
    let pings = pinger.finish(Duration::from_secs(5))?;
    let lost = pings.iter().filter(|ping| ping.answers == 0).count();
    println!("{lost} of {} pings were lost", pings.len());
    let talked = talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    assert_eq!(at_b.virsh(&["domstate", VM])?.trim(), "running");
    Ok(())
}
