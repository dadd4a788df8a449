//! Unmodified programs without any knowledge of Godwit, on a disk of a node.

use std::path::Path;
use std::process::Command;

use godwit_testkit::Node;
use godwit_testkit::client::RawImage;
use godwit_testkit::cluster::issue;
use godwit_testkit::fio::{FioLoad, Requests};
use godwit_testkit::image::{first_difference, write_random};
use godwit_testkit::nbd::{self, Request};
use godwit_testkit::process::{run, words};
use godwit_testkit::scenario::{PATIENCE, Scenario, says, until};
use serde_json::Value;

const SIZE: u64 = 64 << 20;

/// Runs a program, and returns its output.
fn text(program: &str, args: &[&str]) -> String {
    let output = run(Command::new(program).args(args)).unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Does the same with a command line whose words have no spaces.
fn tell(line: &str) -> String {
    let words = words(line);
    text(words[0], &words[1..])
}

fn json(line: &str) -> Value {
    serde_json::from_str(&tell(line)).unwrap()
}

/// Lets qemu-io do all of this in turn on a disk of this format.
fn qemu_io(format: &str, commands: &[&str], uri: &str) -> String {
    let mut args = vec!["-f", format, "-t", "none", "-d", "unmap"];
    args.extend(commands.iter().flat_map(|command| ["-c", command]));
    args.push(uri);
    text("qemu-io", &args)
}

fn disk(node: &Node, name: &str) -> String {
    node.create_disk(name, &SIZE.to_string());
    node.nbd(name).uri()
}

fn assert_same(node: &Node, name: &str, image: &Path) {
    let mut served = node.connect(name);
    let mut file = RawImage::open(image).unwrap();
    assert_eq!(
        first_difference(&mut served, &mut file, 0..SIZE).unwrap(),
        None
    );
}

#[test]
fn nbdinfo_sees_what_the_disk_can_do() {
    let (_turn, cluster) = Scenario::alone().start(&["a"]);
    let uri = disk(cluster.node("a"), "info");
    let info = json(&format!("nbdinfo --json {uri}"));
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], SIZE);
    for can in [
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        assert_eq!(export[can], true, "{can} in {export}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 512, "{export}");
    assert!(tell(&format!("nbdinfo --list {uri}")).contains("info"));
    assert!(run(Command::new("nbdinfo").arg(cluster.node("a").nbd("other").uri())).is_err());
}

#[test]
fn clients_see_which_ranges_are_allocated() {
    let (_turn, cluster) = Scenario::alone().start(&["a"]);
    let uri = disk(cluster.node("a"), "map");
    let map = || {
        let map = json(&format!("nbdinfo --map --json {uri}"));
        let ranges = map.as_array().unwrap().iter();
        let of = |range: &Value| {
            let number = |key: &str| range[key].as_u64().unwrap();
            (number("offset"), number("length"), number("type"))
        };
        ranges.map(of).collect::<Vec<_>>()
    };
    assert_eq!(map(), [(0, SIZE, 3)]);
    qemu_io("raw", &["write -P 7 1M 1M"], &uri);
    let (mib, rest) = (1 << 20, SIZE - (2 << 20));
    assert_eq!(map(), [(0, mib, 3), (mib, mib, 0), (2 << 20, rest, 3)]);
    let seen = json(&format!("qemu-img map -f raw --output=json {uri}"));
    assert_eq!(seen[1]["start"], mib, "{seen}");
    assert_eq!(seen[1]["data"], true, "{seen}");
    assert_eq!(seen[2]["zero"], true, "{seen}");
    qemu_io("raw", &["discard 1M 1M"], &uri);
    assert_eq!(map(), [(0, SIZE, 3)]);
    let info = tell(&format!("nbdinfo --json {uri}"));
    says(&info, &["\"can_fast_zero\": true"]);
}

#[test]
fn nbdcopy_copies_in_both_directions() {
    let (turn, cluster) = Scenario::alone().start(&["a"]);
    let uri = disk(cluster.node("a"), "copy");
    let (image, back) = (cluster.dir().join("image"), cluster.dir().join("back"));
    write_random(&image, SIZE, turn.seed).unwrap();
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(&uri)).unwrap();
    assert_same(cluster.node("a"), "copy", &image);
    run(Command::new("nbdcopy").arg(&uri).arg(&back)).unwrap();
    assert_same(cluster.node("a"), "copy", &back);
    let other = disk(cluster.node("a"), "other");
    run(Command::new("nbdcopy").args(["--flush", &uri, &other])).unwrap();
    assert_same(cluster.node("a"), "other", &image);
}

