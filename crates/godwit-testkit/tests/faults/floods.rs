//! Endless repetitions by a guest, a client or a stranger do not fill the log.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use godwit_testkit::Node;
use godwit_testkit::nbd::{Command, Request};
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario};

const DISK: &str = "noisy";

/// Writes of a client in flight at once.
const AT_ONCE: u64 = 64;

/// Number of refused writes.
const REFUSED: u64 = 50_000;

/// Number of clients, front ends and strangers that come and go.
const VISITS: usize = 400;

fn log(node: &Node) -> String {
    node.log()
}

/// Sends writes, all of which fail.
fn write_in_vain(node: &Node) {
    let connection = node.connect(DISK);
    let (mut reader, mut writer) = connection.split();
    let data = [7; 4096];
    for round in 0..REFUSED / AT_ONCE {
        for number in 0..AT_ONCE {
            let request = Request::new(
                Command::Write,
                number,
                (round * AT_ONCE + number) % 1024 * 4096,
                4096,
            );
            writer.send(&request, &data).unwrap();
        }
        for _ in 0..AT_ONCE {
            assert_ne!(reader.reply().unwrap().error, 0, "the disk took a write");
        }
    }
    writer.disconnect();
}

/// Sends bytes without a meaning, and waits until the node hangs up.
fn talk_nonsense(mut wire: impl Read + Write) {
    // The node may hang up before the last byte.
    let _ = wire.write_all(&[0xee; 64]);
    let _ = wire.read(&mut [0; 64]);
}

#[test]
fn a_flood_of_log_lines_is_counted_instead() {
    let (_turn, mut cluster) = Scenario::shared().start(&["a"]);
    let node = cluster.node_mut("a");
    node.create_disk(DISK, "16M");
    node.restart(&[("disk::request::write", "return(5)")]);
    let before = log(node).lines().count();

    write_in_vain(node);
    for _ in 0..VISITS {
        drop(node.connect(DISK));
        talk_nonsense(UnixStream::connect(node.vhost_socket(DISK)).unwrap());
        talk_nonsense(TcpStream::connect(node.spec().listen).unwrap());
    }

    let lines = log(cluster.node("a")).lines().count() - before;
    println!("{lines} lines");
    assert!(lines < 1000, "{lines} lines of log");

    // The flood has ended, and the suppressed lines are reported nevertheless.
    let told = |text: &str| {
        let more = |line: &&str| line.contains(" more like this ") && line.contains(text);
        log(cluster.node("a")).lines().any(|line| more(&line))
    };
    for text in [
        "the image reported an error",
        "client attached",
        "virtual machine attached",
    ] {
        let found = wait_for(PATIENCE, || told(text).then_some(()));
        assert!(
            found.is_some(),
            "nothing tells what was left out of {text:?}"
        );
    }
}