#[test]
fn qemu_img_converts_compares_and_checks() {
    let (turn, cluster) = Scenario::alone().start(&["a"]);
    let uri = disk(cluster.node("a"), "convert");
    let image = cluster.dir().join("image");
    write_random(&image, SIZE, turn.seed).unwrap();
    let image = image.to_string_lossy().into_owned();
    tell(&format!("qemu-img convert -n -f raw -O raw {image} {uri}"));
    let compared = tell(&format!("qemu-img compare -f raw -F raw {image} {uri}"));
    says(&compared, &["Images are identical."]);
    let info = json(&format!("qemu-img info --output=json {uri}"));
    assert_eq!(info["virtual-size"], SIZE);

    // A qcow2 inside the disk has metadata that can be checked, over the same protocol.
    let other = disk(cluster.node("a"), "qcow2");
    tell(&format!("qemu-img create -f qcow2 {other} 32M"));
    qemu_io("qcow2", &["write -P 7 1M 5M", "discard 2M 1M"], &other);
    let checked = tell(&format!("qemu-img check -f qcow2 {other}"));
    says(&checked, &["No errors were found"]);
    qemu_io("qcow2", &["read -P 7 1M 1M", "read -P 7 4M 2M"], &other);

    // The disk differs as soon as one sector does.
    qemu_io("raw", &["write -P 9 12345k 512"], &uri);
    let differs =
        run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &image, &uri]));
    assert!(differs.is_err());
}

#[test]
fn qemu_io_flushes_discards_and_writes_zeroes() {
    let (_turn, cluster) = Scenario::alone().start(&["a"]);
    let uri = disk(cluster.node("a"), "io");
    let commands = [
        "write -P 0xa5 1M 3M",
        "flush",
        "read -P 0xa5 1M 3M",
        "write -z 1536k 4k",
        "write -z -u 2M 512",
        "discard 3M 1M",
        "write -f -P 0x5a 3584k 512",
        "aio_write -P 1 8M 64k",
        "aio_write -P 2 9M 64k",
        "aio_flush",
        "read -P 0xa5 1M 512k",
        "read -P 0 1536k 4k",
        "read -P 0xa5 1540k 508k",
        "read -P 0 2M 512",
        "read -P 0x5a 3584k 512",
        "read -P 1 8M 64k",
        "read -P 2 9M 64k",
    ];
    let printed = qemu_io("raw", &commands, &uri);
    assert!(
        !printed.contains("failed") && !printed.contains("error"),
        "{printed}"
    );
    let wrong = run(Command::new("qemu-io").args(["-f", "raw", "-c", "read -P 3 1M 512", &uri]));
    let noticed = wrong.map_or(true, |output| {
        String::from_utf8_lossy(&output.stdout).contains("Pattern verification failed")
    });
    assert!(noticed, "qemu-io would not have noticed wrong data");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let (_turn, cluster) = Scenario::alone().start(&["a"]);
    disk(cluster.node("a"), "fio");
    let load = FioLoad {
        requests: Requests::CheckedWrites,
        region: 0..SIZE,
        rate: Some(40_000_000),
        depth: 16,
        runtime: PATIENCE,
        compressible: false,
    };
    let fio = load
        .start(&cluster.node("a").nbd("fio"), cluster.dir())
        .unwrap();
    std::thread::sleep(std::time::Duration::from_secs(4));
    let report = fio.stop().unwrap();
    assert_eq!(report.error, 0, "{}", report.messages);
    assert!(report.samples.iter().filter(|sample| sample.write).count() > 1000);
    assert!(report.samples.iter().filter(|sample| !sample.write).count() > 1000);
}

fn warnings(node: &Node) -> Vec<String> {
    let log = node.log();
    let warnings = log.lines().filter(|line| line.contains(" WARN "));
    warnings.map(str::to_owned).collect()
}

/// Time in which a few short requests are answered.
const ANSWERED: std::time::Duration = std::time::Duration::from_millis(500);

#[test]
fn a_client_may_leave_without_its_last_answers() {
    let (_turn, cluster) = Scenario::alone().start(&["a"]);
    let node = cluster.node("a");
    disk(node, "left");
    let log = || node.log();
    let gone =
        || log().matches("client left").count() + log().matches("client disconnected").count();
    // An unannounced departure meets the answers. An announcement may be read before or after that. Short answers are
    // all in the socket by the time of the departure, which resets the connection.
    let departures = [
        (1 << 20, true),
        (1 << 20, false),
        (4096, false),
        (1 << 20, true),
    ];
    for (before, (length, announces)) in departures.into_iter().enumerate() {
        let (reader, mut writer) = node.connect("left").split();
        for cookie in 0..16 {
            let request = Request::new(nbd::Command::Read, cookie, 0, length);
            writer.send(&request, &[]).unwrap();
        }
        if length == 4096 {
            std::thread::sleep(ANSWERED);
        }
        if announces {
            writer.disconnect();
        }
        drop((reader, writer));
        until("the node notices", || gone() > before);
    }
    assert_eq!(warnings(node), [""; 0]);
}

#[test]
fn standard_clients_attach_over_tls() {
    let (turn, cluster) = Scenario::alone().start(&["a"]);
    let node = cluster.node("a");
    disk(node, "tls");
    let godwit = &cluster.options().godwit;
    issue(godwit, cluster.certificates(), "guest", &["--nbd-client"]).unwrap();
    let address = node.spec().nbd_listen;
    let certificates = cluster.certificates().join("guest");
    let uri = format!(
        "nbds://{address}/tls?tls-certificates={}",
        certificates.display()
    );
    let info = json(&format!("nbdinfo --json {uri}"));
    assert_eq!(info["TLS"], true, "{info}");
    let image = cluster.dir().join("image");
    write_random(&image, SIZE, turn.seed).unwrap();
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(&uri)).unwrap();
    assert_same(node, "tls", &image);
    assert_eq!(warnings(node), [""; 0]);

    let plain = format!("nbd://{address}/tls");
    assert!(
        run(Command::new("nbdinfo").arg(plain)).is_err(),
        "plain TCP is refused"
    );
    let anonymous = format!("nbds://{address}/tls");
    assert!(
        run(Command::new("nbdinfo").arg(anonymous)).is_err(),
        "so is a client without a name"
    );
}

/// QEMU loads certificates with checks of its own, stricter than those of the TLS library.
#[test]
fn qemu_attaches_over_tls_with_an_issued_certificate() {
    let (_turn, cluster) = Scenario::alone().start(&["a"]);
    let node = cluster.node("a");
    disk(node, "tls");
    let godwit = &cluster.options().godwit;
    issue(godwit, cluster.certificates(), "guest", &["--nbd-client"]).unwrap();
    let address = node.spec().nbd_listen;
    let credentials = format!(
        "tls-creds-x509,id=tls,endpoint=client,dir={}",
        cluster.certificates().join("guest").display()
    );
    let image = format!(
        "driver=raw,file.driver=nbd,file.export=tls,file.tls-creds=tls,file.server.type=inet,\
         file.server.host={},file.server.port={}",
        address.ip(),
        address.port()
    );
    let printed = text(
        "qemu-io",
        &[
            "--object",
            &credentials,
            "--image-opts",
            "-c",
            "write -P 0xa5 1M 64k",
            "-c",
            "flush",
            "-c",
            "read -P 0xa5 1M 64k",
            &image,
        ],
    );
    let read = "read 65536/65536 bytes at offset 1048576";
    assert!(
        printed.contains(read) && !printed.contains("failed"),
        "{printed}"
    );
    assert_eq!(warnings(node), [""; 0]);
}

#[test]
fn a_client_attaches_over_tls_what_its_certificate_is_for() {
    let (_turn, cluster) = Scenario::alone().start(&["a"]);
    let node = cluster.node("a");
    for name in ["mine", "too", "other"] {
        disk(node, name);
    }
    let godwit = &cluster.options().godwit;
    let certificates = cluster.certificates();
    let some = ["--role", "nbd-client", "--disk", "mine", "--disk", "too"];
    issue(godwit, certificates, "some", &some).unwrap();
    issue(godwit, certificates, "all", &["--role", "nbd-client"]).unwrap();
    for role in ["reader", "node", "operator"] {
        issue(godwit, certificates, role, &["--role", role]).unwrap();
        let directory = certificates.join(format!("{role}-layout"));
        std::fs::create_dir(&directory).unwrap();
        for (from, to) in [
            (String::from("ca.pem"), "ca-cert.pem"),
            (format!("{role}.pem"), "client-cert.pem"),
            (format!("{role}.key"), "client-key.pem"),
        ] {
            std::fs::copy(certificates.join(from), directory.join(to)).unwrap();
        }
    }
    let look = |holder: &str, more: &[&str], disk: &str| {
        let uri = format!(
            "nbds://{}/{disk}?tls-certificates={}",
            node.spec().nbd_listen,
            certificates.join(holder).display()
        );
        run(Command::new("nbdinfo").args(more).arg(uri))
    };
    for (holder, allowed) in [
        ("some", &["mine", "too"][..]),
        ("all", &["mine", "too", "other"]),
        ("operator-layout", &["mine", "too", "other"]),
        ("reader-layout", &[]),
        ("node-layout", &[]),
    ] {
        for disk in ["mine", "too", "other"] {
            match look(holder, &["--size"], disk) {
                Ok(_) => assert!(allowed.contains(&disk), "{holder} attached {disk}"),
                Err(error) => {
                    let told = error.to_string();
                    assert!(!allowed.contains(&disk), "{holder}: {told}");
                    assert!(told.contains("policy"), "{holder} {disk}: {told}");
                }
            }
        }
    }
    let log = node.log();
    let refused = "does not allow to attach disk other";
    assert!(log.contains(refused), "who was refused is told: {log}");
    let listed = look("some", &["--list", "--json"], "").unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    says(&listed, &["mine", "too"]);
    assert!(!listed.contains("other"), "{listed}");
}
